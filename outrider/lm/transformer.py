"""Any `transformers` causal LM as an Outrider `LanguageModel`."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from outrider.errors import ModelUnsupported
from outrider.lm import attention
from outrider.lm.kv_cache import BLOCK_LEN, BlockKVCache
from outrider.lm.model import ModelInfo, SessionStep
from outrider.lm.packed_linear import pack_linears
from outrider.tokens import NodeKind, ProposalNode, ProposalTree, TokenSpan

_SAMPLE_LEN = 64
_UNBOUNDED_LEN = 1 << 20
_PROBE_LEN = 12
_PROBE_TOLERANCE = 0.05


class TransformersModel:
    """A loaded model that attends through `attention`, so that a position's bits do not depend on the pass.

    The constructor runs a few probe passes. A model that does not send every layer through the attention interface, or
    keeps state that cannot roll back, is refused there; one whose bits do depend on the pass says so in
    `info.numerics`.

    Args:
        name: as configured.
        model: in evaluation mode, its weights where they shall stay.
        tokenizer_fingerprint: see `ModelInfo`.
        pack: whether to lay out bfloat16 weights for the CPU where that is supported.

    Raises:
        ModelUnsupported: the model cannot be served exactly; the message says why.
    """

    def __init__(self, name: str, model: PreTrainedModel, tokenizer_fingerprint: str, *, pack: bool = True) -> None:
        self._model = model
        self._device = model.device
        self._num_layers: int = model.config.get_text_config().num_hidden_layers
        info = self._describe(name, tokenizer_fingerprint)
        # After the fingerprint, which reads the weights as they were loaded.
        num_packed = pack_linears(model) if pack else 0
        numerics = f"{info.numerics} linear-{'packed' if num_packed else 'plain'}"
        self._info = self._probe(replace(info, numerics=numerics))

    @property
    def info(self) -> ModelInfo:
        """Identity and limits."""
        return self._info

    def new_cache(self) -> BlockKVCache:
        """Returns an empty KV cache for one session."""
        return BlockKVCache()

    @torch.no_grad()
    def forward(self, steps: Sequence[SessionStep]) -> list[torch.Tensor]:
        """Runs one pass over all steps; see `LanguageModel.forward`."""
        layout = attention.plan(steps, self._device)
        token_ids, positions, wanted = _pack(steps)
        output = self._model(
            input_ids=self._row(token_ids),
            position_ids=self._row(positions),
            use_cache=False,
            logits_to_keep=torch.tensor(_pad(wanted or [0]), device=self._device),
            outrider_pass=layout,
        )
        if len(layout.layers_seen) != self._num_layers:
            missing = self._num_layers - len(layout.layers_seen)
            raise ModelUnsupported(
                f"{missing} of {self._num_layers} layers do not use the attention interface; they cannot roll back"
            )
        return _split(output.logits[0], steps)

    def _row(self, values: list[int]) -> torch.Tensor:
        return torch.tensor([_pad(values)], device=self._device)

    def _describe(self, name: str, tokenizer_fingerprint: str) -> ModelInfo:
        config = self._model.config.get_text_config()
        return ModelInfo(
            name=name,
            fingerprint=_fingerprint(self._model),
            tokenizer_fingerprint=tokenizer_fingerprint,
            numerics=(
                f"{self._device.type} {str(self._model.dtype).removeprefix('torch.')} torch-{torch.__version__} "
                f"threads-{torch.get_num_threads()} attention-float32-blocks-{BLOCK_LEN}"
            ),
            vocabulary_size=config.vocab_size,
            max_session_len=getattr(config, "max_position_embeddings", None) or _UNBOUNDED_LEN,
            eos_token_ids=_eos_token_ids(self._model),
            kv_token_bytes=0,
        )

    def _probe(self, info: ModelInfo) -> ModelInfo:
        """Runs tokens at once, in parts behind dropped proposals, and as a kept side branch; compares the results."""
        span = tuple(3 + index % (info.vocabulary_size - 3) for index in range(_PROBE_LEN))
        cache = self.new_cache()
        try:
            whole = self.forward([SessionStep(cache, TokenSpan(0, span))])[0][0]
        except TypeError as error:
            raise ModelUnsupported(f"the model does not take Outrider's attention: {error}") from error
        others = (self._run_in_parts(span), self._run_as_branch(span))
        if any((other - whole).abs().max() > _PROBE_TOLERANCE * whole.abs().max() for other in others):
            raise ModelUnsupported("the model keeps state that does not roll back with its KV cache")
        is_invariant = all(torch.equal(other, whole) for other in others)
        return replace(
            info,
            numerics=f"{info.numerics} {'invariant' if is_invariant else 'varying'}",
            kv_token_bytes=cache.num_bytes // BLOCK_LEN,
        )

    def _run_in_parts(self, span: tuple[int, ...]) -> torch.Tensor:
        cache = self.new_cache()
        for start, end in ((0, 5), (5, 6), (6, len(span))):
            dropped = _tree([(0, 1), (1, 2), (0, 2)])
            logits = self.forward([SessionStep(cache, TokenSpan(start, span[start:end]), dropped)])[0]
            cache.keep(())
        return logits[0]

    def _run_as_branch(self, span: tuple[int, ...]) -> torch.Tensor:
        cache = self.new_cache()
        tree = _tree([(0, 1), (0, span[-2]), (1, 2), (2, span[-1]), (2, 2)])
        logits = self.forward([SessionStep(cache, TokenSpan(0, span[:-2]), tree)])[0]
        cache.keep((2, 4))
        cache.truncate(len(span) - 1)
        again = self.forward([SessionStep(cache, TokenSpan(len(span) - 1, span[-1:]))])[0][0]
        return logits[4] if torch.equal(logits[4], again) else again


def _tree(edges: list[tuple[int, int]]) -> ProposalTree:
    tree = ProposalTree()
    for parent, token_id in edges:
        tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED))
    return tree


def _pack(steps: Sequence[SessionStep]) -> tuple[list[int], list[int], list[int]]:
    """Returns token ids and positions of all rows, and the indices of the rows whose logits are wanted."""
    token_ids: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    for step in steps:
        first = len(token_ids)
        span, tree = step.span, step.tree
        token_ids += span.token_ids
        token_ids += [node.token_id for node in tree.nodes]
        positions += range(span.start, span.end)
        positions += [span.end + tree.depth(number) - 1 for number in range(1, len(tree) + 1)]
        if step.wants_logits:
            wanted += range(first + len(span.token_ids) - 1, len(token_ids))
    return token_ids, positions, wanted


def _pad(values: list[int]) -> list[int]:
    """Repeats the last value up to a multiple of `MIN_ROWS`.

    Measured with float32 linear layers on 2 threads: 1 to 3, 5 to 7 and 9 to 11 rows give other bits than 4, 8 and 12,
    because the rows are split between threads down to fewer than 4; bfloat16 differed for 1 row only.
    """
    return values + [values[-1]] * (-len(values) % attention.MIN_ROWS)


def _split(logits: torch.Tensor, steps: Sequence[SessionStep]) -> list[torch.Tensor]:
    parts = []
    first = 0
    for step in steps:
        num = 1 + len(step.tree) if step.wants_logits else 0
        parts.append(logits[first : first + num])
        first += num
    return parts


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    generation = model.generation_config
    eos = generation.eos_token_id if generation is not None else None
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def _fingerprint(model: PreTrainedModel) -> str:
    """Hashes the architecture and a sample of every weight: cheap, and different for any two models met in practice."""
    digest = hashlib.sha256(model.config.to_json_string(use_diff=True).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE_LEN)][:_SAMPLE_LEN]
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()
