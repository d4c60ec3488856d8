"""The target's own tokens at many positions at once: its draws under `coupled`, or the most likely tokens.

Rows of all sessions of a pass are drawn together, grouped by what they need. A row's token is that of
`KeyedSource.pick` on its `target_distribution`, but for rounding, and, bit for bit, the same whichever rows are beside
it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from outrider.speculation.randomness import Counter, Key, Purpose, Words, token_exponential, vocabulary_exponential
from outrider.speculation.sampling import LawTerms, Truncation, changed_logits, target_weights, tempered
from outrider.speculation.truncation import Support

# Float64 rows that are worked on together. Noise for a whole vocabulary takes many steps, between which the rows should
# stay in the processor's cache; rows of small vocabularies, where a step costs as much for one as for many, fill it.
_NUM_CHANGED: Final = 32
_NUM_TRUNCATED: Final = 8
_NUM_WHOLE: Final = 4
_NUM_CACHED: Final = 2**17


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be drawn.

    Attributes:
        row: of the pass's logits.
        terms: what the law depends on, besides the logits.
        key: of the session's `KeyedSource`.
        position: session position of the token, in [0, 2**32).
    """

    row: int
    terms: LawTerms
    key: tuple[int, int]
    position: int


def target_draws(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Returns the token id of each draw, brought to the host in one copy.

    Args:
        logits: [N, V], raw, any floating dtype; not changed.
        draws: any number, of any rows.

    Raises:
        ValueError: the largest logit of a row is not finite, or one is not a number.
    """
    if not draws:
        return []
    chunks = list(_chunks(draws, logits.shape[-1]))
    drawn = torch.cat([_drawn(logits, [draws[index] for index in chunk]) for chunk in chunks], dim=1)
    token_ids, are_finite = drawn.cpu()
    if not are_finite.all():
        raise ValueError("the largest logit of a row is not finite, must be")
    order = torch.tensor([index for chunk in chunks for index in chunk])
    in_order: list[int] = torch.empty_like(token_ids).index_copy_(0, order, token_ids).tolist()
    return in_order


def _chunks(draws: Sequence[Draw], vocabulary_size: int) -> Iterator[list[int]]:
    """Yields indices of draws that are made together: they need the same, and similar numbers of tokens."""
    needs = [_needs(draw.terms, vocabulary_size) for draw in draws]
    order = sorted(range(len(draws)), key=lambda index: needs[index])
    while order:
        most, kind, _ = needs[order[0]]
        num = next((num for num, index in enumerate(order) if needs[index][:2] != (most, kind)), len(order))
        num = min(num, most)
        yield order[:num]
        order = order[num:]


def _needs(terms: LawTerms, vocabulary_size: int) -> tuple[int, int, int]:
    """Returns how many rows are drawn together, what they must have in common, and what they should."""
    num_cached = _NUM_CACHED // vocabulary_size
    if terms.parameters.is_greedy:
        return (max(_NUM_CHANGED, num_cached) if terms.changes_logits else 2**31), -1, 0
    kind = Truncation.of(terms.parameters, vocabulary_size)
    num = _NUM_WHOLE if kind is Truncation.NONE else _NUM_TRUNCATED
    return max(num, num_cached), kind, terms.parameters.top_k


def _drawn(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Returns token ids, and 1 for each if its largest logit is finite, else 0: int64 [2, R]."""
    terms = [draw.terms for draw in draws]
    scores = changed_logits(_rows(logits, [draw.row for draw in draws]), terms)
    if terms[0].parameters.is_greedy:
        token_ids = scores.argmax(-1)  # a NaN, if there is one
        tops = scores.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        return torch.stack((token_ids, tops.isfinite().long()))
    are_finite = scores.amax(-1).isfinite()
    # A row without a law is refused in the end; until then it must not stop the others.
    scores = scores.masked_fill(~are_finite.unsqueeze(1), 0.0)
    return torch.stack((_race(target_weights(tempered(scores, terms), terms), draws), are_finite.long()))


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    if rows == list(range(len(logits))):
        return logits
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def _race(weights: Tensor | Support, draws: Sequence[Draw]) -> Tensor:
    """Returns the token with the largest quotient of weight and exponential noise, the lowest id among equals."""
    if isinstance(weights, Support):
        words, key = _counters(draws, weights.values.device, weights.rows)
        noise = token_exponential(weights.token_ids, words, key)
        scores = noise.reciprocal_().mul_(weights.values)
        return Support(weights.rows, weights.token_ids, scores, weights.num_rows).argmax()
    words, key = _counters(draws, weights.device)
    noise = vocabulary_exponential(weights.shape[-1], words, key, weights.device)
    return noise.reciprocal_().mul_(weights).argmax(-1)


def _counters(draws: Sequence[Draw], device: torch.device, rows: Tensor | None = None) -> tuple[Words, Key]:
    """Returns upper counter words and keys of the draws, [R, 1], or of each of `rows`, [M]."""
    _, base_len, purpose = Counter(Purpose.TARGET, 0).words
    numbers = torch.tensor([(draw.position, *draw.key) for draw in draws], device=device).T.unsqueeze(-1)
    if rows is not None:
        numbers = numbers[:, rows, 0]
    return (numbers[0], base_len, purpose), (numbers[1], numbers[2])
