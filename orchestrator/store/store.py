"""Sessions in Redis: a hash and an append-only token log each, changed by Lua scripts only.

Every script is idempotent under its fencing token, so a call whose connection broke is repeated, a bounded number of
times. All keys of a session share a hash tag, so Redis Cluster works; ids are hashed, so they cannot inject keys.
"""

import secrets
from collections.abc import Sequence
from typing import Any, Final

from orchestrator.store.connection import Durability, RedisConnection
from orchestrator.store.errors import check_lease, of_session, refuse, session_named
from orchestrator.store.record import (
    TOKEN_BYTES,
    SessionRecord,
    is_derived,
    packed,
    parameters_to_json,
    redis_keys,
    unpacked,
    worker_key,
)
from orchestrator.store.sessions import BeginOutcome, Begun, Committed, Lease, NewRequest, SessionEnd
from outrider.errors import DataLoss, RequestNotFound, SessionNotFound
from outrider.parameters import FinishReason

_UNNAMED_TTL_S: Final = 300.0
"""Seconds for which a session that no client named is kept, so that its request can be resumed."""
_BEGUN: Final = {outcome.value for outcome in BeginOutcome}


class SessionStore:
    """All sessions of one Redis.

    Args:
        url: redis:// or rediss://.
        lease_s: seconds until a lease that is not renewed ends.
        ttl_s: seconds until a session that is not used expires; at most 300 for those that no client named.
        timeout_s: see `RedisConnection`.
        durability: see `RedisConnection`.

    Attributes:
        connection: to that Redis.
    """

    def __init__(
        self,
        url: str,
        *,
        lease_s: float = 10.0,
        ttl_s: float = 86400.0,
        timeout_s: float = 1.0,
        durability: Durability | None = None,
    ) -> None:
        self.connection = RedisConnection(url, timeout_s, durability)
        self._redis = self.connection.client
        self._lease_us = int(lease_s * 1e6)
        self._ttl_ms = int(ttl_s * 1e3)

    async def close(self) -> None:
        """Close all connections, once every call in flight has ended; later calls raise `Unavailable`."""
        await self.connection.close()

    async def begin(self, request: NewRequest) -> Begun:
        """Lease the session and begin the request, or continue the same request; see lua/begin.lua.

        Raises:
            SessionBusy: another request runs on the session, or this one elsewhere.
            DuplicateRequest: the request id was used with other content.
            SessionNotFound: the session to resume does not exist.
            RequestNotFound: the session's latest request is another one.
            ModelMismatch: the session was made with another model or tokenizer.
            InvalidArgument: the prompt leaves no room.
            DataLoss: the log differs from the commits.
            Overloaded: Redis is out of memory.
            Unavailable: Redis does not answer within the bound.
        """
        ttl_ms = self._ttl_ms
        if is_derived(request.tenant, request.session_id, request.request_id):
            ttl_ms = min(ttl_ms, int(1e3 * _UNNAMED_TTL_S))
        outcome, *found = await self._run_on(
            request.tenant,
            request.session_id,
            "begin",
            request.tenant,
            request.session_id,
            request.model,
            request.tokenizer,
            request.request_id,
            request.fingerprint,
            # Unique to this call: when its reply is lost, the repetition finds its own lease, not that of another call.
            secrets.token_hex(8),
            self._lease_us,
            ttl_ms,
            parameters_to_json(request.parameters),
            str(request.parameters.seed),
            request.rule.value,
            packed(request.prompt),
            "" if request.expected_len is None else request.expected_len,
            int(request.takes_over),
            int(request.must_exist),
            request.max_len,
        )
        if outcome.decode() not in _BEGUN:
            refuse(outcome.decode(), request)
        log, *fields = found
        with session_named(request.session_id):
            record = SessionRecord.from_hash(_pairs(fields), request.tenant, request.session_id)
        lease = Lease(request.tenant, request.session_id, record.fencing_token, ttl_ms)
        begun = BeginOutcome(outcome.decode())
        # The answer does not repeat a prompt that was just written.
        token_ids = list(request.prompt) if begun is BeginOutcome.NEW else unpacked(log)
        return Begun(begun, record, None if begun is BeginOutcome.FINISHED else lease, token_ids)

    async def append(
        self,
        lease: Lease,
        expected_len: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        target: str = "",
    ) -> Committed:
        """Commit tokens behind `expected_len`; with a reason, end the request and release the lease.

        Raises:
            Fenced: a newer lease exists, or the request has ended in another way.
            SessionNotFound: the session was deleted.
            SessionLost: there is no such session, and it was not deleted.
            DataLoss: the log differs from the commits of this lease.
            Overloaded: Redis is out of memory.
            Unavailable: Redis does not answer within the bound.
        """
        reason = "" if finish_reason is None else finish_reason.value
        outcome, length, cancelled = await self._run_on(
            lease.tenant,
            lease.session_id,
            "append",
            lease.fencing_token,
            expected_len,
            packed(token_ids),
            self._lease_us,
            lease.ttl_ms,
            reason,
            target,
        )
        check_lease(outcome, lease)
        return Committed(int(length), cancelled == b"1")

    async def restore(self, record: SessionRecord, lease: Lease, start: int, token_ids: Sequence[int]) -> None:
        """Write a session again that the server has lost, wholly or its last writes; see lua/restore.lua.

        Args:
            record: the session, as it was when the lease was granted.
            lease: the lease.
            start: position of the first of the tokens.
            token_ids: all committed tokens from there on.

        Raises:
            Fenced: a newer lease exists, or the request has ended.
            SessionNotFound: the session was deleted.
            DataLoss: earlier tokens are lost too, or the tokens that are left differ from the commits.
            Overloaded: Redis is out of memory.
            Unavailable: Redis does not answer within the bound.
        """
        outcome = await self._run_on(
            lease.tenant,
            lease.session_id,
            "restore",
            lease.fencing_token,
            start,
            packed(token_ids),
            self._lease_us,
            lease.ttl_ms,
            *(part for field in record.to_hash().items() for part in field),
        )
        check_lease(outcome, lease)

    async def renew(self, lease: Lease) -> bool:
        """Renew the lease; return whether the request was cancelled. Errors as for `append`."""
        outcome, cancelled = await self._run_on(
            lease.tenant, lease.session_id, "renew", lease.fencing_token, self._lease_us, lease.ttl_ms
        )
        check_lease(outcome, lease)
        return bool(cancelled == b"1")

    async def release(self, lease: Lease) -> None:
        """Release the lease; the request stays resumable. A lease that has ended already is no error."""
        await self._run_on(lease.tenant, lease.session_id, "renew", lease.fencing_token, 0, lease.ttl_ms)

    async def cancel(self, tenant: str, session_id: str, request_id: str = "") -> bool:
        """Cancel a running request; return whether one was running.

        Raises:
            SessionNotFound: there is no such session.
            RequestNotFound: its latest request is another one.
            DataLoss: its record is damaged.
        """
        outcome = await self._run_on(tenant, session_id, "cancel", tenant, request_id)
        if outcome == b"not_found":
            raise SessionNotFound("there is no such session")
        if outcome == b"no_request":
            raise RequestNotFound(f"the session's latest request is not {request_id}")
        if outcome == b"data_loss":
            raise DataLoss(f"session {session_id}: its record is damaged")
        return bool(outcome == b"cancelled")

    async def delete(self, tenant: str, session_id: str) -> str:
        """Delete the session, even one with a damaged record; raise `SessionNotFound`.

        Returns:
            Its name at workers; for a damaged record it may be a name that no worker has.
        """
        created = await self._run_on(tenant, session_id, "delete", self._ttl_ms)
        if created is None:
            raise SessionNotFound("there is no such session")
        return worker_key(tenant, session_id, created.decode(errors="replace"))

    async def get(self, tenant: str, session_id: str) -> SessionRecord | None:
        """Return the session's record; None where there is none. Raise `DataLoss` for a damaged one."""
        key = redis_keys(tenant, session_id)[0]
        with session_named(session_id):
            fields: dict[bytes, bytes] = await self.connection.call(self._redis.hgetall, key)
            return SessionRecord.from_hash(fields, tenant, session_id) if fields else None

    async def read_end(self, tenant: str, session_id: str) -> SessionEnd:
        """Return the session's record and its last token, in one round trip.

        They may be of different moments: `begin` checks that the session still has the record's length.

        Raises:
            DataLoss: the record is damaged, or a key has another type.
            Unavailable: Redis does not answer within the bound.
        """
        with session_named(session_id):
            fields, last = await self.connection.call(self._pipelined_end, *redis_keys(tenant, session_id)[:2])
            record = SessionRecord.from_hash(fields, tenant, session_id) if fields else None
        return SessionEnd(record, unpacked(last)[0] if record is not None and len(last) == TOKEN_BYTES else None)

    async def _pipelined_end(self, session_key: str, log_key: str) -> tuple[dict[bytes, bytes], bytes]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.hgetall(session_key)
            pipeline.getrange(log_key, -TOKEN_BYTES, -1)
            fields, last = await pipeline.execute(raise_on_error=False)
        if isinstance(fields, Exception):
            raise fields
        # Without a record the log belongs to no session: `begin` overwrites it, whatever its type.
        if fields and isinstance(last, Exception):
            raise last
        return fields, last

    async def is_leased(self, record: SessionRecord) -> bool:
        """Return whether the session has a live lease, by Redis's clock."""
        now: tuple[int, int] = await self.connection.call(self._redis.time)
        return record.deadline > now[0] * 1_000_000 + now[1]

    async def expires_in_s(self, tenant: str, session_id: str) -> float:
        """Return the seconds until the session expires unless used."""
        key = redis_keys(tenant, session_id)[0]
        milliseconds: int = await self.connection.call(self._redis.pttl, key)
        return max(0, milliseconds) / 1e3

    async def read_tokens(self, tenant: str, session_id: str, start: int, end: int) -> list[int]:
        """Return the committed tokens from position `start` up to `end`, exclusive; none where there is no log.

        Raises:
            DataLoss: the log is shorter than `end`.
            Unavailable: Redis does not answer within the bound.
        """
        if end <= start:
            return []
        key = redis_keys(tenant, session_id)[1]
        with session_named(session_id):
            data: bytes = await self.connection.call(
                self._redis.getrange, key, TOKEN_BYTES * start, TOKEN_BYTES * end - 1
            )
        if not data and not await self.connection.call(self._redis.exists, key):
            return []
        if len(data) != TOKEN_BYTES * (end - start):
            raise DataLoss(f"session {session_id}: its token log differs from the commits")
        return unpacked(data)

    async def _run_on(self, tenant: str, session_id: str, name: str, *arguments: Any) -> Any:
        """Return the result of a script on a session; raise as `run` does, with the session's id in a `DataLoss`."""
        try:
            return await self.connection.run(name, redis_keys(tenant, session_id), *arguments)
        except DataLoss as error:
            raise of_session(session_id, error) from error


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
