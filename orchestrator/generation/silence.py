"""A watch over a worker that owes an answer."""

import asyncio
import time
from collections.abc import Callable


class SilenceWatch:
    """Calls back when a wait has lasted for too long.

    However many waits there are, the event loop has one timer: one for each verdict took a tenth of a verdict's way
    through the orchestrator.

    Args:
        bound_s: longest wait, in seconds.
        on_silence: called at its end.
    """

    def __init__(self, bound_s: float, on_silence: Callable[[], None]) -> None:
        self._bound_s = bound_s
        self._on_silence = on_silence
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begin a wait."""
        self._since = time.monotonic()
        if self._timer is None:
            self._call_after(self._bound_s)

    def end(self) -> None:
        """End the wait: something has arrived."""
        self._since = None

    def close(self) -> None:
        """End the watch."""
        self._since = None
        if self._timer is not None:
            self._timer.cancel()

    def _call_after(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._since is None:
            return
        remaining_s = self._since + self._bound_s - time.monotonic()
        if remaining_s > 0:
            self._call_after(remaining_s)
        else:
            self._since = None
            self._on_silence()
