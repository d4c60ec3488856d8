"""The budget of prompt rows in a pass: few enough that sessions which decode are not held up for long."""

from math import inf
from typing import Final

from outrider.control.pass_times import PassTimes

_MIN_ROWS: Final = 4
_GROWTH: Final = 2


class PassBudget:
    """Bounds the prompt rows of passes by what passes cost.

    Args:
        max_slowdown: how many times as long as without prompts a pass may take while sessions decode, above 1; with one
            prompt. Each of several may add as much, so that how long one takes does not depend on how many there are,
            and a batch that many join at once is soon full.
        times: the times of the model's passes.
    """

    def __init__(self, max_slowdown: float, times: PassTimes) -> None:
        self._max_slowdown = max_slowdown
        self._times = times
        self._num_rows = _MIN_ROWS

    def allowance_s(self, num_decode_rows: int, num_prompts: int = 1) -> float:
        """Return the seconds that prompts may add to a pass with so many other rows; infinite where there are none."""
        if num_decode_rows == 0:
            return inf
        return (self._max_slowdown - 1) * num_prompts * self._times.pass_s(num_decode_rows)

    def remaining_s(self, seconds: float, num_rows: int, start: int) -> float:
        """Return what these rows leave of an allowance, at least 0; `start` is the position of the first."""
        return inf if seconds == inf else max(0.0, seconds - self._times.prefill_s(num_rows, start))

    def rows_within(self, seconds: float, start: int, wanted: int) -> int:
        """Return how many of the wanted rows, the first at position `start`, fit in an allowance.

        They are at most twice as many as the last pass had, so that a cost that was estimated too low, as from a few
        passes of short prompts, holds nobody up for long.
        """
        if seconds in (0.0, inf):
            return wanted if seconds else 0
        row_s = self._times.prefill_s(_MIN_ROWS, start) / _MIN_ROWS
        most = min(wanted, _GROWTH * self._num_rows)
        return min(most, int(seconds / row_s)) if row_s > 0 else most

    def observe(self, num_rows: int) -> None:
        """Take into account the rows of a pass, within its allowance, of the prompt that had most."""
        self._num_rows = max(_MIN_ROWS, num_rows)
