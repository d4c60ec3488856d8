"""What the event loop of the drafts hands to vLLM's thread."""

import threading
from collections import deque
from typing import Final, Generic, TypeVar

ItemT = TypeVar("ItemT")

MAX_ITEMS: Final = 65536
"""Parts of proposals that wait; vLLM's thread takes all of them once a step. Older ones are dropped beyond it, which
costs their requests a proposal."""


class Mailbox(Generic[ItemT]):
    """A bounded queue from one thread to another, which takes all items at once or waits for one."""

    def __init__(self) -> None:
        self._items: deque[ItemT] = deque(maxlen=MAX_ITEMS)
        self._arrived = threading.Condition()

    def put(self, item: ItemT) -> None:
        """Add an item, from any thread."""
        with self._arrived:
            self._items.append(item)
            self._arrived.notify()

    def take(self) -> list[ItemT]:
        """Remove and return all items, in order."""
        if not self._items:
            return []
        with self._arrived:
            items = list(self._items)
            self._items.clear()
        return items

    def wait(self, timeout_s: float) -> bool:
        """Return once there is an item, or after so many seconds; return whether there is one."""
        with self._arrived:
            return self._arrived.wait_for(lambda: bool(self._items), timeout_s)
