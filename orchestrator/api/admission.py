"""Admission of requests: bounds on those that generate at once and on those that wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.errors import Draining, Overloaded


class Admission:
    """A bounded queue that admits requests in order of arrival.

    Args:
        max_active: requests that generate at once, at most.
        max_queued: requests that wait, at most.
        max_queue_s: longest wait, in seconds.

    Attributes:
        max_active: as above.
    """

    def __init__(self, max_active: int, max_queued: int, max_queue_s: float) -> None:
        self.max_active = max_active
        self._free = asyncio.Semaphore(max_active)
        self._num_active = 0
        self._max_queued = max_queued
        self._max_queue_s = max_queue_s
        self._num_queued = 0
        self._is_closed = False

    @property
    def num_active(self) -> int:
        """Requests that generate."""
        return self._num_active

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        return self._num_queued

    def close(self) -> None:
        """Refuse all further requests."""
        self._is_closed = True

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Admit a request for as long as the context is open.

        Raises:
            Draining: the process is shutting down.
            Overloaded: the queue is full, or no request ended in time.
        """
        if self._is_closed:
            raise Draining("this orchestrator is shutting down")
        await self._enter()
        self._num_active += 1
        try:
            yield
        finally:
            self._num_active -= 1
            self._free.release()

    async def _enter(self) -> None:
        if not self._free.locked():
            await self._free.acquire()
            return
        if self._num_queued >= self._max_queued:
            raise Overloaded(f"{self._num_queued} requests wait already, the limit", retry_after_s=1.0)
        self._num_queued += 1
        try:
            async with asyncio.timeout(self._max_queue_s):
                await self._free.acquire()
        except TimeoutError:
            raise Overloaded(f"not admitted within {self._max_queue_s:g} s", retry_after_s=self._max_queue_s) from None
        finally:
            self._num_queued -= 1
