"""A mean of observations in which old ones decay."""

import math


class DecayingMean:
    """A mean in which an observation `n` steps old weighs (1 - share) ** n; the first ones weigh more.

    Args:
        share: weight of the newest observation, in (0, 1].
        start: value before the first observation.
        num_start: number of observations that `start` counts for.
        max_ratio: an observation counts as at most so many times the mean, because one stall of the machine predicts
            little. A lasting change is followed all the same.
        doubts_first: whether at first the mean counts as at most so many times an observation, because it may have
            been that stall; not for what is often near 0. A mean that is too small corrects itself sooner: it is used,
            and so observed.
    """

    def __init__(
        self,
        share: float,
        start: float = 0.0,
        num_start: int = 0,
        max_ratio: float = math.inf,
        *,
        doubts_first: bool = False,
    ) -> None:
        self._share = share
        self._num = num_start
        self._max_ratio = max_ratio
        self._doubts_first = doubts_first
        self.value = start

    def observe(self, value: float, *, is_certain: bool = False) -> None:
        """Add an observation; one that is certain to be no stall is not clipped."""
        if self.known and not is_certain:
            value = self.clipped(value)
            if self._doubts_first and self._share * self._num < 1 and value > 0:
                self.value = min(self.value, self._max_ratio * value)
        self._num += 1
        self.value += max(self._share, 1 / self._num) * (value - self.value)

    def restart(self) -> None:
        """Have the next observation replace the mean, whatever was observed before."""
        self._num = 0

    def clipped(self, value: float) -> float:
        """Return the value that an observation counts as."""
        return min(self._max_ratio * self.value, value) if self.value > 0 else value

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._num > 0
