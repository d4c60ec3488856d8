"""An event loop in a thread of its own, by which blocking methods run asynchronous ones."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, TypeVar

from outrider.client.retry import ClientClosed

T = TypeVar("T")

_LAST_S: Final = 5.0
"""Seconds that running calls have to end after their connections were closed; they need none but for a fault."""


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
        """Return the result of `work`, which runs on the loop; raise `ClientClosed` after `close`.

        An exception that is raised in the waiting thread, such as KeyboardInterrupt, cancels the work.
        """
        future: Future[T] | None = None
        try:
            with self._beginning:
                if self._is_closed:
                    # The loop may not get to it any more.
                    work.close()
                    raise ClientClosed
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
            return future.result()
        except BaseException:
            if future is not None:
                future.cancel()
            else:
                self._end(work)
            raise

    def _end(self, work: Coroutine[Any, Any, Any]) -> None:
        """Cancel `work` if the loop has it, else close it: the exception came around its scheduling."""

        def end() -> None:
            for task in asyncio.all_tasks(self._loop):
                if task.get_coro() is work:
                    task.cancel()
                    return
            work.close()

        try:
            # After what scheduled it, if anything did.
            self._loop.call_soon_threadsafe(end)
        except RuntimeError:  # the loop is closed
            work.close()

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
            ended = asyncio.run_coroutine_threadsafe(_end(last), self._loop)
        try:
            ended.result()
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
