"""The outgoing side of a Verify stream."""

import asyncio
import contextlib
from typing import Final

from outrider.errors import Overloaded
from outrider.serving.frames import FrameOutbox
from outrider.v1 import target_pb2
from target_service.engine.results import Features, Result
from target_service.frames import frame_from_result

_MAX_PENDING_FEATURE_BYTES: Final = 8 << 20


class VerifyStream:
    """A `ResultStream` into a call's outbox. A reader that is too slow for it loses the stream, with OVERLOADED.

    Attributes:
        outbox: frames that leave; close it in its event loop only.
    """

    def __init__(self) -> None:
        self.outbox: FrameOutbox[target_pb2.VerifyResponseFrame, target_pb2.VerifyResponse] = FrameOutbox(
            lambda frames: target_pb2.VerifyResponse(frames=frames)
        )
        self._loop = asyncio.get_running_loop()
        self._held: list[target_pb2.VerifyResponseFrame] = []
        self._held_feature_bytes = 0

    @property
    def has_room_for_features(self) -> bool:
        """Whether few enough bytes are pending for features, which can wait, to be added."""
        return self.outbox.pending_bytes + self._held_feature_bytes < _MAX_PENDING_FEATURE_BYTES

    def post(self, result: Result) -> None:
        """Send a result now, behind those that are held."""
        self._put(frame_from_result(result))

    def hold(self, result: Result) -> None:
        """Send a result with the next `flush` or `post`."""
        self._held.append(frame_from_result(result))
        if isinstance(result, Features):
            self._held_feature_bytes += len(result.features.data)

    def flush(self) -> None:
        """Send the results that are held, together: the receiver then handles them together too."""
        if self._held:
            self._put()

    def _put(self, *frames: target_pb2.VerifyResponseFrame) -> None:
        held, self._held, self._held_feature_bytes = self._held, [], 0
        try:
            self.outbox.put_threadsafe(*held, *frames)
        except Overloaded as error:
            # The windows bound what a caller that reads can have pending. The stream ends; its sessions are resumable.
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the call with it
                self._loop.call_soon_threadsafe(self.outbox.close, error)
