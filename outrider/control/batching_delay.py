"""The batching delay: how long a pass waits for sessions that will be ready soon. Arithmetic only.

Sessions whose proposals come over a network are ready at different times. A target that never delays a pass runs passes
that are not full, and a session that is ready just after one began then alternates with those in it: each of two gets
every other pass, though one pass over both would take little more time than over one.

So the target compares the ways to continue in turns of two passes: over the sessions that are ready, together with the
first k of those that will be (F), and over the rest (S). While one pass runs, the drafts of the others answer. With
g the tokens that rounds are expected to yield, T the measured time of a pass, and a the time of answers, a turn yields

    (g(F) + g(S)) / max(T(F) + T(S), T(F) + a(F), T(S) + a(S))      tokens a second, or
    g(F) / (T(F) + a(F))                                            where S is empty.

Sessions that need no proposal, or whose drafts run ahead of verdicts, are often ready again at once: they take part in
the second pass too, and a(F) counts in proportion to the probability that any session needs an answer. The pass waits
for the k with the highest rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Final

from outrider.control.pass_times import PassTimes

_MARGIN: Final = 1.05
"""How much higher the rate with a delay must be: arrivals of proposals are predicted less well than passes."""


@dataclass(frozen=True, slots=True)
class BatchCandidate:
    """A session that could take part in a pass.

    Attributes:
        num_tokens: that its round is expected to yield, at least 1.
        num_rows: of its round, at least 1.
        ready_in_s: seconds until it is ready; 0 where it is.
        answer_s: seconds from the end of its pass until it is ready again, where that takes any.
        ready_again: probability that it takes none.
        later_tokens: that its round would yield in the pass after the next, where it is not ready: its draft continues.
        later_rows: rows of that round.
    """

    num_tokens: float
    num_rows: float
    ready_in_s: float = 0.0
    answer_s: float = 0.0
    ready_again: float = 0.0
    later_tokens: float = 1.0
    later_rows: float = 1.0


def batching_delay_s(
    ready: Sequence[BatchCandidate], coming: Sequence[BatchCandidate], times: PassTimes
) -> float | None:
    """Return how long a pass should wait for sessions that will be ready, in seconds; None where no delay pays.

    Args:
        ready: sessions that are ready, at least one.
        coming: sessions that are not.
        times: of the model's passes.
    """
    if not coming or not times.known:
        return None
    # A session that is ready only after a pass over those that are ready now has lost nothing by that pass.
    longest_s = times.round_s(round(sum(item.num_rows for item in ready)), speculates=True)
    coming = sorted(coming, key=lambda item: item.ready_in_s)
    firsts = islice(accumulate([*ready, *coming], _Group.with_one, initial=_Group()), len(ready), None)
    seconds = [*accumulate(reversed(coming), _Group.with_late, initial=_Group())]
    best_s: float | None = None
    best_rate = 0.0
    for num, (first, second) in enumerate(zip(firsts, reversed(seconds), strict=True)):
        delay_s = coming[num - 1].ready_in_s if num else 0.0
        if delay_s >= longest_s:
            break
        rate = _rate(first, second, times)
        if num == 0:
            best_rate = _MARGIN * rate
        elif rate > best_rate:
            best_s, best_rate = delay_s, rate
    return best_s


@dataclass(frozen=True, slots=True)
class _Group:
    """The sessions of one pass together.

    Attributes:
        num_tokens, num_rows: of their rounds.
        again_tokens, again_rows: expected of them in the pass after it.
        slowest_s: the longest of their answers.
        none_answers: probability that none of them needs one.
    """

    num_tokens: float = 0.0
    num_rows: float = 0.0
    again_tokens: float = 0.0
    again_rows: float = 0.0
    slowest_s: float = 0.0
    none_answers: float = 1.0

    def with_one(self, item: BatchCandidate) -> "_Group":
        """Return the group and one more, whose round is as it is now."""
        return self._with(item, item.num_tokens, item.num_rows)

    def with_late(self, item: BatchCandidate) -> "_Group":
        """Return the group and one more, whose round grows until the next pass."""
        return self._with(item, item.later_tokens, item.later_rows)

    def _with(self, item: BatchCandidate, num_tokens: float, num_rows: float) -> "_Group":
        return _Group(
            self.num_tokens + num_tokens,
            self.num_rows + num_rows,
            self.again_tokens + item.ready_again * num_tokens,
            self.again_rows + item.ready_again * num_rows,
            max(self.slowest_s, item.answer_s),
            self.none_answers * item.ready_again,
        )

    @property
    def answer_s(self) -> float:
        """Seconds until all are ready again, on average."""
        return self.slowest_s * (1 - self.none_answers)


def _rate(first: _Group, second: _Group, times: PassTimes) -> float:
    """Return the tokens a second of turns of two passes; see the module."""
    first_s = times.round_s(round(first.num_rows), speculates=True)
    if not second.num_rows:
        return first.num_tokens / (first_s + first.answer_s)
    second_s = times.round_s(round(second.num_rows + first.again_rows), speculates=True)
    turn_s = max(first_s + second_s, first_s + first.answer_s, second_s + second.answer_s)
    return (first.num_tokens + first.again_tokens + second.num_tokens) / turn_s
