"""Threads that encode prompts beside the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from outrider.errors import Overloaded

_MAX_SHORT_CHARS: Final = 1 << 15
"""Characters of a prompt that takes some 30 ms at most, and need not wait for long ones."""
_NUM_SHORT: Final = 2
_MAX_SHORT_QUEUED: Final = 256
# A prompt of 4 MB takes 4 s and 0.6 GB while it is encoded: one at a time, and few that wait with their text.
_NUM_LONG: Final = 1
_MAX_LONG_QUEUED: Final = 8
_MAX_WAIT_S: Final = 10.0

T = TypeVar("T")


class EncodingThreads:
    """Threads that encode prompts beside the event loop: few, and one of its own for long prompts."""

    def __init__(self) -> None:
        self._short = _Lane("encode-short", _NUM_SHORT, _MAX_SHORT_QUEUED)
        self._long = _Lane("encode-long", _NUM_LONG, _MAX_LONG_QUEUED)

    async def run(self, num_chars: int, encode: Callable[[], T]) -> T:
        """Return the result of `encode` for a prompt of so many characters.

        Raises:
            Overloaded: too many prompts wait already, or no thread became free within 10 s.
        """
        lane = self._short if num_chars <= _MAX_SHORT_CHARS else self._long
        return await lane.run(encode)

    def close(self) -> None:
        """End the threads: running calls finish, waiting ones do not begin."""
        self._short.close()
        self._long.close()


class _Lane:
    def __init__(self, name: str, num_threads: int, max_queued: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._free = asyncio.Semaphore(num_threads)
        self._num_queued = 0
        self._max_queued = max_queued

    async def run(self, work: Callable[[], T]) -> T:
        await self._enter()
        loop = asyncio.get_running_loop()
        running = self._threads.submit(work)
        # By the thread, not by the caller: the thread of a cancelled caller is still busy.
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._free.release))
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _enter(self) -> None:
        if self._free.locked() and self._num_queued >= self._max_queued:
            raise Overloaded(f"{self._num_queued} prompts wait to be encoded, the limit")
        self._num_queued += 1
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise Overloaded(f"no thread to encode the prompt became free within {_MAX_WAIT_S:g} s") from None
        finally:
            self._num_queued -= 1
