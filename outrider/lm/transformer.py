"""Any `transformers` causal LM as an Outrider `LanguageModel`."""

import hashlib
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from transformers import PreTrainedModel

from outrider.control.pass_sizes import FOURS, PassSizes
from outrider.errors import ModelUnsupported
from outrider.lm import attention
from outrider.lm.attention.flex import FlexPasses
from outrider.lm.compilation import can_compile, compile_layers, find_layers, uncompile_layers
from outrider.lm.features import FeatureStore
from outrider.lm.fingerprint import model_fingerprint, weights_fingerprint
from outrider.lm.kv_blocks import KVBlocks
from outrider.lm.kv_cache import PagedKVCache
from outrider.lm.kv_storage import KVStorage
from outrider.lm.model import ModelInfo, SessionStep
from outrider.lm.packed_linear import ROW_BLOCK, are_all_packed, pack_linears
from outrider.lm.pages import KVUsage, PagePool
from outrider.lm.pass_plan import PassPlan
from outrider.lm.ranks import Ranks
from outrider.tokens import NodeKind, ProposalNode, ProposalTree, TokenSpan

_LOG: Final = logging.getLogger(__name__)
_PAGE_LEN: Final = 32
_MIN_PAGES: Final = 4
_UNBOUNDED_LEN: Final = 1 << 20
_PROBE_LEN: Final = 12
_PACKED_ROW_STEP: Final = 2
_PROBE_TOLERANCE: Final = 0.05

