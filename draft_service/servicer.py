"""DraftService: frames of streams become commands of the engine, and its replies frames."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc

from draft_service.engine.commands import CloseSession, Command, EndStream, Handle, Refused, Reply
from draft_service.frames import command_from_frame, frame_from_reply
from outrider.drafters.drafter import DrafterInfo
from outrider.errors import Draining, InvalidArgument, OutriderError, Overloaded, RequestFailed
from outrider.serving.engine_loop import EngineLoop
from outrider.serving.frames import FRAMES_AT_ONCE, FrameOutbox, check_num_frames, checked_size
from outrider.serving.stream_handle import StreamHandle
from outrider.serving.unexpected import UnexpectedErrors
from outrider.v1 import draft_pb2, draft_pb2_grpc

_LOG: Final = logging.getLogger(__name__)

_Outbox = FrameOutbox[draft_pb2.DraftResponseFrame, draft_pb2.DraftResponse]


class DraftStream:
    """A `ReplyStream` into a call's outbox. A reader that is too slow for it loses the stream, with OVERLOADED."""

    def __init__(self, outbox: _Outbox) -> None:
        self._outbox = outbox
        self._loop = asyncio.get_running_loop()

    def post(self, replies: Sequence[Reply]) -> None:
        """Send replies, in order; drop them once the stream has ended."""
        try:
            self._outbox.put_threadsafe(*map(frame_from_reply, replies))
        except Overloaded as error:
            self.end(error)

    def end(self, error: OutriderError | None = None) -> None:
        """End the stream: after the replies that were posted, or at once with `error`."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the call with it
            self._loop.call_soon_threadsafe(self._outbox.close, error)


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Drafts for many sessions over one stream. An error of one session is refused and ends nothing else."""

    def __init__(self, loop: EngineLoop[Command], info: DrafterInfo) -> None:
        self._loop = loop
        self._info = info
        self._streams: set[DraftStream] = set()
        self._unexpected = UnexpectedErrors()

    async def Draft(
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        """Serve one stream until the orchestrator ends it; its sessions end with it."""
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
            self._loop.submit_now(stream, EndStream(stream))

    async def drain(self, patience_s: float) -> None:
        """Open no more sessions; end every stream once all sessions are closed, or after `patience_s` seconds."""
        await asyncio.wait((asyncio.wrap_future(self._loop.drain()),), timeout=patience_s)
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
            # Most often bytes that are no message.
            _LOG.warning("the stream could not be read", extra={"problem": type(error).__name__})
            stream.end(InvalidArgument("the stream could not be read", "request"))
        else:
            self._loop.submit_now(stream, EndStream(stream))

    async def _take(self, frame: draft_pb2.DraftRequestFrame, stream: DraftStream) -> None:
        """Submit a frame to the engine; an error in it ends one session at most."""
        handle: Handle = StreamHandle(stream, frame.handle)
        try:
            num_bytes = checked_size(frame)
            command = command_from_frame(frame, handle, self._info)
        except Exception as error:
            named = self._unexpected.named("the frame could not be read", error)
            stream.post([Refused(frame.handle, named)])
            if isinstance(named, RequestFailed):
                await self._loop.submit(stream, CloseSession(handle))
        else:
            await self._loop.submit(stream, command, num_bytes)
