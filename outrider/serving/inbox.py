"""Bounded queues from the streams of a worker to the one thread that runs its engine."""

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Final, Generic, TypeVar

MAX_WAITING_ITEMS: Final = 4096
"""Of one writer, as many as a `FrameOutbox` holds: an orchestrator must not overrun its own during a long pass."""
MAX_WAITING_BYTES: Final = 8 << 20
_CHUNK: Final = 4
"""Items that are taken under one lock, and between two looks at the clock."""
_BASE_RATE: Final = 6400.0
_SESSION_RATE: Final = 800.0
"""Items a second, and those for each session: a draft's step, and with it a part of a proposal, takes milliseconds."""
_LEAST_S: Final = 0.01

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class ReadBudget:
    """The most that is read before the reader goes on with its other work.

    Attributes:
        num_items: items.
        seconds: seconds; a few items are read, however little it is.
    """

    num_items: float
    seconds: float

    @classmethod
    def beside(cls, pass_s: float, num_sessions: int) -> "ReadBudget":
        """Return the budget of an engine between two passes: what its sessions need, and far less than a flood.

        Reading costs more than the time of the engine's thread: the event loop makes the items, and while it does, the
        engine waits for the interpreter.

        Args:
            pass_s: seconds of the last pass.
            num_sessions: that are open.
        """
        seconds = max(_LEAST_S, pass_s)
        return cls(seconds * (_BASE_RATE + _SESSION_RATE * num_sessions), seconds)


EVERYTHING: Final = ReadBudget(inf, inf)


@dataclass(slots=True, eq=False)
class _Queue(Generic[ItemT]):
    """Items of one writer, and the event that wakes it once there is room for more."""

    items: deque[tuple[ItemT, int]] = field(default_factory=deque)
    num_bytes: int = 0
    room: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None


class Inbox(Generic[ItemT]):
    """Items from writers in event loops to a reader in a thread of its own; each writer has a queue of its own.

    The reader takes an item of each queue in turn. So a writer that sends more than the reader can take waits for
    itself, and holds no other up. The items of one writer are read in the order in which they were put.

    Args:
        max_items: items of one writer that may wait; `put` waits for room beyond them.
        max_bytes: bytes of these, likewise; one item more may exceed them.
    """

    def __init__(self, max_items: int = MAX_WAITING_ITEMS, max_bytes: int = MAX_WAITING_BYTES) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._queues: OrderedDict[object, _Queue[ItemT]] = OrderedDict()  # not empty, the next to be read first
        self._arrived = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        """Items that wait."""
        with self._arrived:
            return sum(len(queue.items) for queue in self._queues.values())

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def put(self, writer: object, item: ItemT, num_bytes: int = 0) -> None:
        """Add an item as soon as its writer has room for it.

        Args:
            writer: whose item it is; hashable.
            item: the item.
            num_bytes: that it takes, about.
        """
        while (room := self._offer(writer, item, num_bytes)) is not None:
            await room.wait()

    def put_now(self, writer: object, item: ItemT) -> None:
        """Add an item beyond the limits, from any thread: for items that end something, or that callers bound."""
        with self._arrived:
            self._queue(writer).items.append((item, 0))
            self._arrived.notify()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once an item waits, the inbox is closed, or so many seconds have passed. For the reader."""
        with self._arrived:
            self._arrived.wait_for(lambda: bool(self._queues) or self._closed, timeout_s)

    def read(
        self,
        apply: Callable[[ItemT], object],
        budget: ReadBudget = EVERYTHING,
        is_wanted: Callable[[ItemT], bool] | None = None,
    ) -> None:
        """Apply the items that wait, one of each writer in turn, until none is left or the budget is spent.

        Args:
            apply: is called with each item, in the reader's thread.
            budget: most items and seconds.
            is_wanted: whether an item may be applied now; one that may not keeps those behind it in its queue.
        """
        until, num_left = time.monotonic() + budget.seconds, budget.num_items
        while items := self._take(is_wanted):
            for item in items:
                apply(item)
            num_left -= len(items)
            if num_left <= 0 or time.monotonic() >= until:
                return

    def close(self) -> None:
        """End every wait of the reader, now and later."""
        with self._arrived:
            self._closed = True
            self._arrived.notify()

    def _offer(self, writer: object, item: ItemT, num_bytes: int) -> asyncio.Event | None:
        """Add the item; where there is no room, return an event that is set once there may be."""
        with self._arrived:
            queue = self._queue(writer)
            if len(queue.items) >= self._max_items or queue.num_bytes >= self._max_bytes:
                queue.room = queue.room or (asyncio.get_running_loop(), asyncio.Event())
                return queue.room[1]
            queue.items.append((item, num_bytes))
            queue.num_bytes += num_bytes
            self._arrived.notify()
            return None

    def _queue(self, writer: object) -> _Queue[ItemT]:
        queue = self._queues.get(writer)
        if queue is None:
            queue = self._queues[writer] = _Queue()
        return queue

    def _take(self, is_wanted: Callable[[ItemT], bool] | None) -> list[ItemT]:
        """Remove and return the next few items."""
        items: list[ItemT] = []
        with self._arrived:
            turn = deque(self._queues.items())
            while turn and len(items) < _CHUNK:
                writer, queue = turn.popleft()
                if is_wanted is not None and not is_wanted(queue.items[0][0]):
                    continue
                item, num_bytes = queue.items.popleft()
                items.append(item)
                queue.num_bytes -= num_bytes
                # Not for each item: the writer is woken to put many.
                if len(queue.items) <= self._max_items // 2 and queue.num_bytes <= self._max_bytes // 2:
                    _wake_writer(queue)
                if queue.items:
                    self._queues.move_to_end(writer)
                    turn.append((writer, queue))
                else:
                    del self._queues[writer]
        return items


def _wake_writer(queue: _Queue[ItemT]) -> None:
    """Wake the writer that waits for room in a queue."""
    if queue.room is not None:
        (loop, room), queue.room = queue.room, None
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the waiting task
            loop.call_soon_threadsafe(room.set)
