"""The event loop of blocking methods: an interrupt ends what it interrupts, whenever it comes."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

from outrider.client.loop_thread import LoopThread


async def nothing() -> None:
    """Nothing is left to be done at the end."""


@pytest.mark.timeout(20)
def test_an_interrupt_before_a_step_is_known_ends_the_iterator(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    async def items() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            # A second cancellation would cut this off.
            await asyncio.sleep(0.01)
            ended.append(True)

    begin, interrupts = asyncio.run_coroutine_threadsafe, []

    def interrupted(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Future[Any]:
        future = begin(work, loop)
        if interrupts:
            raise interrupts.pop()
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    thread = LoopThread("test")
    try:
        iterator = thread.iterate(items())
        assert next(iterator) == 1
        interrupts.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert ended == [True]
    finally:
        thread.close(nothing)
