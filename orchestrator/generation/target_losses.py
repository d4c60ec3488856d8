"""How many targets a request may be lost to: one that ends whatever serves it must not end all targets in turn."""

from typing import Final

from outrider.errors import OutriderError, RequestFailed, Unavailable

_MAX_LOST: Final = 2
_FORGIVEN_LEN: Final = 32
"""Output tokens of a target, after which what happened before is not held against the request: targets end for other
reasons too, and a long request may outlive several of them."""


class TargetLosses:
    """Counts the targets that a request was lost to, and says when they are enough.

    A target is lost where its process or its stream ends while the request is open on it, or where it says that the
    request fails by itself. A refusal (full, draining, no KV cache) is no loss, nor is a target that cannot be reached.
    """

    def __init__(self) -> None:
        self._lost: set[str] = set()
        self._num_failures = 0

    def note(self, error: OutriderError, incarnation: str, num_output: int, *, was_open: bool) -> None:
        """Takes into account how a request left a target.

        Args:
            error: why.
            incarnation: of the target's process; a stream that broke and a process that ended look alike, but one
                process is lost once.
            num_output: tokens that it output for the request.
            was_open: whether the request was open on it, and its stream ended.

        Raises:
            RequestFailed: two targets, or one of them twice, have said that the request fails by itself.
            Unavailable: two targets were lost; resuming tries others.
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
