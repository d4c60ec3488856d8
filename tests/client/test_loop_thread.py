"""The event loop of blocking methods: an interrupt ends what it interrupts, whenever it comes."""

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

from outrider.client.loop_thread import LoopThread
from outrider.client.retry import ClientClosed


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


@pytest.mark.timeout(20)
@pytest.mark.parametrize("is_scheduled", [False, True])
def test_an_interrupt_around_the_scheduling_ends_the_work(is_scheduled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, began, ended = asyncio.run_coroutine_threadsafe, threading.Event(), []

    async def work() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    def interrupted(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Future[Any]:
        if is_scheduled:
            begin(work, loop)
            assert began.wait(10)
        raise KeyboardInterrupt

    thread = LoopThread("test")
    try:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
            thread.run(work())
        thread.run(asyncio.sleep(0))
    finally:
        thread.close(nothing)
    # What was begun was cancelled; of what was not, nobody complains that it was never awaited.
    gc.collect()
    assert ended == [True] * is_scheduled


def test_what_is_begun_while_the_loop_ends_is_closed() -> None:
    thread = LoopThread("test")
    # As between the end of a loop and its closing, when it runs nothing more.
    thread._is_closed = True
    thread._loop.call_soon_threadsafe(thread._loop.stop)
    thread._thread.join()
    with pytest.raises(ClientClosed):
        thread.run(nothing())
    thread._loop.close()
    gc.collect()
