"""How many prompt tokens a pass may carry without holding up the sessions that decode."""

from math import inf
from typing import Final

_SMOOTHING: Final = 0.1
_DECAY: Final = 0.95
_MIN_ROWS: Final = 4


class PassBudget:
    """Learns what prompts add to a pass, and bounds it.

    A row of a prompt costs its share of the linear layers, and attention to all positions before it:

        added_s = row_s * rows + position_s * rows * positions

    Both factors are fitted by least squares of the relative error over the last passes that had prompts, against the
    moving average of passes that had none (one for each power of two of rows).

    Args:
        max_slowdown: how many times as long as without prompts a pass may take while sessions decode, above 1; with one
            prompt. Each of several may add as much, so that how long one takes does not depend on how many there are,
            and a batch that many join at once is soon full.
    """

    def __init__(self, max_slowdown: float) -> None:
        self._max_slowdown = max_slowdown
        self._decode_s: dict[int, float] = {}
        self._fit = _TwoFactors()

    def observe(self, num_decode_rows: int, prefill: list[tuple[int, int]], duration_s: float) -> None:
        """Learns from a pass.

        Args:
            num_decode_rows: rows of sessions that decode.
            prefill: of each prompt's part its rows, and the position of the first.
            duration_s: seconds it took.
        """
        if not prefill:
            size = _size(num_decode_rows)
            known = self._decode_s.get(size, duration_s)
            self._decode_s[size] = known + _SMOOTHING * (duration_s - known)
            return
        base_s = self._decode(num_decode_rows) if num_decode_rows else 0.0
        if base_s is not None:
            rows = sum(num for num, _ in prefill)
            positions = sum(num * (start + num / 2) for num, start in prefill)
            self._fit.observe(rows, positions, max(0.0, duration_s - base_s), 1 / duration_s**2)

    def allowance_s(self, num_decode_rows: int, num_prompts: int = 1) -> float:
        """Returns the seconds that prompts may add to a pass with so many other rows; infinite where there are none."""
        if num_decode_rows == 0:
            return inf
        base_s = self._decode(num_decode_rows)
        return 0.0 if base_s is None else (self._max_slowdown - 1) * num_prompts * base_s

    def cost_s(self, num_rows: int, start: int) -> float:
        """Returns the seconds that rows of a prompt add, the first at position `start`; infinite while unknown."""
        return self._fit.value(num_rows, num_rows * (start + num_rows / 2))

    def remaining_s(self, seconds: float, num_rows: int, start: int) -> float:
        """Returns what is left of an allowance after these rows, at least 0."""
        return inf if seconds == inf else max(0.0, seconds - self.cost_s(num_rows, start))

    def rows_within(self, seconds: float, start: int, wanted: int) -> int:
        """Returns how many of the wanted rows, the first at position `start`, add no more than that."""
        if seconds in (0.0, inf):
            return wanted if seconds else 0
        row_s = self.cost_s(_MIN_ROWS, start) / _MIN_ROWS
        return min(wanted, int(seconds / row_s)) if row_s > 0 else wanted

    def _decode(self, num_rows: int) -> float | None:
        """Returns the time of a pass without prompts: of this size, or else of the nearest that was measured."""
        size = _size(num_rows)
        nearest = min(self._decode_s, key=lambda known: abs(known.bit_length() - size.bit_length()), default=None)
        return None if nearest is None else self._decode_s[nearest]


class _TwoFactors:
    """A weighted least squares fit of value = a * x + b * y with a, b >= 0, in which old observations fade."""

    def __init__(self) -> None:
        self._xx = self._xy = self._yy = self._xv = self._yv = 0.0

    def observe(self, x: float, y: float, value: float, weight: float) -> None:
        """Takes an observation into the fit."""
        self._xx = _DECAY * self._xx + weight * x * x
        self._xy = _DECAY * self._xy + weight * x * y
        self._yy = _DECAY * self._yy + weight * y * y
        self._xv = _DECAY * self._xv + weight * x * value
        self._yv = _DECAY * self._yv + weight * y * value

    def value(self, x: float, y: float) -> float:
        """Returns the fitted value; infinite before the first observation."""
        if self._xx == 0:
            return inf
        determinant = self._xx * self._yy - self._xy**2
        if determinant > 1e-6 * self._xx * self._yy:
            a = (self._xv * self._yy - self._yv * self._xy) / determinant
            b = (self._yv * self._xx - self._xv * self._xy) / determinant
            if a >= 0 and b >= 0:
                return a * x + b * y
        # One factor alone, where the observations do not tell the two apart.
        return self._xv / self._xx * x


def _size(num_rows: int) -> int:
    return max(_MIN_ROWS, 1 << (num_rows - 1).bit_length())
