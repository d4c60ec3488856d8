"""The time of a model's passes, a target's or a draft's, as a function of their rows: the one model of pass costs.

A pass has rows that decode (drafted tokens that are verified included) and rows of prompts:

    seconds = decode slowness * cost(decode rows)
              + prefill slowness * (row * prompt rows + position * prompt rows * their mean position)

- The slowness follows the last passes at once, whatever their sizes: a machine is faster or slower because of what else
  it runs. All other costs are relative to it, so that rare sizes follow the machine too. Decoding and prefill have one
  each: beside other processes on 2 cores, passes of one row took up to 20 times as long, and prompts 2 to 5 times.
- `cost` is learnt from pairs of passes that follow each other, for each padded batch size, and drawn towards a line; it
  never falls with the size.
- `row` and `position`, the linear layers and the attention that a prompt's row adds, are fitted by least squares of the
  relative error. A pass of prompts alone has the cost of the smallest batch size besides: it reads all weights once.

It serves the controller and the batching delay (`round_s`, `row_s`), the prefill budget (`pass_s`, `prefill_s`), the
drafts' steps (`pass_s`), and the restore decision (`prefill_s`). Three other times are measured apart, because they are
other quantities: when a draft's answer arrives (`draft_times`: network and queues, seen from the target), what a round
takes besides its pass (`observe_rest`), and the bandwidth at which KV blocks are restored.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outrider.control.decaying_mean import DecayingMean

_FOLLOWING: Final = 0.2
_LEARNING: Final = 0.1
_MAX_SURPRISE: Final = 0.5
"""Largest deviation of a pair of passes that counts, as a logarithm: more is a stall of the machine."""
MAX_RATIO: Final = 2.0
"""A pass or an answer counts as at most so many times its usual time."""
_MAX_CASES: Final = 50
_LINE_WEIGHT: Final = 2.0
"""Number of observations of one size that the line over all sizes counts for."""
_PREFILL_DECAY: Final = 0.95
_MAX_SLOWNESS: Final = 1024.0


@dataclass(frozen=True, slots=True)
class PaddedSizes:
    """Padded batch sizes of a model, in rows: kernels work in blocks of rows, and rows that fill a block cost no more.

    Attributes:
        first: rows of the smallest size, at least 1: fewer cost as much.
        step: rows from one size to the next, at least 1.
    """

    first: int = 4
    step: int = 4

    def padded(self, num_rows: int) -> int:
        """Return the size to which a number of rows is padded: at least as many."""
        return self.first + max(0, -(-(num_rows - self.first) // self.step) * self.step)

    def is_full(self, num_rows: int) -> bool:
        """Whether another row would make a pass longer."""
        return self.padded(num_rows) == num_rows


MULTIPLES_OF_FOUR: Final = PaddedSizes()


class _Size:
    """The cost of one batch size relative to others, and the number of passes that it was learnt from."""

    __slots__ = ("cost", "num")

    def __init__(self, cost: float) -> None:
        self.cost = cost
        self.num = 1.0

    def move(self, logarithm: float) -> None:
        self.cost *= math.exp(logarithm)
        self.num = min(_MAX_CASES, self.num + 1)


class PassTimes:
    """Predict the seconds of one model's passes from those measured, over all its sessions; see the module.

    Args:
        sizes: the model's padded batch sizes.

    Attributes:
        sizes: see there.
        num_sessions: sessions that decode now, at least 1.
    """

    def __init__(self, sizes: PaddedSizes = MULTIPLES_OF_FOUR) -> None:
        self.sizes = sizes
        self.num_sessions = 1
        self._slowness = DecayingMean(_FOLLOWING, 1.0, max_ratio=MAX_RATIO)
        self._prefill_slowness = DecayingMean(_FOLLOWING, 1.0, max_ratio=MAX_RATIO)
        self._sizes: dict[int, _Size] = {}
        self._last: tuple[int, float] | None = None
        self._slope = 0.0
        self._curve: list[tuple[int, float]] = []
        self._prefill = _TwoFactors()
        self._rests = {
            which: DecayingMean(_LEARNING, max_ratio=MAX_RATIO, doubts_first=True) for which in (False, True)
        }

    @property
    def known(self) -> bool:
        """Whether any decode pass was observed."""
        return self._last is not None

    def observe(self, duration_s: float, num_rows: int, prompts: Sequence[tuple[int, int]] = ()) -> None:
        """Take a pass into account.

        Args:
            duration_s: seconds, positive.
            num_rows: rows that decode; at least 1 where there are no prompts.
            prompts: of each part of a prompt its number of rows, and the session position of the first.
        """
        if prompts:
            self._observe_prefill(duration_s, num_rows, prompts)
            return
        self._observe_decode(duration_s, self.sizes.padded(num_rows))

    def reset_prefill_speed(self, duration_s: float, num_rows: int) -> None:
        """Have one prompt determine the prefill slowness, as after a pause, when the machine's load may have changed.

        Args:
            duration_s: seconds of a pass of this prompt alone, positive.
            num_rows: of the prompt, which begins a session.
        """
        self._prefill_slowness.restart()
        self._observe_prefill_slowness(max(0.0, duration_s - self.pass_s(1)), num_rows, num_rows**2 / 2)

    def observe_rest(self, duration_s: float, *, speculates: bool) -> None:
        """Take into account the seconds of a round besides its wait and its pass.

        Args:
            duration_s: seconds.
            speculates: whether the round waited for a proposal or verified one.
        """
        self._rests[speculates].observe(max(0.0, duration_s))

    def pass_s(self, num_rows: int) -> float:
        """Return the seconds of a pass over so many rows that decode; 0 while nothing is known."""
        return self._slowness.value * self._cost(self.sizes.padded(num_rows)) if self.known else 0.0

    @property
    def row_s(self) -> float:
        """Seconds that a row that decodes adds to a pass; 0 while passes of different sizes have not shown it."""
        return self._slope * self._slowness.value

    def round_s(self, num_rows: int, *, speculates: bool = False) -> float:
        """Return the seconds of a round that waits for nothing: its pass, and what is done around it."""
        rest = self._rests[speculates]
        return self.pass_s(num_rows) + (rest if rest.known else self._rests[not speculates]).value

    def prefill_s(self, num_rows: int, start: int) -> float:
        """Return the seconds that rows of a prompt add to a pass; infinite while unknown.

        Args:
            num_rows: of the prompt.
            start: session position of the first.
        """
        return self._prefill_slowness.value * self._prefill.value(num_rows, num_rows * (start + num_rows / 2))

    def _observe_prefill(self, duration_s: float, num_decode: int, prompts: Sequence[tuple[int, int]]) -> None:
        if num_decode and not self.known:
            return
        added_s = max(0.0, duration_s - self.pass_s(max(1, num_decode)))
        num_rows = sum(num for num, _ in prompts)
        positions = sum(num * (start + num / 2) for num, start in prompts)
        slowness = self._prefill_slowness.value
        if not 1 / _MAX_SLOWNESS < slowness < _MAX_SLOWNESS:
            # Only the product with the fitted time is measured: where many prompts add no time, one factor grows and
            # the other shrinks, without end.
            self._prefill.rescale(slowness)
            slowness = self._prefill_slowness.value = 1.0
        self._prefill.observe(num_rows, positions, added_s / slowness, (slowness / duration_s) ** 2)
        self._observe_prefill_slowness(added_s, num_rows, positions)

    def _observe_prefill_slowness(self, added_s: float, num_rows: int, positions: float) -> None:
        expected_s = self._prefill.value(num_rows, positions)
        if added_s > 0 and 0 < expected_s < math.inf:
            self._prefill_slowness.observe(added_s / expected_s)

    def _observe_decode(self, duration_s: float, size: int) -> None:
        if self._last is None:
            # The first pass defines the unit: costs are its seconds at a slowness of 1.
            self._sizes[size] = _Size(duration_s / self._slowness.value)
        elif size not in self._sizes:
            last_size, last_s = self._last
            ratio = _possible(duration_s / last_s, size / last_size)
            self._sizes[size] = _Size(self._sizes[last_size].cost * ratio)
        elif size != self._last[0]:
            self._compare(duration_s, size, *self._last)
        self._last = size, duration_s
        self._fit()
        self._slowness.observe(duration_s / self._cost(size))

    def _compare(self, duration_s: float, size: int, last_size: int, last_s: float) -> None:
        """Move two sizes towards the ratio of a pair of passes; the one that was seen less often moves more."""
        now, last = self._sizes[size], self._sizes[last_size]
        surprise = math.log(duration_s / last_s) - math.log(now.cost / last.cost)
        surprise = max(-_MAX_SURPRISE, min(_MAX_SURPRISE, surprise))
        share = max(_LEARNING, 1 / (1 + min(now.num, last.num)))
        part = last.num / (now.num + last.num)
        now.move(share * part * surprise)
        last.move(-share * (1 - part) * surprise)

    def _fit(self) -> None:
        """Fit a line through all sizes, and draw each towards it, the less the more often it was seen."""
        weight = sum(size.num for size in self._sizes.values())
        mean_rows = sum(size.num * rows for rows, size in self._sizes.items()) / weight
        mean_cost = sum(size.num * size.cost for size in self._sizes.values()) / weight
        spread = sum(size.num * (rows - mean_rows) ** 2 for rows, size in self._sizes.items())
        product = sum(size.num * (rows - mean_rows) * size.cost for rows, size in self._sizes.items())
        self._slope = max(0.0, product / spread) if spread else 0.0
        costs = []
        for rows, size in sorted(self._sizes.items()):
            line = max(0.1 * mean_cost, mean_cost + self._slope * (rows - mean_rows))
            whole = size.num + _LINE_WEIGHT
            costs.append((whole, (size.num * size.cost + _LINE_WEIGHT * line) / whole))
        self._curve = list(zip(sorted(self._sizes), _rising(costs), strict=True))

    def _cost(self, size: int) -> float:
        """Return the cost of a batch size: between two that were seen in proportion, beyond them along the line."""
        place = bisect_left(self._curve, (size, 0.0))
        if place == len(self._curve):
            rows, cost = self._curve[-1]
            return cost + self._slope * (size - rows)
        rows, cost = self._curve[place]
        if rows == size:
            return cost
        if place == 0:
            return max(0.1 * cost, cost - self._slope * (rows - size))
        before, cost_before = self._curve[place - 1]
        return cost_before + (cost - cost_before) * (size - before) / (rows - before)


class _TwoFactors:
    """A weighted least squares fit of value = a * x + b * y with a, b >= 0, in which old observations decay."""

    def __init__(self) -> None:
        self._xx = self._xy = self._yy = self._xv = self._yv = 0.0

    def observe(self, x: float, y: float, value: float, weight: float) -> None:
        """Add an observation to the fit."""
        self._xx = _PREFILL_DECAY * self._xx + weight * x * x
        self._xy = _PREFILL_DECAY * self._xy + weight * x * y
        self._yy = _PREFILL_DECAY * self._yy + weight * y * y
        self._xv = _PREFILL_DECAY * self._xv + weight * x * value
        self._yv = _PREFILL_DECAY * self._yv + weight * y * value

    def rescale(self, factor: float) -> None:
        """Multiply all observed values by a factor; relative errors weigh what they did."""
        self._xx /= factor**2
        self._xy /= factor**2
        self._yy /= factor**2
        self._xv /= factor
        self._yv /= factor

    def value(self, x: float, y: float) -> float:
        """Return the fitted value; infinite before the first observation."""
        if self._xx == 0:
            return math.inf
        determinant = self._xx * self._yy - self._xy**2
        if determinant > 1e-6 * self._xx * self._yy:
            a = (self._xv * self._yy - self._yv * self._xy) / determinant
            b = (self._yv * self._xx - self._xv * self._xy) / determinant
            if a >= 0 and b >= 0:
                return a * x + b * y
        # One factor alone, where the observations do not separate the two.
        return self._xv / self._xx * x


def _rising(values: Sequence[tuple[float, float]]) -> list[float]:
    """Return the values that never fall and are nearest to those given by weight: more rows take no less time.

    Args:
        values: weights, and what they weigh.
    """
    pools: list[tuple[float, float, int]] = []
    for weight, value in values:
        num = 1
        while pools and pools[-1][1] > value:
            other_weight, other, other_num = pools.pop()
            value = (weight * value + other_weight * other) / (weight + other_weight)
            weight, num = weight + other_weight, num + other_num
        pools.append((weight, value, num))
    return [value for _, value, num in pools for _ in range(num)]


def _possible(ratio: float, num_rows: float) -> float:
    """Return a measured ratio of two passes' times, limited to what a ratio `num_rows` of their rows allows.

    More rows take no less time, and no more than as many passes do. What lies beyond is taken only once, such as the
    time to compile a size's code.
    """
    return min(max(ratio, min(1.0, num_rows)), max(1.0, num_rows))
