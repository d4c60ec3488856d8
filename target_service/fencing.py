"""The highest fencing token that was seen of each session."""

from collections import OrderedDict

from outrider.errors import Fenced

_MAX_FENCING_TOKENS = 100_000


class FencingTokens:
    """Refuses fencing tokens that are lower than one that was seen. The least recent sessions are forgotten."""

    def __init__(self) -> None:
        self._highest: OrderedDict[str, int] = OrderedDict()

    def check(self, session_id: str, fencing_token: int) -> None:
        """Record a session's token; raise `Fenced` when a higher one was seen."""
        highest = self._highest.get(session_id, 0)
        if fencing_token < highest:
            raise Fenced(f"fencing token {fencing_token} is older than {highest}")
        self._highest[session_id] = fencing_token
        self._highest.move_to_end(session_id)
        if len(self._highest) > _MAX_FENCING_TOKENS:
            self._highest.popitem(last=False)
