"""A session's tokens in memory, as far as they are needed."""

from orchestrator.store.sessions import SessionRecord
from orchestrator.store.store import SessionStore
from outrider.errors import Unavailable
from outrider.tokens import TokenSpan


class SessionTokens:
    """A session's tokens from some position on; earlier ones are read from the log when they are needed.

    Args:
        store: has the log.
        record: the session.
        start: position of the first of `token_ids`.
        token_ids: tokens up to the session's end.
    """

    def __init__(self, store: SessionStore, record: SessionRecord, start: int, token_ids: list[int]) -> None:
        self._store = store
        self._record = record
        self._start = start
        self._token_ids = token_ids

    @property
    def end(self) -> int:
        """The session's length, uncommitted tokens included."""
        return self._start + len(self._token_ids)

    def append(self, token_ids: list[int]) -> None:
        """Adds output."""
        self._token_ids += token_ids

    def since(self, start: int) -> TokenSpan:
        """Returns what is at hand from a position on; begins later where earlier tokens are not at hand."""
        start = max(start, self._start)
        return TokenSpan(start, tuple(self._token_ids[start - self._start :]))

    def until(self, end: int) -> TokenSpan:
        """Returns what is at hand of the tokens before a position."""
        return TokenSpan(self._start, tuple(self._token_ids[: max(0, end - self._start)]))

    async def read_from(self, start: int) -> tuple[int, ...]:
        """Returns all tokens from a position on."""
        missing = self._start
        if start < missing:
            record = self._record
            earlier = await self._store.read_tokens(record.tenant, record.session_id, start, missing)
            if len(earlier) != missing - start:
                raise Unavailable("the token log could not be read")
            # Another reader may have fetched some or all of it meanwhile.
            if start < self._start:
                self._token_ids = earlier[: self._start - start] + self._token_ids
                self._start = start
        return tuple(self._token_ids[start - self._start :])
