"""Batched sampling of the target's own tokens: its draws under `coupled`, or the most likely tokens under greedy.

Rows of all sessions of a pass are sampled together, grouped by the operations that they need. A row's token is that of
`KeyedSource.pick` on its `target_distribution`, up to rounding, and does not depend, bit for bit, on the other rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from outrider import native
from outrider.speculation.randomness import Counter, Key, Purpose, Words, token_exponential, vocabulary_exponential
from outrider.speculation.sampling import (
    SamplingMetadata,
    Truncation,
    changed_logits,
    target_weights,
    tempered,
)
from outrider.speculation.truncation import Support

# Maximum float64 rows per chunk. Noise for a whole vocabulary takes many operations, between which the rows should stay
# in the CPU cache; with small vocabularies, where an operation costs the same for one row as for many, rows fill it.
_NUM_CHANGED: Final = 32
_NUM_TRUNCATED: Final = 8
_NUM_WHOLE: Final = 4
_NUM_RACED: Final = 32
_NUM_ON_GPU: Final = 64
"""On a GPU, where starting an operation takes longer than to run it. A tensor of 128,256 tokens then takes 66 MB."""
_NUM_CACHED: Final = 2**17
_BLOCK_LEN: Final = 128


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to sample.

    Attributes:
        row: index into the pass's logits.
        metadata: the inputs of the distribution besides the logits.
        key: of the session's `KeyedSource`: the low and the high 32 bits of the seed.
        position: session position of the token, in [0, 2**32).
    """

    row: int
    metadata: SamplingMetadata
    key: tuple[int, int]
    position: int


def target_draws(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """Return the token id of each draw, with one copy from device to host; None where no token is possible.

    That is where the largest logit of a row, after all that changes the logits, is not finite, or one is NaN.

    Args:
        logits: raw logits [N, V], any floating dtype; not changed.
        draws: any number, of rows in [0, N), in any order.
    """
    if not draws:
        return []
    chunks = list(_chunks(draws, logits.shape[-1], 0 if logits.device.type == "cpu" else _NUM_ON_GPU))
    parts = [_drawn(logits, [draws[index] for index in chunk]) for chunk in chunks]
    token_ids, are_finite = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).tolist()
    found: list[int | None] = [None] * len(draws)
    order = (index for chunk in chunks for index in chunk)
    for index, token_id, is_finite in zip(order, token_ids, are_finite, strict=True):
        found[index] = token_id if is_finite else None
    return found


def _chunks(draws: Sequence[Draw], vocabulary_size: int, least: int) -> Iterator[list[int]]:
    """Yield the indices of draws that are sampled together: they need the same operations, and are no more than fit.

    Args:
        draws: all draws.
        vocabulary_size: V.
        least: number of rows that may be sampled together in any case.
    """
    needs = [_needs(draw.metadata, vocabulary_size) for draw in draws]
    order = sorted(range(len(draws)), key=lambda index: needs[index])
    while order:
        most, kind, _ = needs[order[0]]
        num = next((num for num, index in enumerate(order) if needs[index][:2] != (most, kind)), len(order))
        num = min(num, max(most, least))
        yield order[:num]
        order = order[num:]


def _needs(metadata: SamplingMetadata, vocabulary_size: int) -> tuple[int, int, int]:
    """Return the maximum rows per chunk, the kind that a chunk's rows must share, and a sort key within the kind."""
    num_cached = _NUM_CACHED // vocabulary_size
    if metadata.parameters.is_greedy:
        is_copied = metadata.changes_logits or metadata.allowed is not None
        return (max(_NUM_CHANGED, num_cached) if is_copied else 2**31), -1, 0
    kind = Truncation.of(metadata.parameters, vocabulary_size)
    if kind is not Truncation.NONE:
        return max(_NUM_TRUNCATED, num_cached), kind, metadata.parameters.top_k
    is_raced = native.loaded_variant() is not None and not metadata.changes_logits
    return max(_NUM_RACED if is_raced else _NUM_WHOLE, num_cached), kind, is_raced


