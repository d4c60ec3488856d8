"""How long a draft's step takes, as it tells those who wait for it."""

from typing import Final

_RISE: Final = 0.1
_FALL: Final = 0.4


class StepTime:
    """A mean of the last steps. Steps that run a prompt are long and rare: the mean rises slowly, and falls at once.

    Attributes:
        seconds: the mean; 0 before the first step.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def observe(self, duration_s: float) -> None:
        """Takes a step into account."""
        if not self.seconds:
            self.seconds = duration_s
        elif duration_s < self.seconds:
            self.seconds += _FALL * (duration_s - self.seconds)
        else:
            self.seconds += _RISE * (min(duration_s, 2 * self.seconds) - self.seconds)
