"""Fixtures of the client's tests."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tests.client.scripted import ScriptedService, serving


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    """A scripted orchestrator in a thread of its own, since the command line runs its own loop."""
    scripted = ScriptedService()
    loop = asyncio.new_event_loop()
    ready, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with serving(scripted):
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait(10)
    yield scripted
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()
