"""What passes of a model take, a target's or a draft's, as a function of their rows: measured, old values fade.

A machine is now faster, now slower, because of what else it does, and some sizes of passes are rare. So the seconds of
a pass are taken for a product: a speed, which follows the last passes whatever their sizes, and what a size costs
compared with others, which is learnt from pairs of passes that follow each other.
"""

import math
from bisect import bisect_left
from typing import Final

from outrider.control.pass_sizes import FOURS, PassSizes

_FOLLOWING: Final = 0.2
_LEARNING: Final = 0.1
_MAX_SURPRISE: Final = 0.5
"""Logarithm of the largest deviation of a pair of passes that counts: more is a hiccup of the machine."""
MAX_RATIO: Final = 2.0
"""How many times as long as usual a pass, or an answer, counts as at most."""
_MAX_CASES: Final = 50
_LINE_WEIGHT: Final = 2.0
"""Cases that the line over all sizes counts for against those of one size."""


class DecayingMean:
    """A mean in which an observation `n` steps old weighs (1 - share) ** n; the first ones weigh more.

    Args:
        share: of the last observation, in (0, 1].
        start: value before the first one.
        num_start: how many observations that counts for.
        max_ratio: an observation counts as at most so many times the mean: a machine that stood still for a moment says
            little about what comes. What stays is followed all the same.
    """

    def __init__(self, share: float, start: float = 0.0, num_start: int = 0, max_ratio: float = math.inf) -> None:
        self._share = share
        self._num = num_start
        self._max_ratio = max_ratio
        self.value = start

    def observe(self, value: float, *, is_certain: bool = False) -> None:
        """Takes a value into the mean, as it is where it is certain that it is none of a moment."""
        if self.known and not is_certain:
            value = self.clipped(value)
        self._num += 1
        self.value += max(self._share, 1 / self._num) * (value - self.value)

    def clipped(self, value: float) -> float:
        """Returns what an observation counts as."""
        return min(self._max_ratio * self.value, value) if self.value > 0 else value

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._num > 0


class _Size:
    """What passes of a size cost, compared with others, and how many were seen."""

    __slots__ = ("cost", "num")

    def __init__(self, cost: float) -> None:
        self.cost = cost
        self.num = 1.0

    def move(self, logarithm: float) -> None:
        self.cost *= math.exp(logarithm)
        self.num = min(_MAX_CASES, self.num + 1)


class PassTimes:
    """Measured decoding passes of one model, over all its sessions; see the module.

    Args:
        sizes: of the model's passes.
    """

    def __init__(self, sizes: PassSizes = FOURS) -> None:
        self.sizes = sizes
        self._speed_s = DecayingMean(_FOLLOWING, max_ratio=MAX_RATIO)
        self._sizes: dict[int, _Size] = {}
        self._last: tuple[int, float] | None = None
        self._slope = 0.0
        self._curve: list[tuple[int, float]] = []
        self._rests = {which: DecayingMean(_LEARNING, max_ratio=MAX_RATIO) for which in (False, True)}
        self.num_sessions = 1
        """Sessions that decode now."""

    @property
    def known(self) -> bool:
        """Whether any pass was observed."""
        return self._last is not None

    def observe(self, duration_s: float, num_rows: int) -> None:
        """Takes a decoding pass into account (not one that prefills).

        Args:
            duration_s: seconds, positive.
            num_rows: of the pass, at least 1.
        """
        num_rows = self.sizes.size(num_rows)
        if self._last is None:
            self._sizes[num_rows] = _Size(1.0)
        elif num_rows not in self._sizes:
            last_rows, last_s = self._last
            ratio = _possible(duration_s / last_s, num_rows / last_rows)
            self._sizes[num_rows] = _Size(self._sizes[last_rows].cost * ratio)
        elif num_rows != self._last[0]:
            self._compare(duration_s, num_rows, *self._last)
        self._last = num_rows, duration_s
        self._fit()
        self._speed_s.observe(duration_s / self._cost(num_rows))

    def observe_rest(self, duration_s: float, *, speculates: bool) -> None:
        """Takes into account what a round took beside its wait and its pass.

        Args:
            duration_s: seconds.
            speculates: whether it waited for a proposal or verified one.
        """
        self._rests[speculates].observe(max(0.0, duration_s))

    def round_s(self, num_rows: int, *, speculates: bool = False) -> float:
        """Returns the seconds of a round that waits for nothing: of its pass, and of what is done around it."""
        rest = self._rests[speculates]
        return self.pass_s(num_rows) + (rest if rest.known else self._rests[not speculates]).value

    @property
    def row_s(self) -> float:
        """Seconds that a row adds to a pass; 0 while passes of different sizes have not shown it."""
        return self._slope * self._speed_s.value

    def pass_s(self, num_rows: int) -> float:
        """Returns the seconds of a pass over so many rows; 0 while nothing is known."""
        return self._speed_s.value * self._cost(self.sizes.size(num_rows)) if self.known else 0.0

    def _compare(self, duration_s: float, num_rows: int, last_rows: int, last_s: float) -> None:
        """Moves two sizes towards what a pair of passes says; the one that was seen less often moves more."""
        now, last = self._sizes[num_rows], self._sizes[last_rows]
        surprise = math.log(duration_s / last_s) - math.log(now.cost / last.cost)
        surprise = max(-_MAX_SURPRISE, min(_MAX_SURPRISE, surprise))
        share = max(_LEARNING, 1 / (1 + min(now.num, last.num)))
        part = last.num / (now.num + last.num)
        now.move(share * part * surprise)
        last.move(-share * (1 - part) * surprise)

    def _fit(self) -> None:
        """Draws a line through all sizes, and moves each towards it, the less the more often it was seen."""
        weight = sum(size.num for size in self._sizes.values())
        mean_rows = sum(size.num * rows for rows, size in self._sizes.items()) / weight
        mean_cost = sum(size.num * size.cost for size in self._sizes.values()) / weight
        spread = sum(size.num * (rows - mean_rows) ** 2 for rows, size in self._sizes.items())
        product = sum(size.num * (rows - mean_rows) * size.cost for rows, size in self._sizes.items())
        self._slope = max(0.0, product / spread) if spread else 0.0
        self._curve = [
            (rows, (size.num * size.cost + _LINE_WEIGHT * line) / (size.num + _LINE_WEIGHT))
            for rows, size in sorted(self._sizes.items())
            for line in (max(0.1 * mean_cost, mean_cost + self._slope * (rows - mean_rows)),)
        ]

    def _cost(self, num_rows: int) -> float:
        """Returns what a size costs: between two that were seen, in proportion; beyond them, along the line."""
        place = bisect_left(self._curve, (num_rows, 0.0))
        if place == len(self._curve):
            rows, cost = self._curve[-1]
            return cost + self._slope * (num_rows - rows)
        rows, cost = self._curve[place]
        if rows == num_rows:
            return cost
        if place == 0:
            return max(0.1 * cost, cost - self._slope * (rows - num_rows))
        before, cost_before = self._curve[place - 1]
        return cost_before + (cost - cost_before) * (num_rows - before) / (rows - before)


def _possible(ratio: float, num_rows: float) -> float:
    """Returns how many times another pass's time one with so many times its rows may have taken, where it was measured.

    More rows take no less time, and no more than as many passes do. What lies beyond is what a size takes only once,
    such as its code being made.
    """
    return min(max(ratio, min(1.0, num_rows)), max(1.0, num_rows))
