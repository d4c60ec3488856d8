"""How many prompt tokens a pass may carry without holding up the sessions that decode."""

from typing import Final

_SMOOTHING: Final = 0.2
_FADING: Final = 0.99
_MIN_ROWS: Final = 4


class PassBudget:
    """Learns what a pass costs by its number of rows, and bounds prefill by it.

    A pass of a few rows reads every weight once and takes nearly as long as one of a single row; from some number on
    each row adds to it. Where that is depends on the machine, so it is measured: a moving average for each power of
    two.

    Args:
        max_slowdown: how many times as long as without prompts a pass may take while sessions decode, above 1.
        max_rows: rows of one pass, at most.
    """

    def __init__(self, max_slowdown: float, max_rows: int) -> None:
        self._max_slowdown = max_slowdown
        self._max_rows = max_rows
        self._times: dict[int, float] = {}

    def observe(self, num_rows: int, duration_s: float) -> None:
        """Learns from a pass."""
        size = _size(num_rows)
        known = self._times.get(size)
        self._times[size] = duration_s if known is None else known + _SMOOTHING * (duration_s - known)

    def prefill_rows(self, num_decode_rows: int) -> int:
        """Returns how many rows of prompts may join a pass with so many other rows; never so few that none advances."""
        if num_decode_rows == 0:
            return self._max_rows
        room = max(_MIN_ROWS, self._max_rows - num_decode_rows)
        base = self._times.get(_size(num_decode_rows))
        if base is None:
            return min(room, _MIN_ROWS)
        rows = num_decode_rows + _MIN_ROWS
        size = _size(rows)
        while size - num_decode_rows <= room:
            time_s = self._times.get(size)
            if time_s is not None and time_s > self._max_slowdown * base:
                # What bars a size fades, so that one disturbed measurement does not bar it for good.
                self._times[size] = time_s * _FADING
                break
            rows = size
            # A size that has not been measured is tried before any larger one.
            if time_s is None:
                break
            size *= 2
        return max(_MIN_ROWS, min(room, rows - num_decode_rows))


def _size(num_rows: int) -> int:
    return max(_MIN_ROWS, 1 << (num_rows - 1).bit_length())
