"""The event loop of blocking methods: an interrupt ends what it interrupts, whenever it comes."""

import asyncio
import gc
import signal
import threading
from collections.abc import AsyncGenerator, Callable

import pytest

from outrider.client.loop_thread import LoopThread, _Call
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

    thread, interrupts = LoopThread("test"), []
    schedule = thread._loop.call_soon_threadsafe

    def interrupted(callback: Callable[[], None]) -> None:
        schedule(callback)
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", interrupted)
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
    began, ended = threading.Event(), []

    async def work() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    thread, interrupts = LoopThread("test"), [KeyboardInterrupt()]
    schedule = thread._loop.call_soon_threadsafe

    def interrupted(callback: Callable[[], None]) -> None:
        if is_scheduled or not interrupts:
            schedule(callback)
        if interrupts:
            assert not is_scheduled or began.wait(10)
            raise interrupts.pop()

    try:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(thread._loop, "call_soon_threadsafe", interrupted)
            thread.run(work())
        thread.run(asyncio.sleep(0))
    finally:
        thread.close(nothing)
    # What was begun was cancelled; of what was not, nobody complains that it was never awaited.
    gc.collect()
    assert ended == [True] * is_scheduled


@pytest.mark.timeout(20)
def test_a_signal_that_does_not_wake_the_waiting_thread_is_noticed() -> None:
    thread, waits = LoopThread("test"), threading.Event()

    async def work() -> None:
        waits.set()
        await asyncio.Event().wait()

    def signal_elsewhere() -> None:
        assert waits.wait(10)
        # As one that comes between a thread's last look for signals and its wait.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    other = threading.Thread(target=signal_elsewhere)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.run(work())
    finally:
        thread.close(nothing)
        other.join()


def test_work_that_an_interrupt_ends_before_its_first_step_is_closed() -> None:
    async def cancelled() -> None:
        call = _Call(nothing())
        call.begin()
        call.cancel()
        await asyncio.sleep(0)

    asyncio.run(cancelled())
    # Nobody complains that it was never awaited.
    gc.collect()


def test_errors_pass_to_the_waiting_thread_and_leave_no_cycles() -> None:
    thread = LoopThread("test")

    async def fails() -> None:
        raise ValueError("no")

    def fail() -> None:
        with pytest.raises(ValueError, match="no"):
            thread.run(fails())

    try:
        fail()
        gc.collect()
        gc.disable()
        thread.run(nothing())
        assert gc.collect() == 0
    finally:
        gc.enable()
        thread.close(nothing)


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
