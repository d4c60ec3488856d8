"""Fixtures of the attacks on an orchestrator: a real Valkey, and scripted workers."""

from collections.abc import AsyncIterator, Iterator

import pytest

from outrider.local.valkey import EmbeddedValkey
from tests.orchestrator.scripted import ScriptedTarget


@pytest.fixture(scope="session")
def session_store_url() -> Iterator[str]:
    """One Valkey for all attacks: they differ in their tenants and session ids."""
    with EmbeddedValkey(durable=False) as valkey:
        yield valkey.url


@pytest.fixture
async def target() -> AsyncIterator[ScriptedTarget]:
    async with ScriptedTarget() as running:
        yield running
