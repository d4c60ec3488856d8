"""A wait that lasts too long is reported once; many short ones are not, however long they last together."""

import asyncio
import time

from orchestrator.generation.silence import SilenceWatch


async def test_a_long_wait_is_reported_once() -> None:
    silent = asyncio.Queue[float]()
    watch = SilenceWatch(0.05, lambda: silent.put_nowait(time.monotonic()))
    for _ in range(2):
        started = time.monotonic()
        watch.begin()
        assert await asyncio.wait_for(silent.get(), 5) - started >= 0.05
        assert silent.empty()


async def test_short_waits_are_not_reported_and_a_long_one_after_them_is() -> None:
    silent = asyncio.Queue[float]()
    watch = SilenceWatch(0.5, lambda: silent.put_nowait(time.monotonic()))
    until = time.monotonic() + 0.7
    while time.monotonic() < until:
        watch.begin()
        await asyncio.sleep(0.01)
        watch.end()
    assert silent.empty()
    started = time.monotonic()
    watch.begin()
    assert await asyncio.wait_for(silent.get(), 5) - started >= 0.5


async def test_what_has_ended_is_not_reported() -> None:
    silent = asyncio.Queue[float]()
    ended, closed = (SilenceWatch(0.02, lambda: silent.put_nowait(time.monotonic())) for _ in range(2))
    ended.begin()
    ended.end()
    closed.begin()
    closed.close()
    other = SilenceWatch(0.05, lambda: silent.put_nowait(0.0))
    other.begin()
    assert await asyncio.wait_for(silent.get(), 5) == 0.0
    assert silent.empty()
