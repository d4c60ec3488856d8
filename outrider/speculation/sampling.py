"""The law of the next token: the target's (or the draft's) logits under the request's sampling parameters.

The order is vLLM's: minimum length, logit bias, penalties, then the temperature, min_p, top_k, top_p. What is sampled
is computed in float64, for many positions at once; a position's law depends, bit for bit, on its own logits and history
alone.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from math import inf

import torch
from torch import Tensor

from outrider.parameters import SamplingParameters
from outrider.speculation.truncation import Support, top_k_weights, top_p_weights


class TokenHistory:
    """The tokens before a position, as penalties need them: which are in the prompt, how often which are in the output.

    Args:
        prompt: token ids before the output.
        output: token ids of the output so far.
        parameters: nothing is kept unless they have penalties.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int], parameters: SamplingParameters) -> None:
        self.num_output = len(output)
        self._kept = parameters.needs_history
        self._prompt = frozenset(prompt) if self._kept else frozenset()
        self._output: dict[int, int] = {}
        if self._kept:
            self._count(output)

    def extended(self, token_ids: Sequence[int]) -> "TokenHistory":
        """Returns the history with more output, as along a branch of a proposal; this one stays as it is."""
        longer = TokenHistory.__new__(TokenHistory)
        longer.num_output = self.num_output + len(token_ids)
        longer._kept, longer._prompt, longer._output = self._kept, self._prompt, self._output
        if self._kept and token_ids:
            longer._output = dict(self._output)
            longer._count(token_ids)
        return longer

    def seen(self) -> list[int]:
        """Returns the distinct token ids of prompt and output, in no order."""
        return list(self._prompt | self._output.keys())

    def output_counts(self) -> tuple[list[int], list[int]]:
        """Returns the distinct token ids of the output, and how often each stands there."""
        return list(self._output), list(self._output.values())

    def _count(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._output[token_id] = self._output.get(token_id, 0) + 1


@dataclass(frozen=True, slots=True)
class LawTerms:
    """What a position's law depends on, besides its logits.

    Attributes:
        parameters: the request's.
        history: what came before.
        stop_token_ids: not drawn before `min_tokens` output tokens.
    """

    parameters: SamplingParameters
    history: TokenHistory
    stop_token_ids: Collection[int]

    @property
    def withheld(self) -> Collection[int]:
        """Token ids that may not be drawn here."""
        return self.stop_token_ids if self.history.num_output < self.parameters.min_tokens else ()

    @property
    def changes_logits(self) -> bool:
        """Whether minimum length, logit bias or penalties apply."""
        return bool(self.withheld or self.parameters.logit_bias or self.parameters.needs_history)


def target_distribution(
    logits: Tensor, parameters: SamplingParameters, history: TokenHistory, stop_token_ids: Collection[int]
) -> Tensor:
    """Returns the law of the next token.

    Args:
        logits: [V], raw, any floating dtype; not changed. Minus infinity where a token is impossible.
        parameters: the request's.
        history: what came before.
        stop_token_ids: not drawn before `min_tokens` output tokens.

    Returns:
        float64 [V], sums to 1; one token has all of it at temperature 0 (ties: the lowest id).

    Raises:
        ValueError: the largest logit is not finite, or one is not a number.
    """
    terms = [LawTerms(parameters, history, stop_token_ids)]
    scores = changed_logits(logits.unsqueeze(0), terms)
    top_id = scores.argmax(-1)  # a NaN, if there is one
    if not bool((top := scores[0, top_id]).isfinite()):
        raise ValueError(f"the largest logit is {float(top)}, must be finite")
    if parameters.is_greedy:
        return torch.zeros_like(scores[0], dtype=torch.float64).index_fill_(0, top_id, 1.0)
    weights = target_weights(tempered(scores, terms), terms)
    dense = weights.dense(logits.numel()) if isinstance(weights, Support) else weights
    return dense[0].div_(dense.sum())


def changed_logits(logits: Tensor, terms: Sequence[LawTerms]) -> Tensor:
    """Returns the logits after minimum length, logit bias and penalties, in that order.

    The repetition penalty divides the positive and multiplies the other logits of tokens in prompt or output; the other
    penalties count tokens of the output.

    Args:
        logits: [R, V], raw, any floating dtype; not changed.
        terms: of each row.

    Returns:
        float64 [R, V]; where nothing applies, the `logits` in at least float32, which changes no value.
    """
    if not any(row.changes_logits for row in terms):
        # An argmax takes several times as long over 16 bits.
        return logits.float() if logits.element_size() < 4 else logits
    scores = logits.to(torch.float64, copy=True)
    _withhold(scores, terms)
    _bias(scores, terms)
    _penalise(scores, terms)
    return scores


def tempered(scores: Tensor, terms: Sequence[LawTerms]) -> Tensor:
    """Returns scores [R, V] over the temperatures, which are not 0, up to a constant: float64, the largest is 0.

    A row is not a number throughout where its largest score is not finite.
    """
    # The largest is taken off first, because a small temperature would take it to infinity.
    scores = scores.double() - scores.amax(-1, keepdim=True).double()
    return scores.div_(_column(scores, [row.parameters.temperature for row in terms]).unsqueeze(1))


class Truncation(IntEnum):
    """How the tokens are found that truncation leaves; rows that are computed together have it in common."""

    NONE = 0
    """All tokens stay, but for those that min_p drops."""
    TOP_K = 1
    TOP_P = 2
    """Of all tokens: top_k leaves them all."""

    @classmethod
    def of(cls, parameters: SamplingParameters, vocabulary_size: int) -> "Truncation":
        """Returns what the parameters need."""
        if 0 < parameters.top_k < vocabulary_size:
            return cls.TOP_K
        return cls.TOP_P if parameters.top_p < 1 else cls.NONE


def target_weights(scores: Tensor, terms: Sequence[LawTerms]) -> Tensor | Support:
    """Returns what the laws are proportional to: 1 for the most likely token.

    Args:
        scores: of `tempered`, float64 [R, V]; changed.
        terms: of each row; all need the same truncation.

    Returns:
        float64 [R, V], or the tokens that are left.
    """
    parameters = [row.parameters for row in terms]
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


def _withhold(scores: Tensor, terms: Sequence[LawTerms]) -> None:
    rows, token_ids = _pairs(scores, [row.withheld for row in terms])
    scores[rows, token_ids] = -inf


def _bias(scores: Tensor, terms: Sequence[LawTerms]) -> None:
    biases = [row.parameters.logit_bias for row in terms]
    rows, token_ids = _pairs(scores, biases)
    scores[rows, token_ids] += _column(scores, chain.from_iterable(bias.values() for bias in biases))


def _penalise(scores: Tensor, terms: Sequence[LawTerms]) -> None:
    _penalise_seen(scores, terms)
    _penalise_output(scores, terms)


def _penalise_seen(scores: Tensor, terms: Sequence[LawTerms]) -> None:
    penalties = [row.parameters.repetition_penalty for row in terms]
    seen = [row.history.seen() if penalty != 1 else () for row, penalty in zip(terms, penalties, strict=True)]
    rows, token_ids = _pairs(scores, seen)
    found, penalty = scores[rows, token_ids], _column(scores, penalties)[rows]
    scores[rows, token_ids] = torch.where(found > 0, found / penalty, found * penalty)


def _penalise_output(scores: Tensor, terms: Sequence[LawTerms]) -> None:
    outputs = [row.history.output_counts() for row in terms]
    rows, token_ids = _pairs(scores, [token_ids for token_ids, _ in outputs])
    counts = _column(scores, chain.from_iterable(counts for _, counts in outputs))
    frequency = _column(scores, [row.parameters.frequency_penalty for row in terms])
    presence = _column(scores, [row.parameters.presence_penalty for row in terms])
    scores[rows, token_ids] -= frequency[rows] * counts
    scores[rows, token_ids] -= presence[rows]


def _pairs(like: Tensor, token_ids: Sequence[Collection[int]]) -> tuple[Tensor, Tensor]:
    """Returns the rows and the token ids of what is named row by row, int64 [M] each."""
    # `repeat_interleave` would wake all of the processor's threads for a few numbers.
    rows = torch.tensor([row for row, ids in enumerate(token_ids) for _ in ids], dtype=torch.int64)
    flat = torch.tensor(list(chain.from_iterable(token_ids)), dtype=torch.int64)
    return rows.to(like.device), flat.to(like.device)


def _column(like: Tensor, values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device=like.device)
