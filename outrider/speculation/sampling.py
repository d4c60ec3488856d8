"""The distribution of the next token: logits of the target or the draft under the request's sampling parameters.

The order is vLLM's: constraint, minimum length, logit bias, penalties, then the temperature, min_p, top_k, top_p.
Distributions are computed in float64, for many positions at once; the bits of one depend on its own logits and history
alone.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import chain
from math import inf

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from outrider.parameters import SamplingParameters
from outrider.speculation.truncation import Support, top_k_weights, top_p_weights


class NoPossibleToken(ValueError):
    """The largest logit of a row is not finite: all are minus infinity, or one is no number."""


class TokenHistory:
    """The tokens before a position, for penalties: the set of prompt tokens, and the counts of output tokens.

    Args:
        prompt: token ids before the output.
        output: token ids of the output so far.
        parameters: of the request; tokens are stored only if they have penalties.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int], parameters: SamplingParameters) -> None:
        self.num_output = len(output)
        self._kept = parameters.needs_history
        self._prompt = frozenset(prompt) if self._kept else frozenset()
        self._output: dict[int, int] = {}
        if self._kept:
            self._count(output)

    def extended(self, token_ids: Sequence[int]) -> "TokenHistory":
        """Return a history with more output tokens, as along a branch of a proposal; this one is not changed."""
        longer = TokenHistory.__new__(TokenHistory)
        longer.num_output = self.num_output + len(token_ids)
        longer._kept, longer._prompt, longer._output = self._kept, self._prompt, self._output
        if self._kept and token_ids:
            longer._output = dict(self._output)
            longer._count(token_ids)
        return longer

    def seen(self) -> list[int]:
        """Return the distinct token ids of prompt and output, in any order."""
        return list(self._prompt | self._output.keys())

    def output_counts(self) -> tuple[list[int], list[int]]:
        """Return the distinct token ids of the output, and the count of each."""
        return list(self._output), list(self._output.values())

    def _count(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._output[token_id] = self._output.get(token_id, 0) + 1


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The inputs of a position's distribution besides its logits.

    Attributes:
        parameters: of the request.
        history: of the tokens before the position.
        stop_token_ids: not sampled before `min_tokens` output tokens.
        allowed: the tokens that the request's constraint allows, int32 [V / 32, rounded up]: bit b of word w is token
            32 * w + b; None for all.
        must_end: whether it allows stop tokens only, which `min_tokens` does not prevent then.
    """

    parameters: SamplingParameters
    history: TokenHistory
    stop_token_ids: Collection[int]
    allowed: Tensor | None = None
    must_end: bool = False

    @property
    def withheld(self) -> Collection[int]:
        """Token ids that must not be sampled at this position."""
        is_early = self.history.num_output < self.parameters.min_tokens and not self.must_end
        return self.stop_token_ids if is_early else ()

    @property
    def changes_logits(self) -> bool:
        """Whether minimum length, logit bias or penalties change the logits; a constraint only takes some away."""
        return bool(self.withheld or self.parameters.logit_bias or self.parameters.needs_history)


def target_distribution(logits: Tensor, inputs: SamplingMetadata) -> Tensor:
    """Return the distribution of the next token.

    Args:
        logits: raw logits [V], any floating dtype, minus infinity for impossible tokens; not changed.
        inputs: of the distribution besides the logits.

    Returns:
        float64 [V], sum 1; at temperature 0 a single token has probability 1 (ties: the lowest id).

    Raises:
        NoPossibleToken: the largest logit is not finite, or a logit is NaN.
    """
    metadata = [inputs]
    scores = changed_logits(logits.unsqueeze(0), metadata)
    top_id = scores.argmax(-1)  # a NaN, if there is one
    if not bool((top := scores[0, top_id]).isfinite()):
        raise NoPossibleToken(f"the largest logit is {float(top)}, must be finite")
    if inputs.parameters.is_greedy:
        return torch.zeros_like(scores[0], dtype=torch.float64).index_fill_(0, top_id, 1.0)
    weights = target_weights(tempered(scores, metadata), metadata)
    dense = weights.dense(logits.numel()) if isinstance(weights, Support) else weights
    return dense[0].div_(dense.sum())


def changed_logits(logits: Tensor, metadata: Sequence[SamplingMetadata]) -> Tensor:
    """Return the logits after the constraint, minimum length, logit bias and penalties, in that order.

    The repetition penalty divides positive and multiplies negative logits of tokens in prompt or output; the presence
    and frequency penalties apply to tokens of the output.

    Args:
        logits: raw logits [R, V], any floating dtype; not changed.
        metadata: of each row.

    Returns:
        float64 [R, V]; where nothing but constraints applies to any row, at least float32, which preserves the values.
    """
    if any(row.allowed is not None for row in metadata):
        logits = _only_allowed(logits, metadata)
    if not any(row.changes_logits for row in metadata):
        return logits.float() if logits.element_size() < 4 else logits
    scores = logits.to(torch.float64, copy=True)
    _withhold(scores, metadata)
    _bias(scores, metadata)
    _penalise(scores, metadata)
    return scores


def tempered(scores: Tensor, metadata: Sequence[SamplingMetadata]) -> Tensor:
    """Return scores [R, V] divided by the temperatures (not 0), shifted so that a row's largest is 0: float64 [R, V].

    All values of a row are NaN if its largest score is not finite.
    """
    # The largest is subtracted first, because a small temperature would make it infinite.
    scores = scores.double() - scores.amax(-1, keepdim=True).double()
    return scores.div_(_column(scores, [row.parameters.temperature for row in metadata]).unsqueeze(1))


class Truncation(IntEnum):
    """The kinds of truncation; rows that are computed together have the same kind."""

    NONE = 0
    """No top_k or top_p; min_p may drop tokens."""
    TOP_K = 1
    TOP_P = 2
    """top_p over the whole vocabulary: top_k is off."""

    @classmethod
    def of(cls, parameters: SamplingParameters, vocabulary_size: int) -> "Truncation":
        """Return the kind that the parameters need."""
        if 0 < parameters.top_k < vocabulary_size:
            return cls.TOP_K
        return cls.TOP_P if parameters.top_p < 1 else cls.NONE


def target_weights(scores: Tensor, metadata: Sequence[SamplingMetadata]) -> Tensor | Support:
    """Return the unnormalised probabilities after truncation; the most likely token has weight 1.

    Args:
        scores: the result of `tempered`, float64 [R, V]; overwritten.
        metadata: of each row; all need the same kind of truncation.

    Returns:
        float64 [R, V], or the remaining tokens with their weights.
    """
    parameters = [row.parameters for row in metadata]
    min_p, top_p = (
        _column(scores, values) for values in zip(*((row.min_p, row.top_p) for row in parameters), strict=True)
    )
    kind = Truncation.of(parameters[0], scores.shape[-1])
    if kind is Truncation.TOP_K:
        top_k = torch.tensor([row.top_k for row in parameters], device=scores.device)
        return top_k_weights(scores, top_k, min_p, top_p)
    if kind is Truncation.TOP_P:
        return top_p_weights(scores, min_p, top_p)
    weights = scores.exp_()
    return weights.masked_fill_(weights < min_p.unsqueeze(1), 0.0) if any(row.min_p for row in parameters) else weights


def _only_allowed(logits: Tensor, metadata: Sequence[SamplingMetadata]) -> Tensor:
    """Return logits in at least float32, minus infinity for tokens that the constraint of their row does not allow."""
    rows = [number for number, row in enumerate(metadata) if row.allowed is not None]
    masks = torch.stack([row.allowed for row in metadata if row.allowed is not None]).view(torch.uint8)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    table = _summands(dtype, logits.device)
    # Bytes to eight summands each; in a CPU's order of bytes their bits are those of the words, the lowest first.
    if logits.device.type == "cpu":
        # In this thread, which is done before others of torch are awake.
        found = np.take(table.numpy(), masks.numpy(), axis=0).reshape(len(rows), -1)[:, : logits.shape[-1]]
        if len(rows) == len(metadata):
            return torch.from_numpy(np.add(found, logits.to(dtype).numpy(), out=found))
        summands = torch.from_numpy(found)
    else:
        summands = functional.embedding(masks.int().to(logits.device), table).flatten(1)[:, : logits.shape[-1]]
        if len(rows) == len(metadata):
            return logits + summands
    return logits.to(dtype, copy=True).index_add_(0, torch.tensor(rows, device=logits.device), summands)


@cache
def _summands(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what is added to the logits of eight tokens for each byte of a mask, [256, 8]: 0 or minus infinity."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return torch.zeros(256, 8, dtype=dtype).masked_fill(bits == 0, -inf).to(device)


def _withhold(scores: Tensor, metadata: Sequence[SamplingMetadata]) -> None:
    rows, token_ids = _pairs(scores, [row.withheld for row in metadata])
    scores[rows, token_ids] = -inf


def _bias(scores: Tensor, metadata: Sequence[SamplingMetadata]) -> None:
    biases = [row.parameters.logit_bias for row in metadata]
    rows, token_ids = _pairs(scores, biases)
    scores[rows, token_ids] += _column(scores, chain.from_iterable(bias.values() for bias in biases))


def _penalise(scores: Tensor, metadata: Sequence[SamplingMetadata]) -> None:
    _penalise_seen(scores, metadata)
    _penalise_output(scores, metadata)


def _penalise_seen(scores: Tensor, metadata: Sequence[SamplingMetadata]) -> None:
    penalties = [row.parameters.repetition_penalty for row in metadata]
    seen = [row.history.seen() if penalty != 1 else () for row, penalty in zip(metadata, penalties, strict=True)]
    rows, token_ids = _pairs(scores, seen)
    found, penalty = scores[rows, token_ids], _column(scores, penalties)[rows]
    scores[rows, token_ids] = torch.where(found > 0, found / penalty, found * penalty)


def _penalise_output(scores: Tensor, metadata: Sequence[SamplingMetadata]) -> None:
    outputs = [row.history.output_counts() for row in metadata]
    rows, token_ids = _pairs(scores, [token_ids for token_ids, _ in outputs])
    counts = _column(scores, chain.from_iterable(counts for _, counts in outputs))
    frequency = _column(scores, [row.parameters.frequency_penalty for row in metadata])
    presence = _column(scores, [row.parameters.presence_penalty for row in metadata])
    scores[rows, token_ids] -= frequency[rows] * counts
    scores[rows, token_ids] -= presence[rows]


def _pairs(like: Tensor, token_ids: Sequence[Collection[int]]) -> tuple[Tensor, Tensor]:
    """Return row indices and token ids of the token ids of each row, int64 [M] each."""
    # `repeat_interleave` would start all CPU threads for a few numbers.
    rows = torch.tensor([row for row, ids in enumerate(token_ids) for _ in ids], dtype=torch.int64)
    flat = torch.tensor(list(chain.from_iterable(token_ids)), dtype=torch.int64)
    return rows.to(like.device), flat.to(like.device)


def _column(like: Tensor, values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device=like.device)
