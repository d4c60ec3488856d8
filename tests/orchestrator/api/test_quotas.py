"""Limits of tenants, counted in a real Redis by several orchestrators at once."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import redis

from orchestrator.api.quotas import Quotas
from orchestrator.api.tenants import Tenant
from orchestrator.store.connection import RedisConnection
from orchestrator.store.store import SessionStore
from outrider.errors import Overloaded
from tests.orchestrator.stage import early_in_a_minute


@pytest.fixture
async def store(session_store_url: str) -> AsyncIterator[SessionStore]:
    store = SessionStore(session_store_url)
    yield store
    await store.close()


def tenant(**limits: int) -> Tenant:
    return Tenant(name=uuid.uuid4().hex, **limits)


async def test_streams_are_counted_over_all_orchestrators(store: SessionStore) -> None:
    one, two, limited = Quotas(store.connection, 100), Quotas(store.connection, 100), tenant(max_streams=2)
    async with one.stream(limited, "a"), two.stream(limited, "b"):
        with pytest.raises(Overloaded, match="2 requests generate at once") as caught:
            async with one.stream(limited, "c"):
                pass
        assert caught.value.retry_after_s == 1
        async with one.stream(tenant(max_streams=1), "c"):
            pass
    async with one.stream(limited, "a"), two.stream(limited, "b"):
        pass


async def test_sessions_are_counted_until_they_are_gone(store: SessionStore) -> None:
    quotas, limited = Quotas(store.connection, 100), tenant(max_sessions=2)
    for session_id in ("a", "b", "a"):
        async with quotas.stream(limited, session_id):
            pass
    with pytest.raises(Overloaded, match="2 sessions live"):
        async with quotas.stream(limited, "c"):
            pass
    await quotas.forget(limited, "a")
    async with quotas.stream(limited, "c"):
        pass
    short = tenant(max_sessions=1)
    async with Quotas(store.connection, 0.001).stream(short, "a"):
        await asyncio.sleep(0.01)
    async with quotas.stream(short, "b"):
        pass


async def test_attack_14_counts_that_were_damaged_begin_anew(store: SessionStore, session_store_url: str) -> None:
    quotas, limited = Quotas(store.connection, 100), tenant(max_streams=1, max_sessions=1, tokens_per_minute=5)
    tag = hashlib.sha256(limited.name.encode()).hexdigest()
    with redis.Redis.from_url(session_store_url) as raw:
        for kind in ("streams", "sessions", "tokens"):
            raw.set(f"outrider:{{{tag}}}:{kind}", "text")
            async with quotas.stream(limited, "a") as usage:
                usage.add(1)
                raw.set(f"outrider:{{{tag}}}:{kind}", "text")
        raw.hset(f"outrider:{{{tag}}}:tokens", mapping={"minute": int(time.time() / 60), "tokens": "many"})
        async with quotas.stream(limited, "a"):
            pass
        await quotas.forget(limited, "a")
    assert raw.hget(f"outrider:{{{tag}}}:tokens", "tokens") == b"0"


async def test_tokens_of_a_minute(store: SessionStore) -> None:
    await early_in_a_minute()
    quotas, limited = Quotas(store.connection, 100), tenant(tokens_per_minute=50)
    async with quotas.stream(limited, "a") as usage:
        usage.add(30)
        # What runs is not stopped: the limit is looked at when a request begins.
        async with quotas.stream(limited, "b") as other:
            other.add(30)
    with pytest.raises(Overloaded, match="50 tokens were generated this minute") as caught:
        async with quotas.stream(limited, "c"):
            pass
    assert 0 < caught.value.retry_after_s <= 60


async def test_streams_of_an_orchestrator_that_ended_without_a_word_are_counted_for_a_while(
    store: SessionStore,
) -> None:
    quotas, limited = Quotas(store.connection, 100, lease_s=1.0), tenant(max_streams=1)
    async with AsyncExitStack() as exits:
        await exits.enter_async_context(quotas.stream(limited, "a"))
        # Renewed while it runs.
        await asyncio.sleep(1.2)
        with pytest.raises(Overloaded):
            await exits.enter_async_context(quotas.stream(limited, "b"))
    await quotas._enter(limited, "gone", "a")
    with pytest.raises(Overloaded):
        await quotas._enter(limited, "next", "a")
    async with asyncio.timeout(10):
        while True:
            try:
                await quotas._enter(limited, "next", "a")
                break
            except Overloaded:
                await asyncio.sleep(0.05)
    await quotas._enter(limited, "next", "a")  # a repetition counts once


async def test_a_tenant_without_limits_costs_nothing(store: SessionStore) -> None:
    await store.close()
    async with Quotas(RedisConnection("redis://127.0.0.1:1/0"), 100).stream(tenant(), "a") as usage:
        usage.add(1)
    await Quotas(RedisConnection("redis://127.0.0.1:1/0"), 100).forget(tenant(), "a")
