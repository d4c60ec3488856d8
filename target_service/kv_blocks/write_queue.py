"""A bounded queue of KV blocks from the engine's thread to the thread that writes them."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

_WRITE_BYTES: Final = 16 << 20
"""Of one batch, at most, unless it is a single block."""


@dataclass(frozen=True, slots=True)
class WaitingBlock:
    """A block that waits to be written.

    Attributes:
        digest: of the block.
        layout: digest of the layout that it was computed in.
        content: its bytes.
    """

    digest: bytes
    layout: bytes
    content: Tensor


class WriteQueue:
    """Blocks that wait to be written. Any thread may use it; one thread takes batches.

    Args:
        max_bytes: bytes of the blocks that wait, at most.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blocks: deque[WaitingBlock] = deque()
        self._num_bytes = 0
        self._num_busy = 0
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def put(self, blocks: Sequence[WaitingBlock]) -> int:
        """Add the blocks for which there is room; return how many there was none for."""
        num_dropped = 0
        with self._changed:
            for block in blocks:
                if self._num_bytes + block.content.numel() > self._max_bytes:
                    num_dropped += 1
                else:
                    self._num_bytes += block.content.numel()
                    self._blocks.append(block)
            self._changed.notify_all()
        return num_dropped

    def take(self, timeout_s: float) -> list[WaitingBlock]:
        """Wait for blocks until the queue is closed or so many seconds have passed; return a batch of them.

        They count as waiting until `written` is called.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._blocks or self._is_closed, timeout_s)
            batch = self._batch()
            self._num_busy = len(batch)
        return batch

    def written(self) -> None:
        """Record that the last batch is written, or lost."""
        with self._changed:
            self._num_busy = 0
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all blocks are written, or so many seconds have passed; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._blocks and not self._num_busy, timeout_s)

    def close(self) -> None:
        """End every wait for blocks, now and later."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _batch(self) -> list[WaitingBlock]:
        batch: list[WaitingBlock] = []
        num_bytes = 0
        while self._blocks and (not batch or num_bytes + self._blocks[0].content.numel() <= _WRITE_BYTES):
            batch.append(self._blocks.popleft())
            num_bytes += batch[-1].content.numel()
        self._num_bytes -= num_bytes
        return batch
