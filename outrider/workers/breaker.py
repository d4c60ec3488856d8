"""The circuit breaker of a worker."""

import time
from collections.abc import Callable
from typing import Final

_MAX_DOUBLINGS: Final = 4


class Breaker:
    """A circuit breaker: closed (the worker is used), open (it is not), half-open (one session tries it).

    Each failure of a trial doubles the time for which the circuit is open, up to 16 times the first one. A trial that
    shows neither success nor failure within that time does not keep others from trying.

    Args:
        open_s: seconds for which the first failure opens the circuit.
        clock: returns seconds.
    """

    def __init__(self, open_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first_open_s = open_s
        self._clock = clock
        self._num_failures = 0
        self._open_until = 0.0
        self._trial_until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the circuit is open."""
        return self._clock() < self._open_until

    @property
    def permits(self) -> bool:
        """Whether a session may use the worker now."""
        return not self.is_open and (self._num_failures == 0 or self._clock() >= self._trial_until)

    def enter(self) -> None:
        """Record that a session begins to use the worker; while half-open, it is the trial."""
        if self._num_failures:
            self._trial_until = self._clock() + self._open_s

    def succeed(self) -> None:
        """Close the circuit."""
        self._num_failures = 0

    def fail(self) -> None:
        """Open the circuit; further failures while it is open belong to the same incident and change nothing."""
        if self.is_open:
            return
        self._num_failures += 1
        self._open_until = self._clock() + self._open_s
        self._trial_until = 0.0

    @property
    def _open_s(self) -> float:
        return self._first_open_s * float(1 << min(max(0, self._num_failures - 1), _MAX_DOUBLINGS))
