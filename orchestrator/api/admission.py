"""How many requests generate at once, and how many may wait for their turn."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.errors import Draining, Overloaded


class Admission:
    """Admits requests in order of arrival, within bounds.

    Args:
        max_active: requests inside at once.
        max_queued: requests that wait.
        max_queue_s: longest wait, in seconds.

    Attributes:
        max_active: as above.
    """

    def __init__(self, max_active: int, max_queued: int, max_queue_s: float) -> None:
        self.max_active = max_active
        self._turns = asyncio.Semaphore(max_active)
        self._num_active = 0
        self._max_queued = max_queued
        self._max_queue_s = max_queue_s
        self._num_queued = 0
        self._draining = False

    @property
    def num_active(self) -> int:
        """Requests inside."""
        return self._num_active

    @property
    def num_queued(self) -> int:
        """Requests that wait for their turn."""
        return self._num_queued

    def close(self) -> None:
        """Admits nothing more."""
        self._draining = True

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Holds a place for as long as the context is open.

        Raises:
            Draining: the process is shutting down.
            Overloaded: the queue is full, or the turn did not come in time.
        """
        if self._draining:
            raise Draining("this orchestrator is shutting down")
        await self._enter()
        self._num_active += 1
        try:
            yield
        finally:
            self._num_active -= 1
            self._turns.release()

    async def _enter(self) -> None:
        if not self._turns.locked():
            await self._turns.acquire()
            return
        if self._num_queued >= self._max_queued:
            raise Overloaded(f"{self._num_queued} requests wait already, the limit", retry_after_s=1.0)
        self._num_queued += 1
        try:
            async with asyncio.timeout(self._max_queue_s):
                await self._turns.acquire()
        except TimeoutError:
            raise Overloaded(f"no turn within {self._max_queue_s:g} s", retry_after_s=self._max_queue_s) from None
        finally:
            self._num_queued -= 1
