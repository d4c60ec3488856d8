"""The sessions a draft knows: their tokens, who may draft for them, and how long an idle one is kept."""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry import trace

from draft_service.engine.commands import ReplyStream, Seat
from outrider.drafters.drafter import DraftTerms
from outrider.errors import Fenced, InvalidArgument, KVCacheMiss, Overloaded, SessionNotFound
from outrider.serving.idle_sessions import IdleSessions
from outrider.tokens import TokenSpan


@dataclass(slots=True, eq=False)
class Session:
    """A session's tokens, and where it is open.

    Attributes:
        session_id: as the orchestrator keys it.
        fencing_token: the highest seen.
        token_ids: the session's tokens, unsigned 32-bit.
        seat: where it is open; None while it is idle.
        terms: what it was opened with last.
        num_feature_frames: that came since it was opened.
        span: of the trace of the request that it was opened for last.
        num_sent: nodes that were sent since it was opened.
        is_gone: whether it is forgotten as soon as it is open nowhere.
    """

    session_id: str
    fencing_token: int
    terms: DraftTerms
    seat: Seat | None = None
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    num_feature_frames: int = 0
    span: trace.Span = trace.INVALID_SPAN
    num_sent: int = 0
    is_gone: bool = False

    def apply(self, span: TokenSpan) -> int:
        """Makes the span the end of the session's tokens.

        Returns:
            Length up to which the tokens are what they were before.

        Raises:
            KVCacheMiss: the span starts beyond the known tokens.
        """
        known_len = len(self.token_ids)
        if span.start > known_len:
            raise KVCacheMiss(f"the span starts at {span.start}, {known_len} tokens are known", known_len)
        # A replay may repeat tokens; what is kept of them is worth keeping.
        same_len = span.start + _common_len(self.token_ids[span.start : span.end], span.token_ids)
        del self.token_ids[same_len:]
        self.token_ids.extend(span.token_ids[same_len - span.start :])
        return same_len


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
        self._seats: dict[Seat, Session] = {}
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

    def open(self, seat: Seat, session_id: str, fencing_token: int, terms: DraftTerms) -> Session:
        """Opens a session at a seat; whoever had it open under the same or a lower fencing token has lost it.

        Raises:
            InvalidArgument: the seat is taken.
            Fenced: a higher fencing token was seen.
            Overloaded: too many are open.
        """
        if seat in self._seats:
            raise InvalidArgument(f"handle {seat.handle} is open already", "handle")
        session = self._open.get(session_id) or self._idle.get(session_id)
        if session is not None:
            _check_fence(session, fencing_token)
        if len(self._seats) >= self._max_open:
            raise Overloaded(f"{len(self._seats)} sessions are open, which is the limit")
        if session is None:
            session = Session(session_id, fencing_token, terms)
        session.fencing_token, session.terms, session.seat = fencing_token, terms, seat
        session.num_feature_frames = 0
        self._idle.pop(session_id)
        self._seats[seat] = self._open[session_id] = session
        return session

    def at(self, seat: Seat, fencing_token: int) -> Session:
        """Returns the session that is open at the seat.

        Raises:
            SessionNotFound: none was opened there.
            Fenced: it is open elsewhere now, or a higher fencing token was seen.
        """
        session = self._seats.get(seat)
        if session is None:
            raise SessionNotFound(f"handle {seat.handle} is not open")
        _check_fence(session, fencing_token)
        if session.seat != seat:
            raise Fenced("the session was opened again elsewhere")
        session.fencing_token = fencing_token
        return session

    def session(self, seat: Seat) -> Session | None:
        """Returns the session that is open at the seat, if it still is."""
        session = self._seats.get(seat)
        return session if session is not None and session.seat == seat else None

    def close(self, seat: Seat) -> Session | None:
        """Frees the seat; returns the session that is open nowhere from now on, if there is one."""
        session = self._seats.pop(seat, None)
        if session is None or session.seat != seat:
            return None
        session.seat = None
        del self._open[session.session_id]
        if session.is_gone:
            self._forget(session.session_id)
        else:
            self._idle.add(session.session_id, session)
            self.expire()
        return session

    def seats_of(self, stream: ReplyStream) -> list[Seat]:
        """Returns the stream's seats."""
        return [seat for seat in self._seats if seat.stream is stream]

    def expire(self) -> None:
        """Drops the idle sessions that are too old or too many."""
        for session_id in self._idle.expire(self._max_cached - len(self._open)):
            self._forget(session_id)

    def forget(self, session_id: str) -> None:
        """Drops a session, if it is here: at once where it is idle, else when it is closed."""
        if (session := self._open.get(session_id)) is not None:
            session.is_gone = True
        elif self._idle.pop(session_id) is not None:
            self._forget(session_id)

    def next_expiry_s(self) -> float | None:
        """Returns the seconds until an idle session gets too old; None where there is none."""
        return self._idle.next_expiry_s()


def _check_fence(session: Session, fencing_token: int) -> None:
    if fencing_token < session.fencing_token:
        raise Fenced(f"fencing token {fencing_token} is older than {session.fencing_token}")


def _common_len(known: "array[int]", given: tuple[int, ...]) -> int:
    """Returns the length of the longest common prefix."""
    pairs = enumerate(zip(known, given, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(known), len(given)))
