"""The sessions of a draft, open or idle: their tokens, the stream that has each open, and the expiry of idle ones."""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from opentelemetry import trace

from draft_service.engine.commands import Handle, ReplyStream
from outrider.drafters.drafter import DraftTerms
from outrider.errors import Fenced, InvalidArgument, KVCacheMiss, Overloaded, SessionNotFound
from outrider.serving.idle_sessions import IdleSessions
from outrider.serving.spans import fail
from outrider.tokens import TokenSpan


@dataclass(slots=True, eq=False)
class Session:
    """A session's tokens, and the stream that has it open.

    Attributes:
        session_id: the id that the orchestrator gave it.
        fencing_token: the highest that was seen.
        terms: of the request that it was opened for last.
        handle: the stream and handle that have it open; None while it is idle.
        token_ids: the session's tokens, unsigned 32-bit.
        num_feature_frames: frames of features that came since it was opened.
        span: trace span of the request that it was opened for last.
        num_sent: nodes that were sent since it was opened.
        is_gone: whether it is forgotten as soon as it is closed.
    """

    session_id: str
    fencing_token: int
    terms: DraftTerms
    handle: Handle | None = None
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    num_feature_frames: int = 0
    span: trace.Span = trace.INVALID_SPAN
    num_sent: int = 0
    is_gone: bool = False

    def apply(self, span: TokenSpan) -> int:
        """Replace the session's tokens from the span's start on by the span.

        Returns:
            Length up to which the tokens have not changed.

        Raises:
            KVCacheMiss: the span starts beyond the known tokens.
        """
        known_len = len(self.token_ids)
        if span.start > known_len:
            raise KVCacheMiss(f"the span starts at {span.start}, {known_len} tokens are known", known_len)
        # A replay may repeat tokens; their cache is kept.
        same_len = span.start + _common_len(self.token_ids[span.start : span.end], span.token_ids)
        del self.token_ids[same_len:]
        self.token_ids.extend(span.token_ids[same_len - span.start :])
        return same_len

    def drop_grammar(self) -> None:
        """Have the grammar of the request, which has ended, compiled no more, and forget it."""
        if self.terms.grammar is not None:
            self.terms.grammar.drop()
            self.terms = replace(self.terms, grammar=None)

    def end_span(self, error: str = "") -> None:
        """End the trace span of the request, unless it has ended; `error` is its reason where it failed."""
        if not self.span.is_recording():
            return
        self.span.set_attribute("outrider.num_nodes", self.num_sent)
        if error:
            fail(self.span, error)
        self.span.end()


class Sessions:
    """Every session that is open or idle. Not thread-safe: the engine's thread owns it.

    Args:
        max_open: sessions open at once.
        max_cached: sessions kept, open or idle; the least recently used idle ones go first.
        idle_ttl_s: seconds that an idle session is kept.
        forget: called with the id of each session that is dropped.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        max_open: int,
        max_cached: int,
        idle_ttl_s: float,
        forget: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_open = max_open
        self._max_cached = max_cached
        self._forget = forget
        self._handles: dict[Handle, Session] = {}
        self._open: dict[str, Session] = {}
        self._idle: IdleSessions[Session] = IdleSessions(idle_ttl_s, clock)

    @property
    def num_open(self) -> int:
        """Sessions that are open."""
        return len(self._open)

    @property
    def num_known(self) -> int:
        """Sessions that are open or idle."""
        return len(self._open) + len(self._idle)

    def open(self, handle: Handle, session_id: str, fencing_token: int, terms: DraftTerms) -> Session:
        """Open a session at a handle; a handle that had it open under the same or a lower fencing token loses it.

        Raises:
            InvalidArgument: the handle is in use.
            Fenced: a higher fencing token was seen.
            Overloaded: too many are open.
        """
        if handle in self._handles:
            raise InvalidArgument(f"handle {handle.number} is open already", "handle")
        session = self._open.get(session_id) or self._idle.get(session_id)
        if session is not None:
            _check_fence(session, fencing_token)
        if len(self._handles) >= self._max_open:
            raise Overloaded(f"{len(self._handles)} sessions are open, which is the limit")
        if session is None:
            session = Session(session_id, fencing_token, terms)
        else:
            session.drop_grammar()
        session.fencing_token, session.terms, session.handle = fencing_token, terms, handle
        session.num_feature_frames = 0
        self._idle.pop(session_id)
        self._handles[handle] = self._open[session_id] = session
        return session

    def at(self, handle: Handle, fencing_token: int) -> Session:
        """Return the session that is open at a handle.

        Raises:
            SessionNotFound: none was opened there.
            Fenced: another handle has it open now, or a higher fencing token was seen.
        """
        session = self._handles.get(handle)
        if session is None:
            raise SessionNotFound(f"handle {handle.number} is not open")
        _check_fence(session, fencing_token)
        if session.handle != handle:
            raise Fenced("the session was opened again elsewhere")
        session.fencing_token = fencing_token
        return session

    def session(self, handle: Handle) -> Session | None:
        """Return the session that is open at a handle, if it still is."""
        session = self._handles.get(handle)
        return session if session is not None and session.handle == handle else None

    def close(self, handle: Handle) -> Session | None:
        """Free a handle; return the session that this closes, None where another handle has it open."""
        session = self._handles.pop(handle, None)
        if session is None or session.handle != handle:
            return None
        session.handle = None
        session.drop_grammar()
        del self._open[session.session_id]
        if session.is_gone:
            self._forget(session.session_id)
        else:
            self._idle.add(session.session_id, session)
            self.expire()
        return session

    def handles_of(self, stream: ReplyStream) -> list[Handle]:
        """Return the handles of a stream that are in use."""
        return [handle for handle in self._handles if handle.stream is stream]

    def expire(self) -> None:
        """Drop the idle sessions that are too old or too many."""
        for session_id in self._idle.expire(self._max_cached - len(self._open)):
            self._forget(session_id)

    def forget(self, session_id: str) -> None:
        """Drop a session, if it is here: at once where it is idle, else when it is closed."""
        if (session := self._open.get(session_id)) is not None:
            session.is_gone = True
        elif self._idle.pop(session_id) is not None:
            self._forget(session_id)

    def next_expiry_s(self) -> float | None:
        """Return the seconds until an idle session gets too old; None where there is none."""
        return self._idle.next_expiry_s()


def _check_fence(session: Session, fencing_token: int) -> None:
    if fencing_token < session.fencing_token:
        raise Fenced(f"fencing token {fencing_token} is older than {session.fencing_token}")


def _common_len(known: "array[int]", given: tuple[int, ...]) -> int:
    """Return the length of the longest common prefix."""
    pairs = enumerate(zip(known, given, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(known), len(given)))
