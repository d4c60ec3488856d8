"""The delay of a pass for sessions that will be ready soon; `outrider.control.batching_delay` decides if it pays."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from outrider.control.batching_delay import batching_delay_s
from outrider.control.pass_times import PassTimes
from target_service.engine.open_request import OpenRequest

_DELAY_FACTOR: Final = 1.5
_DELAY_S: Final = 0.001
"""The batch deadline: so many times the batching delay, and so many seconds more; then the pass runs without those that
are not ready."""


class BatchDelay:
    """Holds a pass back until its batch deadline.

    Args:
        times: of the model's passes; without any, no pass is held back.
    """

    def __init__(self, times: PassTimes) -> None:
        self._times = times
        self._deadline: float | None = None

    def holds(self, decoding: Sequence[OpenRequest[Any]], ready: Sequence[OpenRequest[Any]], now: float) -> bool:
        """Return whether the pass over the requests that are ready waits for the others that decode.

        Args:
            decoding: all requests that decode.
            ready: those of them whose rounds wait no longer.
            now: monotonic time.
        """
        if not ready or len(ready) == len(decoding):
            return False
        numbers = {item.number for item in ready}
        coming = [item.speculation.batch_candidate(now) for item in decoding if item.number not in numbers]
        delay_s = batching_delay_s([item.speculation.batch_candidate(now) for item in ready], coming, self._times)
        if delay_s is None:
            return False
        if self._deadline is None:
            self._deadline = now + _DELAY_FACTOR * delay_s + _DELAY_S
        return now < self._deadline

    def end(self) -> None:
        """Forget the deadline: the pass runs, or there is none."""
        self._deadline = None

    def next_time(self, runnable: Iterable[OpenRequest[Any]], now: float) -> float | None:
        """Return when there may be a pass if no command comes before; None for never.

        Args:
            runnable: requests that could take part in a pass, and take part in none now.
            now: monotonic time.
        """
        deadline = now if self._deadline is None else self._deadline
        times = (deadline if item.is_ready(now) else item.speculation.wait_until for item in runnable)
        return min(times, default=None)
