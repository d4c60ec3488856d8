"""What a tenant uses of what it may: counted in Redis, so that all orchestrators count together."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from orchestrator.store import SessionStore
from orchestrator.tenants import Tenant
from outrider.errors import OutriderError, Overloaded

_LOG: Final = logging.getLogger(__name__)
_LEASE_S: Final = 60.0
"""An orchestrator that ends without a word keeps its streams counted for so long."""
_WHAT: Final = {
    "streams": ("max_streams", "requests generate at once"),
    "sessions": ("max_sessions", "sessions live"),
    "tokens": ("tokens_per_minute", "tokens were generated this minute"),
}


class Usage:
    """What one request uses.

    Attributes:
        num_tokens: output tokens that are not counted in Redis yet.
    """

    def __init__(self) -> None:
        self.num_tokens = 0

    def add(self, num_tokens: int) -> None:
        """Takes note of output."""
        self.num_tokens += num_tokens


class Quotas:
    """The limits of all tenants of one Redis.

    Args:
        store: runs the scripts.
        session_ttl_s: seconds until a session that is not used is gone.
        lease_s: seconds for which a stream is counted without a sign of life.
    """

    def __init__(self, store: SessionStore, session_ttl_s: float, lease_s: float = _LEASE_S) -> None:
        self._store = store
        self._ttl_ms = int(1e3 * session_ttl_s)
        self._lease_s = lease_s

    @asynccontextmanager
    async def stream(self, tenant: Tenant, session_id: str) -> AsyncIterator[Usage]:
        """Counts a request for as long as the context is open; nothing is done for a tenant without limits.

        Raises:
            Overloaded: the tenant is at one of its limits.
            Unavailable: Redis does not answer within the bound.
        """
        usage = Usage()
        if tenant.is_unlimited:
            yield usage
            return
        stream_id = secrets.token_hex(8)
        await self._enter(tenant, stream_id, session_id)
        renewal = asyncio.create_task(self._renew(tenant, stream_id, session_id, usage))
        try:
            yield usage
        finally:
            renewal.cancel()
            await asyncio.shield(self._leave(tenant, stream_id, usage))

    async def forget(self, tenant: Tenant, session_id: str) -> None:
        """Counts a session that was deleted no more."""
        if not tenant.is_unlimited:
            await self._store.run("spend", _keys(tenant), 0, "", session_id)

    async def _enter(self, tenant: Tenant, stream_id: str, session_id: str, *, again: bool = False) -> None:
        outcome, wait_s = await self._store.run(
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
            name, what = _WHAT[outcome.decode()]
            limit = getattr(tenant, name)
            raise Overloaded(f"{limit} {what}, the tenant's limit", retry_after_s=float(wait_s))

    async def _renew(self, tenant: Tenant, stream_id: str, session_id: str, usage: Usage) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self._enter(tenant, stream_id, session_id, again=True)
                await self._spend(tenant, usage)
            except OutriderError as error:
                # It is counted with the next one; the stream itself hears of Redis by its commits.
                _LOG.warning("usage not counted", extra={"reason": error.reason})

    async def _leave(self, tenant: Tenant, stream_id: str, usage: Usage) -> None:
        try:
            await self._spend(tenant, usage, stream_id)
        except OutriderError as error:
            _LOG.warning("usage not counted", extra={"reason": error.reason})

    async def _spend(self, tenant: Tenant, usage: Usage, ended: str = "") -> None:
        num, usage.num_tokens = usage.num_tokens, 0
        try:
            await self._store.run("spend", _keys(tenant), num, ended, "")
        except OutriderError:
            usage.num_tokens += num
            raise


def _keys(tenant: Tenant) -> tuple[str, str, str]:
    tag = hashlib.sha256(tenant.name.encode()).hexdigest()
    return f"outrider:{{{tag}}}:streams", f"outrider:{{{tag}}}:sessions", f"outrider:{{{tag}}}:tokens"
