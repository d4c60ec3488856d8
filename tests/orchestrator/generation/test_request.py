import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest

from orchestrator.generation.request import SessionTokens
from orchestrator.store.record import SessionRecord
from orchestrator.store.sessions import NewRequest
from orchestrator.store.store import SessionStore
from outrider.errors import Unavailable
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.tokens import TokenSpan

LOG = tuple(range(100, 120))


@pytest.fixture
async def store(session_store_url: str) -> AsyncIterator[SessionStore]:
    opened = SessionStore(session_store_url)
    yield opened
    await opened.close()


async def recorded(store: SessionStore) -> SessionRecord:
    request = NewRequest(
        tenant="default",
        session_id=uuid.uuid4().hex,
        request_id="r",
        fingerprint="f",
        model="m",
        tokenizer="t",
        parameters=SamplingParameters(seed=1),
        rule=AcceptanceRule.COUPLED,
        prompt=LOG,
        expected_len=0,
        takes_over=False,
        must_exist=False,
        max_len=100,
    )
    return (await store.begin(request)).record


async def test_what_is_at_hand_needs_no_reading(store: SessionStore) -> None:
    tokens = SessionTokens(store, await recorded(store), 15, list(LOG[15:]))
    tokens.append([7, 8])
    assert tokens.end == 22
    assert tokens.since(18) == TokenSpan(18, (*LOG[18:], 7, 8))
    assert tokens.since(3) == TokenSpan(15, (*LOG[15:], 7, 8))


async def test_readers_at_the_same_time_do_not_disturb_each_other(store: SessionStore) -> None:
    tokens = SessionTokens(store, await recorded(store), 15, list(LOG[15:]))
    starts = [9, 0, 4, 0, 12, 9, 15]
    readings = asyncio.gather(*(tokens.read_from(start) for start in starts))
    await asyncio.sleep(0)
    tokens.append([7])
    assert await readings == [(*LOG[start:], 7) for start in starts[:-1]] + [LOG[15:]]
    assert tokens.since(0) == TokenSpan(0, (*LOG, 7))


async def test_a_log_that_is_too_short_is_no_span(store: SessionStore) -> None:
    record = await recorded(store)
    await store.delete(record.tenant, record.session_id)
    with pytest.raises(Unavailable):
        await SessionTokens(store, record, 15, list(LOG[15:])).read_from(0)
