"""Unexpected exceptions of one session at an engine, and the probe that finds an engine which serves no session."""

from collections.abc import Callable

from outrider.serving.unexpected import UnexpectedErrors


class EngineFailed(Exception):
    """The engine serves no session any more, so its process has to end."""


class SessionFailures:
    """Records failures of sessions, and probes the engine before a session is refused for one.

    An exception that one session causes must end that session alone. An exception that every session would meet, such
    as that of a broken device, must end the engine, and no session is refused for it. The probe, a step over a session
    of the engine's own, distinguishes the two.

    Args:
        probe: runs that step; raises `EngineFailed`.
    """

    def __init__(self, probe: Callable[[], object]) -> None:
        self._probe = probe
        self._unexpected = UnexpectedErrors()
        self._is_suspect = False

    def record(self, message: str, error: Exception, **about: object) -> None:
        """Log an unexpected exception, and have the next `settle` probe the engine.

        Args:
            message: what failed; always the same for one thing that can fail.
            error: the exception.
            about: fields of the log record.
        """
        self._unexpected.log(message, error, **about)
        self._is_suspect = True

    def suspect(self) -> None:
        """Have the next `settle` probe the engine, for a failure that was logged elsewhere."""
        self._is_suspect = True

    def settle(self) -> None:
        """Probe the engine once if anything was recorded since the last call. Call it before refusals are sent.

        Raises:
            EngineFailed: the probe failed.
        """
        if self._is_suspect:
            self._is_suspect = False
            self._probe()