AnyPass = attention.BlockPass | attention.FlexPass | attention.SdpaPass | attention.ShapePass


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is run.

    Attributes:
        kv_budget_bytes: memory of the KV cache of all sessions, at most.
        compiles: whether to compile the layers, where that can be done.
        packs: whether to lay out bfloat16 weights for the CPU, where that is supported.
        ranks: the processes among which the model's weights are split; None where they are not. Split weights are
            neither compiled nor packed. All ranks make their model at the same time.
        invariant: whether a position's bits must not depend on the pass. Without, long prompts are faster and keys and
            values take half of the memory (in 16 bits); layers are not compiled.
    """

    kv_budget_bytes: int = 1 << 30
    compiles: bool = False
    packs: bool = True
    ranks: Ranks | None = None
    invariant: bool = True


class TransformersModel:
    """A loaded model that attends through `attention`, so that a position's bits do not depend on the pass.

    The constructor runs a few probe passes. A model that does not send every layer through the attention interface, or
    keeps state that cannot roll back, is refused there; one whose bits do depend on the pass says so in
    `info.numerics`.

    Args:
        name: as configured.
        model: in evaluation mode, its weights where they shall stay.
        tokenizer_fingerprint: see `ModelInfo`.
        options: how it is run.

    Raises:
        ModelUnsupported: the model cannot be served exactly, or the budget holds no session; the message says why.
    """

    def __init__(
        self, name: str, model: PreTrainedModel, tokenizer_fingerprint: str, options: EngineOptions | None = None
    ) -> None:
        options = options or EngineOptions()
        self._model = model
        self._device = model.device
        self._num_layers: int = model.config.get_text_config().num_hidden_layers
        info = self._describe(name, tokenizer_fingerprint)
        # After the fingerprint, which reads the weights as they were loaded.
        self._ranks: Ranks | None = None
        self._invariant = options.invariant
        compiles = options.compiles and options.invariant and not options.ranks and can_compile(self._device)
        num_packed = pack_linears(model, joins=compiles) if options.packs and not options.ranks else 0
        # Products of weights that are left as they were vary with any number of rows but a multiple of four.
        sizes = PassSizes(ROW_BLOCK, _PACKED_ROW_STEP) if are_all_packed(model) else FOURS
        self._row_step = sizes.step
        shapes = self._find_shapes()
        # float32 on a CPU: products of 16-bit keys are slower there and vary with the number of rows.
        kv_dtype = torch.float32 if self._device.type == "cpu" and options.invariant else model.dtype
        token_bytes = sum(shape.num_values for shape in shapes.shapes) * kv_dtype.itemsize
        num_pages = options.kv_budget_bytes // (_PAGE_LEN * token_bytes)
        if num_pages < _MIN_PAGES:
            raise ModelUnsupported(
                f"the KV cache budget of {options.kv_budget_bytes} bytes holds {num_pages} pages of {_PAGE_LEN} "
                f"tokens, {_PAGE_LEN * token_bytes} bytes each; at least {_MIN_PAGES} are needed"
            )
        self._storage = KVStorage(shapes.shapes, num_pages + 1, _PAGE_LEN, kv_dtype, self._device)
        shapes.attach(self._storage)
        self._pool, self._features = self._pages(num_pages, token_bytes, info)
        self._flex = self._compile() if compiles else None
        kernel = f"flex-pages-{_PAGE_LEN}" if self._flex else f"blocks-{attention.BLOCK_LEN}"
        kernel = kernel if options.invariant else "sdpa"
        numerics = f"{info.numerics} attention-{kernel}-{str(kv_dtype).removeprefix('torch.')}"
        split = f" ranks-{options.ranks.num}" if options.ranks else ""
        numerics = f"{numerics} linear-{_linear_kind(model, num_packed)}{split}"
        info = replace(info, numerics=numerics, pass_sizes=sizes, kv_token_bytes=token_bytes)
        self._info = self._probe(info)
        # Anew: what the probes left is nobody's.
        self._pool, self._features = self._pages(num_pages, token_bytes, self._info)
        # So far all ranks have run the same probes side by side; from here on the first one leads.
        self._ranks = options.ranks
        # Of split weights each rank has its own part of every page.
        self._blocks = None if options.ranks else KVBlocks(self._storage, self._pool, self._features)

    @property
    def info(self) -> ModelInfo:
        """Identity and limits."""
        return self._info

    @property
    def features(self) -> FeatureStore | None:
        """Features for drafts; None where the model has no list of layers."""
        return self._features if self._info.num_layers else None

    @property
    def blocks(self) -> KVBlocks | None:
        """The KV cache in parts that can be kept elsewhere; None where the weights are split."""
        return self._blocks

    @property
    def kv_usage(self) -> KVUsage:
        """How full the KV cache is."""
        return self._pool.usage

    def new_cache(self, salt: bytes = b"") -> PagedKVCache:
        """Returns an empty KV cache for one session, which shares pages with others of the same salt."""
        return PagedKVCache(self._pool, salt)

    @torch.no_grad()
    def forward(self, steps: Sequence[SessionStep]) -> list[torch.Tensor]:
        """Runs one pass over all steps; see `LanguageModel.forward`."""
        plan = _planned(steps)
        logits = (
            self._ranks.run(plan.to_numbers(), lambda: self._run_plan(plan)) if self._ranks else self._run_plan(plan)
        )
        for step in steps:
            _paged(step).note_run()
        return _split(logits, steps)

    @torch.no_grad()
    def follow(self, numbers: Sequence[int]) -> None:
        """Runs this rank's share of a pass that the first rank has planned; see `Ranks.follow`."""
        self._run_plan(PassPlan.from_numbers(numbers))

    def _run_plan(self, plan: PassPlan) -> torch.Tensor:
        """Returns the logits of the rows that are wanted: [wanted, V]."""
        self._storage.prepare(plan.new_pages, plan.copies)
        self._features.prepare(plan.copies)
        logits = self._run(plan.token_ids, plan.positions, plan.wanted or [0], self._made(plan.rows))
        self._features.write(plan.rows)
        return logits

    def _made(self, rows: attention.PassRows) -> AnyPass:
        if self._flex:
            return self._flex.make(rows)
        return (attention.BlockPass if self._invariant else attention.SdpaPass)(rows, self._storage)

    def _run(
        self,
        token_ids: list[int],
        positions: list[int],
        wanted: list[int],
        made: AnyPass,
    ) -> torch.Tensor:
        output = self._model(
            input_ids=self._row(token_ids),
            position_ids=self._row(positions),
            use_cache=False,
            logits_to_keep=torch.tensor(self._filled(wanted), device=self._device),
            outrider_pass=made,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _row(self, values: list[int]) -> torch.Tensor:
        return torch.tensor([self._filled(values)], device=self._device)

    def _filled(self, values: list[int]) -> list[int]:
        """Repeats the last value, for as many rows as a pass has."""
        return values + [values[-1]] * (attention.filled_rows(len(values), self._row_step) - len(values))

    @torch.no_grad()
    def _find_shapes(self) -> attention.ShapePass:
        shapes = attention.ShapePass()
        try:
            self._run([3], [0], [0], shapes)
        except TypeError as error:
            raise ModelUnsupported(f"the model does not take Outrider's attention: {error}") from error
        missing = self._num_layers - len(set(shapes.modules))
        if missing:
            raise ModelUnsupported(
                f"{missing} of {self._num_layers} layers do not use the attention interface; they cannot roll back"
            )
        return shapes

    def _compile(self) -> FlexPasses | None:
        """Compiles the layers and runs them once; None, and they stay as they are, where that fails."""
        layers = find_layers(self._model, self._num_layers)
        if not layers:
            _LOG.warning("the model has no list of layers: it runs uncompiled")
            return None
        _LOG.info("compiling the model's layers, which takes seconds, and longer the first time")
        self._flex = FlexPasses(self._storage, self._row_step)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler's, about its own code
                compile_layers(layers)
                # More writes than rows: what differs in the first pass is a symbol of its own.
                self._run_as_branch(tuple(range(3, 3 + _PROBE_LEN)))
        except RuntimeError as error:
            _LOG.warning("the model runs uncompiled: %s", str(error).strip().splitlines()[0])
            uncompile_layers(layers)
            return None
        return self._flex

    def _pages(self, num_pages: int, token_bytes: int, info: ModelInfo) -> tuple[PagePool, FeatureStore]:
        root = hashlib.sha256(f"{info.fingerprint} {info.numerics}".encode()).digest()
        pool = PagePool(num_pages, _PAGE_LEN, _PAGE_LEN * token_bytes, root)
        layers = find_layers(self._model, self._num_layers)
        return pool, FeatureStore(self._model.base_model, layers, info.hidden_size, self._storage, pool)

    def _describe(self, name: str, tokenizer_fingerprint: str) -> ModelInfo:
        config = self._model.config.get_text_config()
        return ModelInfo(
            name=name,
            fingerprint=model_fingerprint(self._model),
            tokenizer_fingerprint=tokenizer_fingerprint,
            numerics=(
                f"{self._device.type} {str(self._model.dtype).removeprefix('torch.')} torch-{torch.__version__} "
                f"threads-{torch.get_num_threads()}"
            ),
            vocabulary_size=config.vocab_size,
            max_session_len=getattr(config, "max_position_embeddings", None) or _UNBOUNDED_LEN,
            eos_token_ids=_eos_token_ids(self._model),
            kv_token_bytes=0,
            num_layers=len(find_layers(self._model, self._num_layers)),
            hidden_size=config.hidden_size,
            weights_fingerprint=weights_fingerprint(self._model),
        )

    def _probe(self, info: ModelInfo) -> ModelInfo:
        """Runs tokens at once, in parts behind dropped proposals, and as a kept side branch; compares the results."""
        span = tuple(3 + index % (info.vocabulary_size - 3) for index in range(_PROBE_LEN))
        cache = self.new_cache()
        whole = self.forward([SessionStep(cache, TokenSpan(0, span))])[0][0]
        cache.release()
        others = (self._run_in_parts(span), self._run_as_branch(span))
        if any((other - whole).abs().max() > _PROBE_TOLERANCE * whole.abs().max() for other in others):
            raise ModelUnsupported("the model keeps state that does not roll back with its KV cache")
        # Bits that happen to be equal here need not be elsewhere, where nothing makes them so.
        is_invariant = self._invariant and all(torch.equal(other, whole) for other in others)
        return replace(info, numerics=f"{info.numerics} {'invariant' if is_invariant else 'varying'}")

    def _run_in_parts(self, span: tuple[int, ...]) -> torch.Tensor:
        cache = self.new_cache()
        for start, end in ((0, 5), (5, 6), (6, 9), (9, len(span))):
            dropped = _tree([(0, 1), (1, 2), (0, 2)])
            logits = self.forward([SessionStep(cache, TokenSpan(start, span[start:end]), dropped)])[0]
            cache.keep(())
        cache.release()
        return logits[0]

    def _run_as_branch(self, span: tuple[int, ...]) -> torch.Tensor:
        cache = self.new_cache()
        tree = _tree([(0, 1), (0, span[-2]), (1, 2), (2, span[-1]), (2, 2)])
        logits = self.forward([SessionStep(cache, TokenSpan(0, span[:-2]), tree)])[0]
        cache.keep((2, 4))
        cache.truncate(len(span) - 1)
        again = self.forward([SessionStep(cache, TokenSpan(len(span) - 1, span[-1:]))])[0][0]
        cache.release()
        return logits[4] if torch.equal(logits[4], again) else again


def _planned(steps: Sequence[SessionStep]) -> PassPlan:
    layouts = [_paged(step).lay_out(step.span, step.tree) for step in steps]
    return PassPlan(
        attention.lay_out_rows(layouts, _PAGE_LEN),
        [page for layout in layouts for page in layout.new_pages],
        [copy for layout in layouts for copy in layout.copies],
        *_pack(steps),
    )


def _paged(step: SessionStep) -> PagedKVCache:
    if not isinstance(step.cache, PagedKVCache):
        raise TypeError("the cache was made by another model class")
    return step.cache


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


def _linear_kind(model: PreTrainedModel, num_packed: int) -> str:
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is None:
        return "packed" if num_packed else "plain"
    method = quantization["quant_method"] if isinstance(quantization, dict) else quantization.quant_method
    return str(getattr(method, "value", method))
