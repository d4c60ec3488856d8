"""TargetService: frames of streams become commands of the engine."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from outrider.errors import InvalidArgument, OutriderError
from outrider.serving.frames import FRAMES_AT_ONCE, check_num_frames, checked_size
from outrider.serving.stream_handle import StreamHandle
from outrider.serving.unexpected import UnexpectedErrors
from outrider.v1 import target_pb2, target_pb2_grpc
from target_service.engine.commands import EndStream, FrameCommand, Handle, InvalidFrame
from target_service.frames import command_from_frame, kind_of
from target_service.frontend import Frontend
from target_service.stream import VerifyStream

_LOG: Final = logging.getLogger(__name__)


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Submits the frames of callers to the engine, and sends callers the frames of its results.

    Args:
        frontend: of the engine.
        max_len: longest session, in tokens.
        hand_over_after_s: seconds of a drain after which requests that still run are sent to another target.
    """

    def __init__(self, frontend: Frontend[Any], max_len: int, hand_over_after_s: float = math.inf) -> None:
        self._frontend = frontend
        self._max_len = max_len
        self._hand_over_after_s = hand_over_after_s
        self._streams: set[VerifyStream] = set()
        self._unexpected = UnexpectedErrors()

    async def drain(self) -> None:
        """Refuse new sessions, wait until the running ones have ended or gone elsewhere, and end the streams."""
        drained = asyncio.wrap_future(self._frontend.loop.drain())
        wait_s = None if self._hand_over_after_s == math.inf else self._hand_over_after_s
        if not (await asyncio.wait((drained,), timeout=wait_s))[0]:
            self._frontend.run_in_engine(self._frontend.hand_over)
        await drained
        await asyncio.to_thread(self._frontend.flush)
        for stream in self._streams:
            stream.outbox.close()

    async def Verify(
        self,
        request_iterator: AsyncIterator[target_pb2.VerifyRequest],
        context: grpc.aio.ServicerContext[target_pb2.VerifyRequest, target_pb2.VerifyResponse],
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        """Serve one stream until either side ends it."""
        stream = VerifyStream()
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            async for message in stream.outbox.messages():
                yield message
        finally:
            reader.cancel()
            self._streams.discard(stream)
            # Without waiting for room: the sessions of a broken stream must not keep their places.
            self._frontend.loop.submit_now(stream, EndStream(stream))

    async def _read(self, requests: AsyncIterator[target_pb2.VerifyRequest], stream: VerifyStream) -> None:
        try:
            async for request in requests:
                check_num_frames(request.frames)
                for number, frame in enumerate(request.frames, start=1):
                    await self._take(stream, frame)
                    if not number % FRAMES_AT_ONCE:
                        await asyncio.sleep(0)
        except OutriderError as error:
            stream.outbox.close(error)
        except Exception as error:
            # Most often bytes that are no message.
            _LOG.warning("the stream could not be read", extra={"problem": type(error).__name__})
            stream.outbox.close(InvalidArgument("the stream could not be read", "request"))
        finally:
            stream.outbox.close()

    async def _take(self, stream: VerifyStream, frame: target_pb2.VerifyRequestFrame) -> None:
        """Submit a frame to the engine; an error in it ends one session at most."""
        handle: Handle = StreamHandle(stream, frame.handle)
        num_bytes = 0
        try:
            num_bytes = checked_size(frame)
            command: FrameCommand = command_from_frame(frame, handle, self._max_len)
        except Exception as error:
            named = self._unexpected.named("the frame could not be read", error)
            command = InvalidFrame(handle, kind_of(frame), named)
        await self._frontend.loop.submit(stream, command, num_bytes)
