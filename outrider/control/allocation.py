"""The allocation of a pass's rows to the nodes of many sessions: those worth most, while they pay.

All sessions of a pass share its time, so their nodes compete: the nodes with the largest values are taken, of whichever
session, for as long as the tokens that a second is expected to yield increase.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from outrider.control.pass_times import PassTimes
from outrider.speculation.proposal_tree import Candidate

_LEAST_PART: Final = 0.5


def allocate(
    candidates: Sequence[Iterable[Candidate]],
    num_tokens: float,
    num_rows: int,
    max_rows: int,
    times: PassTimes,
    wait_s: float = 0.0,
) -> list[list[int]]:
    """Return the nodes of each session that a pass takes, parents before children.

    Args:
        candidates: of each session that takes part in this pass, those worth most first.
        num_tokens: that the pass is expected to yield without them.
        num_rows: rows of the pass without them.
        max_rows: rows of the pass, at most.
        times: of the model's passes; where nothing is known, all nodes are taken for which there is room.
        wait_s: seconds that these rounds have waited, on average; a round that has cost so much should bring more.
    """
    chosen: list[tuple[int, int]] = []
    best_len, best_rate = 0, num_tokens / (wait_s + times.round_s(num_rows)) if times.known else 0.0
    for value, place, number in heapq.merge(*(_ordered(place, found) for place, found in enumerate(candidates))):
        if num_rows + len(chosen) >= max_rows:
            break
        chosen.append((place, number))
        if not times.known:
            best_len = len(chosen)
            continue
        num_tokens -= value
        rate = num_tokens / (wait_s + times.round_s(num_rows + len(chosen), speculates=True))
        if rate > best_rate:
            best_len, best_rate = len(chosen), rate
        elif times.sizes.is_full(num_rows + len(chosen)) and -value < _LEAST_PART * best_rate * times.row_s:
            break
    parts: list[list[int]] = [[] for _ in candidates]
    for place, number in chosen[:best_len]:
        parts[place].append(number)
    return parts


def _ordered(place: int, candidates: Iterable[Candidate]) -> Iterator[tuple[float, int, int]]:
    for item in candidates:
        yield -item.value, place, item.number
