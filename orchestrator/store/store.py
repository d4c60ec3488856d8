"""Sessions in Redis: a hash and an append-only token log each, changed by Lua scripts only.

Every script is idempotent under its fencing token, so a call whose connection broke is simply made again, a bounded
number of times. Both keys of a session share a hash tag, so Redis Cluster works; ids are hashed, so they cannot inject
keys.
"""

import asyncio
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from orchestrator.store.calls import RedisCalls
from orchestrator.store.errors import named
from orchestrator.store.scripts import Durability, Scripts
from orchestrator.store.sessions import (
    BeginOutcome,
    Begun,
    Committed,
    Lease,
    NewRequest,
    SessionEnd,
    SessionRecord,
    parameters_to_json,
    session_tag,
    worker_key,
)
from outrider.errors import (
    DataLoss,
    DuplicateRequest,
    Fenced,
    InvalidArgument,
    ModelMismatch,
    OutriderError,
    RequestNotFound,
    SessionBusy,
    SessionNotFound,
)
from outrider.parameters import FinishReason

_SCRIPTS: Final = ("begin", "append", "renew", "restore", "cancel", "delete", "enter", "spend")
_DURABLE: Final = ("begin", "append", "restore", "cancel", "delete")
_BEGUN: Final = {outcome.value for outcome in BeginOutcome}
_RETRIES: Final = 2
_MAX_CONNECTIONS: Final = 64
_TOKEN_BYTES: Final = 4
_CHECK_KEY: Final = "outrider:check"
_CHECK_MS: Final = 60_000


class SessionLost(DataLoss):
    """The server has no record of a session that nobody deleted: it expired, or the server has lost it."""


