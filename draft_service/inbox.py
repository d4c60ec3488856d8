"""A bounded queue from an event loop to one thread."""

import asyncio
import contextlib
import threading
from collections import deque
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Inbox(Generic[ItemT]):
    """Items from writers in one event loop to a reader in its own thread, which takes all there are at once.

    Args:
        limit: items that may wait; `put` waits for room beyond it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[ItemT] = deque()
        self._arrived = threading.Condition()
        self._room = asyncio.Event()
        self._waiting_loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def put(self, item: ItemT) -> None:
        """Adds an item, as soon as there is room."""
        while not self._offer(item):
            await self._room.wait()

    def put_now(self, item: ItemT) -> None:
        """Adds an item beyond the limit: for those that end something, and so are as bounded as what they end."""
        with self._arrived:
            self._items.append(item)
            self._arrived.notify()

    def take(self, *, wait: bool, timeout_s: float | None = None) -> list[ItemT]:
        """Removes and returns all items.

        Args:
            wait: whether to wait for an item, or the close, where there is none.
            timeout_s: longest wait, in seconds; None for any.
        """
        with self._arrived:
            if wait:
                self._arrived.wait_for(lambda: bool(self._items) or self._closed, timeout_s)
            items = list(self._items)
            self._items.clear()
            loop, self._waiting_loop = self._waiting_loop, None
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and whoever waited in it
                loop.call_soon_threadsafe(self._room.set)
        return items

    def close(self) -> None:
        """Ends every wait of the reader, now and later."""
        with self._arrived:
            self._closed = True
            self._arrived.notify()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _offer(self, item: ItemT) -> bool:
        with self._arrived:
            if len(self._items) >= self._limit:
                self._room.clear()
                self._waiting_loop = asyncio.get_running_loop()
                return False
            self._items.append(item)
            self._arrived.notify()
            return True
