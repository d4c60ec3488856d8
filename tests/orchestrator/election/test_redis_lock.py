"""Elections in a real Valkey."""

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest

from orchestrator.election.redis_lock import RedisElection
from orchestrator.store import SessionStore
from outrider.client.valkey import EmbeddedValkey
from tests.orchestrator.election.candidate import Candidate, until

LEASE_S = 2.0


@pytest.fixture
async def store(session_store_url: str) -> AsyncIterator[SessionStore]:
    opened = SessionStore(session_store_url)
    yield opened
    await opened.close()


@pytest.fixture
def name() -> str:
    return f"election-{uuid.uuid4().hex}"


async def test_one_leads_and_another_follows_when_it_gives_up(store: SessionStore, name: str) -> None:
    candidates = [Candidate(RedisElection(store.client, name, LEASE_S)) for _ in range(3)]
    for _ in range(len(candidates)):
        await until(lambda: any(candidate.is_leading for candidate in candidates))
        (leader,) = [candidate for candidate in candidates if candidate.is_leading]
        await leader.stop()
        assert not leader.is_leading
        candidates.remove(leader)
    assert not await store.client.exists(name), "it was given back"


async def test_a_leader_stays_in_office_beyond_its_lease(store: SessionStore, name: str) -> None:
    candidate = Candidate(RedisElection(store.client, name, LEASE_S))
    await until(lambda: candidate.is_leading)
    token = await store.client.get(name)
    # Without a renewal it would be gone long before the fourth one.
    for _ in range(4):
        before = await store.client.pttl(name)
        await until_renewed(store, name, before)
    assert (await store.client.get(name), candidate.num_times) == (token, 1)
    await candidate.stop()


async def until_renewed(store: SessionStore, name: str, left_ms: int) -> None:
    last = left_ms
    while True:
        left = await store.client.pttl(name)
        assert left > 0
        if left > last:
            return
        last = left


async def test_who_finds_another_one_elected_stops(store: SessionStore, name: str) -> None:
    candidate = Candidate(RedisElection(store.client, name, LEASE_S))
    await until(lambda: candidate.is_leading)
    await store.client.set(name, "another", px=60_000)
    await until(lambda: not candidate.is_leading)
    assert await store.client.get(name) == b"another", "which it leaves alone"
    await candidate.stop()


async def test_who_cannot_renew_stops_when_its_lease_may_be_over(name: str) -> None:
    with EmbeddedValkey(durable=False) as valkey:
        store = SessionStore(valkey.url, timeout_s=0.2)
        candidate = Candidate(RedisElection(store.client, name, LEASE_S))
        await until(lambda: candidate.is_leading)
        valkey.kill()
        await until(lambda: not candidate.is_leading)
        await candidate.stop()
        await store.close()


async def test_who_gives_up_while_it_is_elected_leaves_nothing(store: SessionStore, name: str) -> None:
    await store.ping()
    for num_steps in range(1, 12):
        candidate = Candidate(RedisElection(store.client, name, LEASE_S))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        await candidate.stop()
        assert not await store.client.exists(name), f"after {num_steps} steps"