class SessionStore:
    """All sessions of one Redis.

    Args:
        url: redis:// or rediss://.
        lease_s: seconds until a lease that is not renewed ends.
        ttl_s: seconds until a session that is not used is gone.
        timeout_s: bound on connecting and on each answer, in seconds; a call makes at most three attempts.
        durability: what must have happened to a write before it counts; what it waits for comes on top of the bound.
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
        durability = durability or Durability()
        wait_s = durability.timeout_s if durability.command else 0.0
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s + wait_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(
                ExponentialBackoff(cap=0.2, base=0.02),
                _RETRIES,
                supported_errors=(exceptions.ConnectionError, exceptions.TimeoutError),
            ),
        )
        self._redis = redis.asyncio.Redis.from_pool(pool)
        self._lease_us = int(lease_s * 1e6)
        self._ttl_ms = int(ttl_s * 1e3)
        # Connecting and answering, for each attempt.
        bound_s = (_RETRIES + 1) * (2 * timeout_s + wait_s) + timeout_s
        self._calls = RedisCalls()
        self._scripts = Scripts(self._redis, _SCRIPTS, durability, _DURABLE, bound_s, self._calls)

    async def close(self) -> None:
        """Closes all connections, once every call in flight has ended; later ones raise `Unavailable`."""
        await self._calls.close()
        await self._redis.aclose()

    async def check(self) -> None:
        """Returns when Redis has taken a write, which expires by itself; raises `Overloaded` or `Unavailable`."""
        await self._call(self._redis.set, _CHECK_KEY, "1", px=_CHECK_MS)

    async def begin(self, request: NewRequest) -> Begun:
        """Leases the session and begins the request, or goes on with the same request; see lua/begin.lua.

        Raises:
            SessionBusy: another request runs on the session, or this one elsewhere.
            DuplicateRequest: the request id was used with other content.
            SessionNotFound: nothing to resume.
            RequestNotFound: the session's latest request is another one.
            ModelMismatch: the session was made with another model or tokenizer.
            InvalidArgument: the prompt leaves no room.
            DataLoss: the log is not what was committed.
            Overloaded: Redis is out of memory.
            Unavailable: Redis does not answer within the bound.
        """
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
            # Unique to this call: when its reply is lost, the repetition finds its own lease, not somebody else's.
            secrets.token_hex(8),
            self._lease_us,
            self._ttl_ms,
            parameters_to_json(request.parameters),
            str(request.parameters.seed),
            request.rule.value,
            _packed(request.prompt),
            "" if request.expected_len is None else request.expected_len,
            int(request.takes_over),
            int(request.must_exist),
            request.max_len,
        )
        if outcome.decode() not in _BEGUN:
            _refuse(outcome.decode(), request)
        log, *fields = found
        with _damage_named(request.session_id):
            record = SessionRecord.from_hash(_pairs(fields), request.tenant, request.session_id)
        lease = Lease(request.tenant, request.session_id, record.fencing_token)
        known = BeginOutcome(outcome.decode())
        # A prompt that was just written does not come back with the answer.
        token_ids = list(request.prompt) if known is BeginOutcome.NEW else _unpacked(log)
        return Begun(known, record, None if known is BeginOutcome.FINISHED else lease, token_ids)

    async def append(
        self,
        lease: Lease,
        expected_len: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        target: str = "",
    ) -> Committed:
        """Commits tokens behind `expected_len`; with a reason, the request ends and the lease is given back.

        Raises:
            Fenced: a newer lease exists, or the request has ended in another way.
            SessionNotFound: the session was deleted.
            SessionLost: there is no such session, and nobody deleted it.
            DataLoss: the log is not what this lease committed.
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
            _packed(token_ids),
            self._lease_us,
            self._ttl_ms,
            reason,
            target,
        )
        _check_lease(outcome, lease)
        return Committed(int(length), cancelled == b"1")

    async def restore(self, record: SessionRecord, lease: Lease, start: int, token_ids: Sequence[int]) -> None:
        """Writes a session again that the server has lost, wholly or its last writes; see lua/restore.lua.

        Args:
            record: the session, as it was when the lease was granted.
            lease: the lease.
            start: position of the first of the tokens.
            token_ids: all that was committed from there on.

        Raises:
            Fenced: a newer lease exists, or the request has ended.
            SessionNotFound: the session was deleted.
            DataLoss: earlier tokens are lost too, or what is there is not what was committed.
            Overloaded: Redis is out of memory.
            Unavailable: Redis does not answer within the bound.
        """
        outcome = await self._run_on(
            lease.tenant,
            lease.session_id,
            "restore",
            lease.fencing_token,
            start,
            _packed(token_ids),
            self._lease_us,
            self._ttl_ms,
            *(part for field in record.to_hash().items() for part in field),
        )
        _check_lease(outcome, lease)

    async def renew(self, lease: Lease) -> bool:
        """Renews the lease; returns whether the request was told to end. Errors as for `append`."""
        outcome, cancelled = await self._run_on(
            lease.tenant, lease.session_id, "renew", lease.fencing_token, self._lease_us, self._ttl_ms
        )
        _check_lease(outcome, lease)
        return bool(cancelled == b"1")

    async def release(self, lease: Lease) -> None:
        """Gives the lease back; the request stays resumable. A lease that is gone already is no error."""
        await self._run_on(lease.tenant, lease.session_id, "renew", lease.fencing_token, 0, self._ttl_ms)

    async def cancel(self, tenant: str, session_id: str, request_id: str = "") -> bool:
        """Tells a running request to end; returns whether one was running.

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
        """Deletes the session, whatever its record has become; raises `SessionNotFound`.

        Returns:
            The name under which workers know it; of a damaged record it may be one that no worker knows.
        """
        created = await self._run_on(tenant, session_id, "delete", self._ttl_ms)
        if created is None:
            raise SessionNotFound("there is no such session")
        return worker_key(tenant, session_id, created.decode(errors="replace"))

    async def get(self, tenant: str, session_id: str) -> SessionRecord | None:
        """Returns the session's record; None where there is none. Raises `DataLoss` for one that is damaged."""
        key = _keys(tenant, session_id)[0]
        with _damage_named(session_id):
            fields: dict[bytes, bytes] = await self._call(self._redis.hgetall, key)
            return SessionRecord.from_hash(fields, tenant, session_id) if fields else None

    async def look(self, tenant: str, session_id: str) -> SessionEnd:
        """Returns the session's record and its last token, in one round trip.

        They may be of different moments: `begin` finds out whether the length is still that of the record.

        Raises:
            DataLoss: the record is damaged, or what is kept has another type.
            Unavailable: Redis does not answer within the bound.
        """
        with _damage_named(session_id):
            fields, last = await self._call(self._read_end, *_keys(tenant, session_id)[:2])
            record = SessionRecord.from_hash(fields, tenant, session_id) if fields else None
        return SessionEnd(record, _unpacked(last)[0] if record is not None and len(last) == _TOKEN_BYTES else None)

    async def _read_end(self, session_key: str, log_key: str) -> tuple[dict[bytes, bytes], bytes]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.hgetall(session_key)
            pipeline.getrange(log_key, -_TOKEN_BYTES, -1)
            fields, last = await pipeline.execute(raise_on_error=False)
        if isinstance(fields, Exception):
            raise fields
        # Without a record it is no session's log: `begin` writes over it, whatever it is.
        if fields and isinstance(last, Exception):
            raise last
        return fields, last

    async def is_leased(self, record: SessionRecord) -> bool:
        """Returns whether somebody holds a live lease, by Redis's clock."""
        now: tuple[int, int] = await self._call(self._redis.time)
        return record.deadline > now[0] * 1_000_000 + now[1]

    async def expires_in_s(self, tenant: str, session_id: str) -> float:
        """Returns the seconds until the session is gone unless used."""
        key = _keys(tenant, session_id)[0]
        milliseconds: int = await self._call(self._redis.pttl, key)
        return max(0, milliseconds) / 1e3

    async def read_tokens(self, tenant: str, session_id: str, start: int, end: int) -> list[int]:
        """Returns the committed tokens from position `start` up to `end`, exclusive; none where there is no log.

        Raises:
            DataLoss: the log is shorter than `end`.
            Unavailable: Redis does not answer within the bound.
        """
        if end <= start:
            return []
        key = _keys(tenant, session_id)[1]
        with _damage_named(session_id):
            data: bytes = await self._call(self._redis.getrange, key, 4 * start, 4 * end - 1)
        if not data and not await self._call(self._redis.exists, key):
            return []
        if len(data) != 4 * (end - start):
            raise DataLoss(f"session {session_id}: its token log is not what was committed")
        return _unpacked(data)

    async def _run_on(self, tenant: str, session_id: str, name: str, *arguments: Any) -> Any:
        """Returns what a script on a session returns; raises what `run` does, and names the session."""
        with _damage_named(session_id):
            return await self.run(name, _keys(tenant, session_id), *arguments)

    async def run(self, name: str, keys: Sequence[str], *arguments: Any) -> Any:
        """Returns what a script returns; see lua/.

        Raises:
            Overloaded: Redis is out of memory.
            Unavailable: Redis does not answer within the bound.
        """
        return await named(self._scripts.run(name, keys, *arguments))

    async def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Returns what a method of the client does, whose time and attempts the connection bounds; errors as `run`."""
        return await named(asyncio.shield(self._calls.start(method(*arguments, **options))))


@contextmanager
def _damage_named(session_id: str) -> Iterator[None]:
    """Adds the session to a `DataLoss` of what is found in its keys."""
    try:
        yield
    except DataLoss as error:
        raise DataLoss(f"session {session_id}: {error.message}") from error


def _keys(tenant: str, session_id: str) -> tuple[str, str, str]:
    tag = session_tag(tenant, session_id)
    return f"outrider:{{{tag}}}:session", f"outrider:{{{tag}}}:log", f"outrider:{{{tag}}}:deleted"


def _packed(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def _unpacked(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // _TOKEN_BYTES}I", data))


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _check_lease(outcome: bytes, lease: Lease) -> None:
    if outcome == b"fenced":
        raise Fenced(f"fencing token {lease.fencing_token} is no longer in force")
    if outcome == b"deleted":
        raise SessionNotFound("the session was deleted")
    if outcome == b"gone":
        raise SessionLost(f"session {lease.session_id} is not there any more")
    if outcome == b"data_loss":
        raise DataLoss(f"session {lease.session_id}: its record or its token log is not what was committed")


def _refuse(outcome: str, request: NewRequest) -> NoReturn:
    errors: dict[str, OutriderError] = {
        "not_found": SessionNotFound("there is no such session"),
        "no_request": RequestNotFound(f"the session's latest request is not {request.request_id}"),
        "other_model": ModelMismatch("the session was made with another model"),
        "duplicate": DuplicateRequest(f"request id {request.request_id} was used for another request"),
        "busy": SessionBusy("a request is running on the session"),
        "other_length": SessionBusy("another request changed the session meanwhile"),
        "too_long": InvalidArgument(f"the session would have no room left of {request.max_len} tokens", "prompt"),
        "data_loss": DataLoss(f"session {request.session_id}: its record or its token log is not what was committed"),
    }
    raise errors[outcome]
