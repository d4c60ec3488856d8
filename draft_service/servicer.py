"""DraftService: streams of frames to the engine, and its replies back."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc

from draft_service.engine.commands import CloseSession, Refused, Reply, Seat
from draft_service.engine.engine import Engine
from draft_service.engine.frames import command_from_frame, frame_from_reply
from outrider.drafters.drafter import DrafterInfo
from outrider.errors import Draining, InvalidArgument, OutriderError, Overloaded, RequestFailed
from outrider.serving.frames import FRAMES_AT_ONCE, FrameOutbox, check_num_frames, checked_size
from outrider.serving.unexpected import UnexpectedErrors
from outrider.v1 import draft_pb2, draft_pb2_grpc

_LOG: Final = logging.getLogger(__name__)

_Outbox = FrameOutbox[draft_pb2.DraftResponseFrame, draft_pb2.DraftResponse]


class DraftStream:
    """A `ReplyStream` into a call's outbox. A reader too slow for it loses the stream, with OVERLOADED."""

    def __init__(self, outbox: _Outbox) -> None:
        self._outbox = outbox
        self._loop = asyncio.get_running_loop()

    def post(self, replies: Sequence[Reply]) -> None:
        """Sends replies, in order; drops them where nobody reads any more."""
        try:
            self._outbox.put_threadsafe(*map(frame_from_reply, replies))
        except Overloaded as error:
            self.end(error)

    def end(self, error: OutriderError | None = None) -> None:
        """Ends the stream: after what was posted, or at once with `error`."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the call with it
            self._loop.call_soon_threadsafe(self._outbox.close, error)


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Drafts for many sessions over one stream. What is wrong with one session is refused and ends nothing else."""

    def __init__(self, engine: Engine, info: DrafterInfo) -> None:
        self._engine = engine
        self._info = info
        self._streams: set[DraftStream] = set()
        self._unexpected = UnexpectedErrors()

    async def Draft(
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        """Serves one stream until the orchestrator ends it; its sessions end with it."""
        outbox: _Outbox = FrameOutbox(lambda frames: draft_pb2.DraftResponse(frames=frames))
        stream = DraftStream(outbox)
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            async for message in outbox.messages():
                yield message
        finally:
            self._streams.discard(stream)
            outbox.close()
            reader.cancel()
            # Without waiting for room: the sessions of a broken stream must not keep their places.
            self._engine.end_stream(stream)

    async def drain(self, patience_s: float) -> None:
        """Opens no more sessions; ends every stream once their sessions are closed, or after `patience_s` seconds."""
        await self._engine.drain(patience_s)
        for stream in tuple(self._streams):
            stream.end(Draining("the draft is shutting down"))

    async def _read(self, requests: AsyncIterator[draft_pb2.DraftRequest], stream: DraftStream) -> None:
        try:
            async for request in requests:
                check_num_frames(request.frames)
                for number, frame in enumerate(request.frames, start=1):
                    await self._take(frame, stream)
                    if not number % FRAMES_AT_ONCE:
                        await asyncio.sleep(0)
        except OutriderError as error:
            stream.end(error)
        except Exception as error:
            # Bytes that are no message, above all.
            _LOG.warning("the stream could not be read", extra={"problem": type(error).__name__})
            stream.end(InvalidArgument("the stream could not be read", "request"))
        else:
            self._engine.end_stream(stream)

    async def _take(self, frame: draft_pb2.DraftRequestFrame, stream: DraftStream) -> None:
        """Hands a frame to the engine; whatever is wrong with it ends one session at most."""
        seat = Seat(stream, frame.handle)
        try:
            num_bytes = checked_size(frame)
            command = command_from_frame(frame, seat, self._info)
        except Exception as error:
            named = self._unexpected.named("the frame could not be read", error)
            stream.post([Refused(frame.handle, named)])
            if isinstance(named, RequestFailed):
                await self._engine.submit(CloseSession(seat))
        else:
            await self._engine.submit(command, num_bytes)
