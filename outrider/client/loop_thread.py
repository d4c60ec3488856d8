"""An event loop in a thread of its own, by which blocking methods run asynchronous ones."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar, cast

from outrider.client.retry import ClientClosed

T = TypeVar("T")

_LAST_S: Final = 5.0
"""Seconds that running calls have to end after their connections were closed; they need none but for a fault."""
_NOTICE_S: Final = 0.5
"""Seconds after which a waiting thread looks for a signal: one that comes just before a thread begins to wait does not
wake it."""


class _Call(Generic[T]):
    """A coroutine that runs on the loop, and its outcome, which another thread waits for.

    That thread may be interrupted at any of its own lines, so it takes no lock that the loop needs too, as the
    condition of a `concurrent.futures.Future` is one; the outcome comes through a queue written in C.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._outcomes: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()

    def begin(self) -> None:
        """Begin the work; called on the loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        # A task that is cancelled before its first step runs nothing.
        self._task.add_done_callback(lambda _: self.drop())

    def cancel(self) -> None:
        """End the work, begun or not; called on the loop."""
        if self._task is None:
            self.drop()
        else:
            self._task.cancel()

    def drop(self) -> None:
        """End the work, which nothing will begin or go on with."""
        self._work.close()

    def result(self) -> T:
        """Wait for the end of the work; return its result or raise its error."""
        outcome = None
        while outcome is None:
            with suppress(Empty):
                outcome = self._outcomes.get(timeout=_NOTICE_S)
        value, error = outcome
        if error is None:
            return cast(T, value)
        try:
            raise error
        finally:
            # Its traceback holds this frame.
            del error, outcome

    async def _run(self) -> None:
        try:
            value = await self._work
        except asyncio.CancelledError:
            # By `close`; or by an interrupt, and then nobody waits any more.
            self._outcomes.put((None, ClientClosed()))
            raise
        except BaseException as error:
            self._outcomes.put((None, error))
        else:
            self._outcomes.put((value, None))


class LoopThread:
    """A thread that runs an event loop until `close`; its methods may be called from any other thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._is_closed = False
        # What was begun before `close` is ended by it; nothing can be begun after it, when none would run it.
        self._beginning = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which runs on the loop; raise `ClientClosed` after `close` or ended by it.

        An exception that is raised in the waiting thread, such as KeyboardInterrupt, cancels the work.
        """
        call = _Call(work)
        try:
            with self._beginning:
                if self._is_closed:
                    # The loop may not get to it any more.
                    call.drop()
                    raise ClientClosed
                self._loop.call_soon_threadsafe(call.begin)
            return call.result()
        except BaseException:
            # After its beginning, if that was scheduled.
            try:
                self._loop.call_soon_threadsafe(call.cancel)
            except RuntimeError:  # the loop is closed
                call.drop()
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items of an asynchronous iterator; leaving the loop early closes it."""
        stepping: asyncio.Task[Any] | None = None

        async def step() -> tuple[T] | None:
            nonlocal stepping
            stepping = asyncio.current_task()
            try:
                return (await anext(items),)
            except StopAsyncIteration:
                return None

        async def end() -> None:
            # An iterator does one thing at a time, and an interrupt may have come before the step's future was known
            # here. A second cancellation would cut off what the first one began.
            if stepping is not None and not stepping.done():
                if not stepping.cancelling():
                    stepping.cancel()
                await asyncio.wait((stepping,))
            await items.aclose()

        try:
            while (item := self.run(step())) is not None:
                yield item[0]
        finally:
            # `close` has ended it already.
            with suppress(ClientClosed):
                self.run(end())

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `last`, wait for what is running, and end the thread; closing twice does nothing more."""
        with self._beginning:
            if self._is_closed:
                return
            self._is_closed = True
            ending = _Call(_end(last))
            self._loop.call_soon_threadsafe(ending.begin)
        try:
            ending.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _end(last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await last()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, late = await asyncio.wait(others, timeout=_LAST_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
