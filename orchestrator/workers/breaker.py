"""When a worker that failed may be tried again."""

import time
from collections.abc import Callable
from typing import Final

_MAX_DOUBLINGS: Final = 4


class Breaker:
    """A circuit breaker: closed (the worker is used), open (it rests), half-open (one session tries it).

    Each failure of a trial doubles the rest, up to 16 times the first one. A trial that shows neither success nor
    failure within a rest does not keep others from trying.

    Args:
        rest_s: seconds of the first rest.
        clock: gives seconds.
    """

    def __init__(self, rest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rest_s = rest_s
        self._clock = clock
        self._num_failures = 0
        self._rests_until = 0.0
        self._trial_until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the worker rests."""
        return self._clock() < self._rests_until

    @property
    def permits(self) -> bool:
        """Whether a session may use the worker now."""
        return not self.is_open and (self._num_failures == 0 or self._clock() >= self._trial_until)

    def enter(self) -> None:
        """A session begins to use the worker; while half-open, it is the trial."""
        if self._num_failures:
            self._trial_until = self._clock() + self._present_rest_s

    def succeed(self) -> None:
        """The worker did what it is there for: the circuit closes."""
        self._num_failures = 0

    def fail(self) -> None:
        """The worker failed: it rests. Further failures during the rest are the same incident and change nothing."""
        if self.is_open:
            return
        self._num_failures += 1
        self._rests_until = self._clock() + self._present_rest_s
        self._trial_until = 0.0

    @property
    def _present_rest_s(self) -> float:
        return self._rest_s * float(1 << min(max(0, self._num_failures - 1), _MAX_DOUBLINGS))
