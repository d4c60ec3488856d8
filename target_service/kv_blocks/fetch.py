"""One fetch of a chain of KV blocks, shared by several reading threads."""

import threading
import time
from collections import deque
from typing import Final

from target_service.kv_blocks.costs import RestoreCosts

NUM_READERS: Final = 2


class Fetch:
    """A chain of blocks that readers fetch side by side, part by part, until one is missing or the time is over.

    Args:
        parts: index and digest of the blocks of each part, in order.
        costs: learn from the fetch.
        bound_s: seconds after which no further part is requested.

    Attributes:
        num_readers: readers that work on it.
        costs: as given.
        began_s: monotonic time of its beginning.
    """

    def __init__(self, parts: list[list[tuple[int, bytes]]], costs: RestoreCosts, bound_s: float) -> None:
        self.num_readers = min(NUM_READERS, len(parts))
        self.costs = costs
        self.began_s = time.monotonic()
        self._parts = deque(parts)
        self._give_up_s = self.began_s + bound_s
        self._num_left = self.num_readers
        self._num_bytes = 0
        self._lock = threading.Lock()

    def next_part(self) -> list[tuple[int, bytes]] | None:
        """Return the next part to request; None where there is none, or no time."""
        with self._lock:
            return self._parts.popleft() if self._parts and time.monotonic() < self._give_up_s else None

    def end(self) -> None:
        """Request no further part."""
        with self._lock:
            self._parts.clear()

    def leave(self, num_bytes: int) -> int | None:
        """Record that a reader has read so many bytes and is done; return the bytes of all readers to the last one."""
        with self._lock:
            self._num_left -= 1
            self._num_bytes += num_bytes
            return None if self._num_left else self._num_bytes
