"""Fixtures of the orchestrator's tests."""

from collections.abc import AsyncIterator, Iterator

import pytest

from bench.api_server import ApiServer
from outrider.local.valkey import EmbeddedValkey
from tests.orchestrator.scripted import ScriptedDraft, ScriptedTarget


@pytest.fixture(scope="session")
def session_store_url() -> Iterator[str]:
    """One Valkey for all tests: they differ in their session ids."""
    with EmbeddedValkey(durable=False) as valkey:
        yield valkey.url


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    fake = ApiServer()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def target() -> AsyncIterator[ScriptedTarget]:
    async with ScriptedTarget() as running:
        yield running


@pytest.fixture
async def draft() -> AsyncIterator[ScriptedDraft]:
    async with ScriptedDraft() as running:
        yield running
