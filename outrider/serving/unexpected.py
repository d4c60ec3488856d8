"""Exceptions that no caller should be able to cause: named for the caller, logged to troubleshoot them."""

import logging
import time
import traceback
from collections.abc import Callable
from typing import Final

from outrider.errors import OutriderError, RequestFailed

_LOG: Final = logging.getLogger(__name__)
_EVERY_S: Final = 60.0


class UnexpectedErrors:
    """Logs unexpected exceptions with their traceback.

    Those of one message and place are logged once a minute: a caller may repeat them without end.

    Its methods may be called from any thread.

    Args:
        clock: gives seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[tuple[str, type[Exception], str], float] = {}
        self._num_left_out = 0

    def log(self, message: str, error: Exception, **about: object) -> None:
        """Log an exception, unless the message was logged with one of its type and place less than a minute ago.

        Args:
            message: what failed; always the same for one thing that can fail.
            error: why.
            about: fields of the record.
        """
        now, place = self._clock(), (message, type(error), _place(error))
        if now - self._logged_at.get(place, -_EVERY_S) < _EVERY_S:
            self._num_left_out += 1
            return
        self._logged_at[place] = now
        num_left_out, self._num_left_out = self._num_left_out, 0
        _LOG.error(message, exc_info=error, extra={**about, "num_left_out": num_left_out})

    def named(self, message: str, error: Exception, **about: object) -> OutriderError:
        """Return a named error as it is; log any other, and return `RequestFailed` in its place."""
        if isinstance(error, OutriderError):
            return error
        self.log(message, error, **about)
        return RequestFailed(message)


def _place(error: Exception) -> str:
    """Return file and line where an exception was raised. There are only as many as the code has lines."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return f"{frames[0].filename}:{frames[0].lineno}" if frames else ""
