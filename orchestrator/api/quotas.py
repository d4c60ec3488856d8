"""Quotas of tenants: counted in Redis, so that all orchestrators count together."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from orchestrator.api.tenants import Tenant
from orchestrator.store.connection import RedisConnection
from outrider.errors import OutriderError, Overloaded

_LOG: Final = logging.getLogger(__name__)
_LEASE_S: Final = 60.0
"""How long the streams of an orchestrator that was killed stay counted."""
_LIMITS: Final = {
    "streams": ("max_streams", "requests generate at once"),
    "sessions": ("max_sessions", "sessions live"),
    "tokens": ("tokens_per_minute", "tokens were generated this minute"),
}


class Usage:
    """The usage of one request.

    Attributes:
        num_tokens: output tokens that are not counted in Redis yet.
    """

    def __init__(self) -> None:
        self.num_tokens = 0

    def add(self, num_tokens: int) -> None:
        """Count output tokens."""
        self.num_tokens += num_tokens


class Quotas:
    """The limits of all tenants of one Redis.

    Args:
        connection: to that Redis.
        session_ttl_s: seconds until a session that is not used expires.
        lease_s: seconds for which a stream is counted without a renewal.
    """

    def __init__(self, connection: RedisConnection, session_ttl_s: float, lease_s: float = _LEASE_S) -> None:
        self._connection = connection
        self._ttl_ms = int(1e3 * session_ttl_s)
        self._lease_s = lease_s
        self._leaving: set[asyncio.Task[None]] = set()

    async def settle(self) -> None:
        """Return when streams that have ended are no longer counted."""
        while self._leaving:
            await asyncio.gather(*self._leaving, return_exceptions=True)

    @asynccontextmanager
    async def stream(self, tenant: Tenant, session_id: str) -> AsyncIterator[Usage]:
        """Count a request for as long as the context is open; do nothing for a tenant without limits.

        Args:
            tenant: whose limits.
            session_id: the session, to be counted until it expires; empty for one that does not count.

        Raises:
            Overloaded: the tenant is at one of its limits.
            Unavailable: Redis does not answer within the bound.
        """
        usage = Usage()
        if tenant.is_unlimited:
            yield usage
            return
        stream_id = secrets.token_hex(8)
        # A task of its own: where the caller is cancelled, Redis may have counted the stream, which must be undone.
        entering = asyncio.create_task(self._enter(tenant, stream_id, session_id))
        ended = asyncio.Event()
        renewal: asyncio.Task[None] | None = None
        try:
            await asyncio.shield(entering)
            renewal = asyncio.create_task(self._renew(tenant, stream_id, session_id, usage, ended))
            yield usage
        finally:
            ended.set()
            leaving = asyncio.create_task(self._leave(tenant, stream_id, usage, entering, renewal))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            await asyncio.shield(leaving)

    async def forget(self, tenant: Tenant, session_id: str) -> None:
        """Stop counting a session that was deleted."""
        if not tenant.is_unlimited:
            await self._connection.run("spend", _keys(tenant), 0, "", session_id)

    async def _enter(self, tenant: Tenant, stream_id: str, session_id: str, *, again: bool = False) -> None:
        outcome, wait_s = await self._connection.run(
            "enter",
            _keys(tenant),
            stream_id,
            session_id,
            int(1e6 * self._lease_s),
            self._ttl_ms,
            tenant.max_streams,
            tenant.max_sessions,
            tenant.tokens_per_minute,
            int(again),
        )
        if outcome != b"ok":
            name, limited = _LIMITS[outcome.decode()]
            limit = getattr(tenant, name)
            raise Overloaded(f"{limit} {limited}, the tenant's limit", retry_after_s=float(wait_s))

    async def _renew(self, tenant: Tenant, stream_id: str, session_id: str, usage: Usage, ended: asyncio.Event) -> None:
        while not await _is_set_within(ended, self._lease_s / 3):
            try:
                await self._enter(tenant, stream_id, session_id, again=True)
                await self._spend(tenant, usage)
            except OutriderError as error:
                # The next renewal counts it; the stream itself learns of the failure by its commits.
                _LOG.warning("usage not counted", extra={"reason": error.reason})

    async def _leave(
        self,
        tenant: Tenant,
        stream_id: str,
        usage: Usage,
        entering: "asyncio.Task[None]",
        renewal: "asyncio.Task[None] | None",
    ) -> None:
        # After the scripts that count the stream, which may run on another connection. Scripts are bounded in time.
        await asyncio.wait((entering,) if renewal is None else (entering, renewal))
        if isinstance(entering.exception(), Overloaded):
            return
        try:
            await self._spend(tenant, usage, stream_id)
        except OutriderError as error:
            _LOG.warning("usage not counted", extra={"reason": error.reason})

    async def _spend(self, tenant: Tenant, usage: Usage, ended: str = "") -> None:
        num, usage.num_tokens = usage.num_tokens, 0
        try:
            await self._connection.run("spend", _keys(tenant), num, ended, "")
        except OutriderError:
            usage.num_tokens += num
            raise


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _keys(tenant: Tenant) -> tuple[str, str, str]:
    tag = hashlib.sha256(tenant.name.encode()).hexdigest()
    return f"outrider:{{{tag}}}:streams", f"outrider:{{{tag}}}:sessions", f"outrider:{{{tag}}}:tokens"
