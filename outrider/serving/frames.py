"""Frames of many sessions on one stream: bounded queues, and all frames pending together leave as one message."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sized
from typing import Final, Generic, Protocol, TypeVar

from outrider.errors import InvalidArgument, OutriderError, Overloaded

MAX_PENDING_FRAMES: Final = 4096
MAX_FRAMES_PER_MESSAGE: Final = 256
MAX_FRAME_BYTES_PER_MESSAGE: Final = 1 << 20
"""A quarter of gRPC's default message limit: one frame more, and the message's own bytes, still fit."""
MAX_FRAMES_READ: Final = 4096
"""In one message of a caller; a `FrameOutbox` puts fewer into one."""
FRAMES_AT_ONCE: Final = 64
"""Frames of a message that are read before other streams have their turn in the event loop."""
MAX_FRAME_BYTES_READ: Final = 2 << 20
"""Of one frame of a caller. Orchestrators send none larger than `MAX_FRAME_BYTES_PER_MESSAGE`."""


class SizedFrame(Protocol):
    """A protobuf message."""

    def ByteSize(self) -> int:
        """Return the encoded size in bytes."""


def check_num_frames(frames: Sized) -> None:
    """Raise `InvalidArgument` where a message has too many frames: a million would hold up the event loop."""
    if len(frames) > MAX_FRAMES_READ:
        raise InvalidArgument(f"has {len(frames)}, may have at most {MAX_FRAMES_READ}", "frames")


def checked_size(frame: SizedFrame) -> int:
    """Return a frame's encoded size; raise `InvalidArgument` where it is too large to be read."""
    if (num_bytes := frame.ByteSize()) > MAX_FRAME_BYTES_READ:
        raise InvalidArgument(f"has {num_bytes} bytes, may have at most {MAX_FRAME_BYTES_READ}", "frame")
    return num_bytes


FrameT = TypeVar("FrameT", bound=SizedFrame)
MessageT = TypeVar("MessageT")


class FrameOutbox(Generic[FrameT, MessageT]):
    """A bounded queue of frames with one reader, `messages`, and writers in any thread.

    Frames leave in the order they were put; those of one `put` that fit leave together. What is put after `close` is
    dropped. Make it inside the event loop that reads it.

    Args:
        build: makes a message of at least one frame.
        max_pending: frames that may wait; a `put` beyond it raises `Overloaded` and adds nothing.
        max_frames_per_message: frames in one message, at most.
        max_message_bytes: bytes of the frames in one message, at most; a larger frame goes alone.
    """

    def __init__(
        self,
        build: Callable[[list[FrameT]], MessageT],
        *,
        max_pending: int = MAX_PENDING_FRAMES,
        max_frames_per_message: int = MAX_FRAMES_PER_MESSAGE,
        max_message_bytes: int = MAX_FRAME_BYTES_PER_MESSAGE,
    ) -> None:
        self._build = build
        self._max_pending = max_pending
        self._max_frames = max_frames_per_message
        self._max_bytes = max_message_bytes
        self._pending: deque[FrameT] = deque()
        self._pending_bytes = 0
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._closed = False
        self._error: OutriderError | None = None

    def __len__(self) -> int:
        """Frames that wait."""
        return len(self._pending)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the frames that wait."""
        return self._pending_bytes

    def put(self, *frames: FrameT) -> None:
        """Add frames, all or none. Call it in the event loop; raise `Overloaded` when they do not fit."""
        if self._append(frames):
            self._wake.set()

    def put_threadsafe(self, *frames: FrameT) -> None:
        """Add frames, all or none, from any thread; raise `Overloaded`, in that thread, when they do not fit."""
        if self._append(frames):
            self._wake_threadsafe()

    def close(self, error: OutriderError | None = None) -> None:
        """End `messages`: after the pending frames, or at once with `error` where one is given. In the loop only."""
        with self._lock:
            if self._closed:
                return
            self._closed, self._error = True, error
            if error is not None:
                self._pending.clear()
                self._pending_bytes = 0
        self._wake.set()

    async def messages(self) -> AsyncIterator[MessageT]:
        """Yield messages until the outbox is closed; raise the error it was closed with."""
        while True:
            frames = self._take()
            if frames:
                yield self._build(frames)
            elif self._closed:
                break
            else:
                await self._wake.wait()
        if self._error is not None:
            raise self._error

    def _append(self, frames: tuple[FrameT, ...]) -> bool:
        """Add the frames; return whether the reader may be asleep."""
        with self._lock:
            if self._closed or not frames:
                return False
            if len(self._pending) + len(frames) > self._max_pending:
                raise Overloaded(f"{len(self._pending)} frames wait to be sent, the limit is {self._max_pending}")
            asleep = not self._pending
            self._pending.extend(frames)
            self._pending_bytes += sum(frame.ByteSize() for frame in frames)
            return asleep

    def _wake_threadsafe(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the loop has ended, and the reader with it
            self._closed = True

    def _take(self) -> list[FrameT]:
        """Remove and return what goes into the next message."""
        frames: list[FrameT] = []
        num_bytes = 0
        with self._lock:
            self._wake.clear()
            while self._pending and len(frames) < self._max_frames:
                frame_bytes = self._pending[0].ByteSize()
                if frames and num_bytes + frame_bytes > self._max_bytes:
                    break
                num_bytes += frame_bytes
                frames.append(self._pending.popleft())
            self._pending_bytes -= num_bytes
        return frames
