"""Idle sessions of a worker: kept for their TTL, up to a number."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

SessionT = TypeVar("SessionT")


class IdleSessions(Generic[SessionT]):
    """Idle sessions by id, least recently used first. Not thread-safe.

    A worker is not notified when a session expires, so it forgets those that are not used. One that is used again costs
    time only: its tokens are sent again, and the pages of its KV cache can be found by content.

    Args:
        ttl_s: seconds for which a session is kept.
        clock: seconds, monotonic.
    """

    def __init__(self, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._sessions: OrderedDict[str, tuple[SessionT, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: str) -> SessionT | None:
        """Return a session, if it is here."""
        found = self._sessions.get(session_id)
        return found[0] if found else None

    def add(self, session_id: str, session: SessionT) -> None:
        """Keep a session from now on."""
        self._sessions[session_id] = session, self._clock()

    def pop(self, session_id: str) -> SessionT | None:
        """Return a session, if it is here, and keep it no longer."""
        found = self._sessions.pop(session_id, None)
        return found[0] if found else None

    def expire(self, max_kept: int) -> list[str]:
        """Keep no longer those that are too old, and the oldest of more than `max_kept`; return their ids."""
        oldest_s = self._clock() - self._ttl_s
        expired: list[str] = []
        while self._sessions:
            session_id, (_, used_s) = next(iter(self._sessions.items()))
            if len(self._sessions) <= max_kept and used_s > oldest_s:
                break
            del self._sessions[session_id]
            expired.append(session_id)
        return expired

    def next_expiry_s(self) -> float | None:
        """Return the seconds until a session gets too old; None where there is none."""
        if not self._sessions:
            return None
        _, used_s = next(iter(self._sessions.values()))
        return max(0.0, used_s + self._ttl_s - self._clock())
