"""A bound on the targets that a request is lost with: one that crashes its target must not crash all in turn."""

from typing import Final

from outrider.errors import OutriderError, RequestFailed, Unavailable

_MAX_LOST: Final = 2
_FORGIVEN_LEN: Final = 32
"""Output tokens of a target after which earlier losses no longer count: targets also end for other reasons, and a long
request may outlive several of them."""


class TargetLosses:
    """A count of the targets that a request was lost with, which ends the request at two.

    A target is lost where its process or its stream ends while the request is open on it, or where it reports that the
    request itself fails. A refusal (full, draining, no KV cache) is no loss, nor is a target that is out of reach.
    """

    def __init__(self) -> None:
        self._lost: set[str] = set()
        self._num_failures = 0

    def record(self, error: OutriderError, incarnation: str, num_output: int, *, was_open: bool) -> None:
        """Count how a request left a target.

        Args:
            error: the reason.
            incarnation: of the target's process; a broken stream and an ended process look alike, but a process counts
                once.
            num_output: tokens that it output for the request.
            was_open: whether the request was open on it when its stream ended.

        Raises:
            RequestFailed: two targets, or one of them twice, have reported that the request itself fails.
            Unavailable: two targets were lost; a client that resumes tries others.
        """
        has_failed = isinstance(error, RequestFailed) or type(error) is OutriderError
        if not has_failed and not was_open:
            return
        if num_output >= _FORGIVEN_LEN:
            self._lost.clear()
            self._num_failures = 0
        if has_failed:
            self._num_failures += 1
        else:
            self._lost.add(incarnation)
        num = len(self._lost) + self._num_failures
        if num < _MAX_LOST:
            return
        if has_failed:
            raise RequestFailed(f"the request failed on {num} targets: {error.message}") from error
        raise Unavailable(f"the request was lost with {num} targets: {error.message}") from error
