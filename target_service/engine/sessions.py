"""Resident sessions of a target: their tokens and KV caches, and the expiry of idle ones."""

import contextlib
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from outrider.errors import InvalidArgument, KVCacheMiss
from outrider.serving.idle_sessions import IdleSessions
from outrider.tokens import TokenSpan


class SessionCache(Protocol):
    """The KV cache of a session, as far as the session's tokens decide about it; see `outrider.lm.model.KVCache`."""

    @property
    def cached_len(self) -> int:
        """Number of cached tokens."""

    def truncate(self, length: int) -> None:
        """Drop the positions from `length` on; no-op if fewer are cached."""

    def release(self) -> None:
        """Drop all positions."""


CacheT = TypeVar("CacheT", bound=SessionCache)


@dataclass(slots=True, eq=False)
class Resident(Generic[CacheT]):
    """A session whose tokens this target holds, whether a request runs on it or not.

    Invariant: `cache.cached_len <= len(token_ids)`; the tokens beyond `cached_len` are still to be run. Tokens beyond
    `committed_len` may never have been committed: they are only trusted while the request that output them runs.
    """

    session_id: str
    cache: CacheT
    token_ids: list[int] = field(default_factory=list)
    committed_len: int = 0
    is_gone: bool = False
    """Whether the session is forgotten as soon as no request runs on it."""

    def apply(self, span: TokenSpan, vocabulary_size: int, max_len: int) -> None:
        """Truncate to the span's start and append it.

        Raises:
            KVCacheMiss: the span starts beyond the tokens that are here.
            InvalidArgument: a token id is outside the vocabulary, or the session becomes too long.
        """
        if span.start > len(self.token_ids):
            raise KVCacheMiss(f"span starts at {span.start}, {len(self.token_ids)} are here", self.cache.cached_len)
        if not span.token_ids:
            raise InvalidArgument("span has no tokens", "span")
        if any(token_id >= vocabulary_size for token_id in span.token_ids):
            raise InvalidArgument(f"span has a token id outside the vocabulary of {vocabulary_size}", "span")
        if span.end > max_len:
            raise InvalidArgument(f"span ends at {span.end}, the longest session has {max_len} tokens", "span")
        self._share_prefix(span)

    def _share_prefix(self, span: TokenSpan) -> None:
        # Tokens that do not change stay cached: a replay from an earlier start costs only those that differ. The last
        # token is always run (again), because its logits decide the next one.
        known = self.token_ids[span.start : span.end]
        same = next((i for i, (a, b) in enumerate(zip(known, span.token_ids, strict=False)) if a != b), len(known))
        del self.token_ids[span.start + same :]
        self.token_ids += span.token_ids[same:]
        self.cache.truncate(min(span.start + same, len(self.token_ids) - 1))

    def suspend(self, length: int) -> None:
        """Keep the tokens up to position `length` until the next request, and release the KV cache.

        Its pages stay in the prefix cache while there is room.
        """
        del self.token_ids[length:]
        self.cache.truncate(length)
        self.cache.release()


class Residents(Generic[CacheT]):
    """All resident sessions: those that a request runs on, and idle ones up to a number and an age.

    Args:
        max_residents: sessions of both kinds; the least recently used idle ones go first.
        idle_ttl_s: seconds that an idle session is kept.
    """

    def __init__(self, max_residents: int, idle_ttl_s: float) -> None:
        self._max_residents = max_residents
        self._busy: dict[str, Resident[CacheT]] = {}
        self._idle: IdleSessions[Resident[CacheT]] = IdleSessions(idle_ttl_s)

    def __len__(self) -> int:
        return len(self._busy) + len(self._idle)

    def take(self, session_id: str) -> Resident[CacheT] | None:
        """Return an idle session for a request, if it is here."""
        resident = self._idle.pop(session_id)
        if resident is not None:
            self._busy[session_id] = resident
        return resident

    def add(self, resident: Resident[CacheT]) -> None:
        """Add a new session for a request."""
        self._busy[resident.session_id] = resident
        self.expire()

    def suspend(self, resident: Resident[CacheT], length: int) -> None:
        """End a request's use of a session; keep its tokens up to position `length` unless it is to be forgotten."""
        resident.suspend(length)
        if self._busy.get(resident.session_id) is not resident:
            return  # it was dropped
        del self._busy[resident.session_id]
        if not resident.is_gone:
            self._idle.add(resident.session_id, resident)
            self.expire()

    def drop(self, resident: Resident[CacheT]) -> None:
        """Forget a session that a request runs on and that failed.

        The end of its KV cache may be wrong, and `KVCache.release` would publish it to the prefix cache. Pages that
        cannot be released are lost, rather than held by two sessions.
        """
        self._busy.pop(resident.session_id, None)
        with contextlib.suppress(Exception):
            resident.cache.truncate(0)

    def forget(self, session_id: str) -> None:
        """Forget a session, if it is here: at once where it is idle, else when its request ends."""
        if (resident := self._busy.get(session_id)) is not None:
            resident.is_gone = True
        else:
            self._idle.pop(session_id)

    def expire(self) -> None:
        """Forget the idle sessions that are too old or too many; they hold no memory of the KV cache."""
        self._idle.expire(self._max_residents - len(self._busy))

    def next_expiry_s(self) -> float | None:
        """Return the seconds until an idle session gets too old; None where there is none."""
        return self._idle.next_expiry_s()