def _drawn(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return token ids, and 1 where the largest logit is finite, else 0: int64 [2, R]."""
    metadata = [draw.metadata for draw in draws]
    rows = _rows(logits, [draw.row for draw in draws])
    if metadata[0].parameters.is_greedy:
        return _largest(rows, metadata)
    if any(row.changes_logits or row.allowed is not None for row in metadata):
        rows = changed_logits(rows, metadata)
    if (variant := _race_variant(rows, metadata)) is not None:
        return _raced(rows, draws, variant)
    scores = rows.float() if rows.element_size() < 4 else rows
    are_finite = scores.amax(-1).isfinite()
    if scores.device.type != "cpu" or not are_finite.all():
        # The caller raises for such a row; until then it must not affect the others.
        scores = scores.masked_fill(~are_finite.unsqueeze(1), 0.0)
    winners = _race(target_weights(tempered(scores, metadata), metadata), draws)
    return torch.stack((winners, are_finite.long()))


def _largest(rows: Tensor, metadata: Sequence[SamplingMetadata]) -> Tensor:
    """Return what `_drawn` does, without noise."""
    if any(row.changes_logits or row.allowed is not None for row in metadata):
        rows = changed_logits(rows, metadata)
    variant = native.loaded_variant() if rows.device.type == "cpu" and rows.dtype in native.SCORE_TYPES else None
    if variant is not None:
        drawn: Tensor = torch.ops.outrider.places_of_largest.default(rows.contiguous(), int(variant))
        return drawn
    # An argmax over 16-bit values takes several times as long.
    scores = rows.float() if rows.element_size() < 4 else rows
    token_ids = _places_of_largest(scores)  # a NaN, if there is one
    tops = scores.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return torch.stack((token_ids, tops.isfinite().long()))


def _places_of_largest(scores: Tensor) -> Tensor:
    """Return the place of each row's largest score, the first of equals, or of a NaN: int64 [R], given [R, V]."""
    num_rows, size = scores.shape
    if scores.device.type != "cpu" or size % _BLOCK_LEN:
        return scores.argmax(-1)
    # PyTorch finds maxima faster than places: so 16 rows of 49,152 take less than half of the time.
    blocks = scores.view(num_rows, -1, _BLOCK_LEN)
    block = blocks.amax(-1).argmax(-1)
    return block * _BLOCK_LEN + blocks[torch.arange(num_rows), block].argmax(-1)


def _race_variant(scores: Tensor, metadata: Sequence[SamplingMetadata]) -> int | None:
    """Return the variant of the native operator for a race; None where there is none for it, or rows are truncated."""
    if scores.device.type != "cpu" or scores.dtype not in native.SCORE_TYPES:
        return None
    parameters = [row.parameters for row in metadata]
    if any(item.min_p or Truncation.of(item, scores.shape[-1]) is not Truncation.NONE for item in parameters):
        return None
    return native.loaded_variant()


def _raced(scores: Tensor, draws: Sequence[Draw], variant: int) -> Tensor:
    """Return what `_drawn` does: only the tokens that can win race, which are few.

    Args:
        scores: of the draws, bfloat16 or float32 [R, V].
        draws: without truncation.
        variant: of the native operator.
    """
    temperatures = torch.tensor([draw.metadata.parameters.temperature for draw in draws], dtype=torch.float64)
    _, base_len, purpose = Counter(Purpose.TARGET, 0).words
    counters = torch.tensor([(draw.position, base_len, purpose, *draw.key) for draw in draws])
    find = torch.ops.outrider.race_candidates.default
    (rows, token_ids), tops = find(scores.contiguous(), temperatures.reciprocal().float(), counters, int(variant))
    winners = token_ids
    # Nearly all rows have one contender, and a row without another needs no race.
    if len(rows) > len(draws):
        weights = (scores[rows, token_ids].double() - tops.double()[rows]).div_(temperatures[rows]).exp_()
        winners = _race(Support(rows, token_ids, weights, len(draws)), draws)
    return torch.stack((winners, tops.isfinite().long()))


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    if rows == list(range(len(logits))):
        return logits
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def _race(weights: Tensor | Support, draws: Sequence[Draw]) -> Tensor:
    """Return the tokens with the largest weight / exponential noise, ties to the lowest id: int64 [R]."""
    if isinstance(weights, Support):
        words, key = _counters(draws, weights.values.device, weights.rows)
        noise = token_exponential(weights.token_ids, words, key)
        scores = noise.reciprocal_().mul_(weights.values)
        return Support(weights.rows, weights.token_ids, scores, weights.num_rows).argmax()
    words, key = _counters(draws, weights.device)
    noise = vocabulary_exponential(weights.shape[-1], words, key, weights.device)
    return noise.reciprocal_().mul_(weights).argmax(-1)


def _counters(draws: Sequence[Draw], device: torch.device, rows: Tensor | None = None) -> tuple[Words, Key]:
    """Return upper counter words and keys of the draws, int64 [R, 1], or of each of `rows`, int64 [M]."""
    _, base_len, purpose = Counter(Purpose.TARGET, 0).words
    numbers = torch.tensor([(draw.position, *draw.key) for draw in draws], device=device).T.unsqueeze(-1)
    if rows is not None:
        numbers = numbers[:, rows, 0]
    return (numbers[0], base_len, purpose), (numbers[1], numbers[2])
