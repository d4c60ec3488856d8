"""What passes of a model take, as a function of their rows: measured, old values fade."""

from typing import Final

_FADING: Final = 0.98
_BENDING: Final = 0.1
_PADDING: Final = 4
"""Passes are padded to a multiple of this many rows."""


class DecayingMean:
    """A mean in which an observation `n` steps old weighs (1 - share) ** n; the first ones weigh more."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._num = 0
        self.value = 0.0

    def observe(self, value: float) -> None:
        """Takes a value into the mean."""
        self._num += 1
        self.value += max(self._share, 1 / self._num) * (value - self.value)

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._num > 0


class PassTimes:
    """Measured decoding passes of one target, over all its sessions.

    Seconds are a line over the number of rows, which follows the machine's speed at once, and for each size that has
    been seen its own distance from that line.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._squares = self._seconds = self._products = 0.0
        self._bends: dict[int, DecayingMean] = {}
        self.num_sessions = 1
        """Sessions that decode now."""

    @property
    def known(self) -> bool:
        """Whether any pass was observed."""
        return self._weight > 0

    def observe(self, duration_s: float, num_rows: int) -> None:
        """Takes a decoding pass into account (not one that prefills)."""
        num_rows = _padded(num_rows)
        values = (1.0, num_rows, num_rows**2, duration_s, num_rows * duration_s)
        sums = (self._weight, self._rows, self._squares, self._seconds, self._products)
        faded = (_FADING * total + value for total, value in zip(sums, values, strict=True))
        self._weight, self._rows, self._squares, self._seconds, self._products = faded
        self._bends.setdefault(num_rows, DecayingMean(_BENDING)).observe(duration_s - self._line_s(num_rows))

    @property
    def row_s(self) -> float:
        """Seconds that a row adds to a pass; 0 while passes of different sizes have not shown it."""
        spread = self._weight * self._squares - self._rows**2
        if spread <= 1e-3 * self._rows**2:
            return 0.0
        return max(0.0, (self._weight * self._products - self._rows * self._seconds) / spread)

    def pass_s(self, num_rows: int) -> float:
        """Returns the seconds of a pass over so many rows; 0 while nothing is known."""
        if not self.known:
            return 0.0
        num_rows = _padded(num_rows)
        bend = self._bends.get(num_rows)
        line_s = self._line_s(num_rows)
        return max(0.5 * line_s, line_s + (bend.value if bend is not None else 0.0))

    def _line_s(self, num_rows: int) -> float:
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        return max(0.1 * mean_s, mean_s + self.row_s * (num_rows - mean_rows))


def _padded(num_rows: int) -> int:
    return -(-num_rows // _PADDING) * _PADDING
