"""One long-lived stream to each worker, on which the frames of many sessions travel."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc

from orchestrator.discovery.endpoints import Endpoint
from orchestrator.settings import OrchestratorSettings
from outrider.errors import OutriderError, Overloaded, Unavailable
from outrider.serving.channel import answer_timeout_s, open_channel, wait_connected
from outrider.serving.frames import FrameOutbox
from outrider.serving.status import peer_errors
from outrider.serving.unexpected import UnexpectedErrors
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2
from outrider.v1.worker_pb2_grpc import WorkerServiceStub
from outrider.wire import check_name

_LOG: Final = logging.getLogger(__name__)
_FIRST_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 1.0
_CALL_TIMEOUT_S: Final = 5.0
_END_S: Final = 5.0
"""How long a worker that is no longer listed may take to end a stream that has nothing more to say."""
_NAMES: Final = (
    "replica",
    "incarnation",
    "model_fingerprint",
    "tokenizer_fingerprint",
    "weights_fingerprint",
    "target_fingerprint",
)
# A worker that drains, or is full, is noticed within this; who wants dead peers noticed sooner, wants this sooner too.
_MAX_LOAD_INTERVAL_S: Final = 2.0
_POLLS_PER_KEEPALIVE: Final = 10
_MAX_UNANSWERED: Final = 2
"""Looks at the load in a row without an answer, after which a worker is taken for hung: a stopped process keeps its
connections, and pings notice it later."""


class Receiver(Protocol):
    """What a session does with what a worker sends; called in the event loop, must not block or raise."""

    def on_frame(self, frame: Any) -> None:
        """Takes a frame of the session's handle."""

    def on_lost(self, error: OutriderError) -> None:
        """Learns that the stream is broken; nothing more will come."""


@dataclass(frozen=True, slots=True)
class StreamKind:
    """How the two kinds of streams differ."""

    call: "Callable[[grpc.aio.Channel], Callable[[AsyncIterator[Any]], grpc.aio.StreamStreamCall[Any, Any]]]"
    message: Callable[[Sequence[Any]], Any]
    frame: Callable[..., Any]
    role: worker_pb2.WorkerRole.ValueType


TARGET: Final = StreamKind(
    lambda channel: target_pb2_grpc.TargetServiceStub(channel).Verify,
    lambda frames: target_pb2.VerifyRequest(frames=frames),
    target_pb2.VerifyRequestFrame,
    worker_pb2.WORKER_ROLE_TARGET,
)
DRAFT: Final = StreamKind(
    lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Draft,
    lambda frames: draft_pb2.DraftRequest(frames=frames),
    draft_pb2.DraftRequestFrame,
    worker_pb2.WORKER_ROLE_DRAFT,
)


class Handle:
    """A session's place on a link."""

    def __init__(self, link: "WorkerLink", number: int, receiver: Receiver) -> None:
        self.link = link
        self.number = number
        self.receiver = receiver

    def send(self, **content: Any) -> None:
        """Sends one frame, without waiting; nothing happens when the stream is broken, as the receiver knows."""
        self.link.send(self.link.kind.frame(handle=self.number, **content))

    def close(self, **content: Any) -> None:
        """Sends a last frame and forgets the session."""
        if self.link.forget(self):
            self.send(**content)


class WorkerLink:
    """Keeps a stream to one worker open, from `run` to its cancellation.

    Args:
        address: of the worker.
        kind: `TARGET` or `DRAFT`.
        settings: of the process.
        tls_name: name that the worker's certificate must have; empty for the host of the address.

    Attributes:
        address: of the worker.
        kind: `TARGET` or `DRAFT`.
        info: what the worker last said of itself; None while it was never reached.
        load: its last known load.
        problem: why there is no stream now; empty while there is one.
        endpoint: what discovery says of it; None where it is no longer listed.
    """

    def __init__(self, address: str, kind: StreamKind, settings: OrchestratorSettings, tls_name: str = "") -> None:
        self.address = address
        self.kind = kind
        self.info: worker_pb2.GetInfoResponse | None = None
        self.load = worker_pb2.GetLoadResponse()
        self.problem = "not connected yet"
        self.endpoint: Endpoint | None = Endpoint(address)
        self.changed = asyncio.Event()
        self._settings = settings
        self._tls_name = tls_name
        self._outbox: FrameOutbox[Any, Any] | None = None
        self._handles: dict[int, Handle] = {}
        self._next_number = 1
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.StreamStreamCall[Any, Any] | None = None
        self._failure: OutriderError | None = None
        self._unexpected = UnexpectedErrors()

    @property
    def is_up(self) -> bool:
        """Whether there is a stream."""
        return self._outbox is not None

    @property
    def num_sessions(self) -> int:
        """Sessions that this orchestrator has open on it."""
        return len(self._handles)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the frames that wait to be sent."""
        return self._outbox.pending_bytes if self._outbox else 0

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel, for unary calls; raises `Unavailable` while there is none."""
        if self._channel is None:
            raise Unavailable(f"{self.address}: {self.problem}")
        return self._channel

    def open(self, receiver: Receiver) -> Handle:
        """Returns a new handle; raises `Unavailable` while there is no stream."""
        if self._outbox is None:
            raise Unavailable(f"{self.address}: {self.problem}")
        handle = Handle(self, self._next_number, receiver)
        self._handles[self._next_number] = handle
        self._next_number = self._next_number % (2**32 - 1) + 1
        return handle

    def send(self, frame: Any) -> None:
        """Puts a frame on the stream; a worker that does not take its frames any more loses the stream."""
        if self._outbox is None:
            return
        try:
            self._outbox.put(frame)
        except Overloaded as error:
            self._give_up(error)

    def forget(self, handle: Handle) -> bool:
        """Ends the delivery of frames to a handle; returns whether it was open."""
        was_open = self._handles.pop(handle.number, None) is not None
        self._end_if_left()
        return was_open

    def leave(self) -> None:
        """Learns that the worker is no longer listed: the stream ends with its last session, and `run` with it."""
        self.endpoint = None
        self._end_if_left()

    async def run(self) -> None:
        """Connects, serves the stream, and connects again when it breaks, until cancelled, or left."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            error = await self._attempt()
            if self.is_up:
                backoff_s = _FIRST_BACKOFF_S
            self._lose(error)
            if self.endpoint is None:
                return
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _attempt(self) -> OutriderError:
        """Connects and serves until that fails; returns why."""
        try:
            await self._connect_and_serve()
        except OutriderError as error:
            return error
        except Exception:
            # Nothing that a peer can provoke may end the link for good.
            _LOG.exception("stream failed", extra={"worker": self.address})
            return Unavailable(f"{self.address}: the stream failed")
        return Unavailable(f"{self.address} ended the stream")

    async def _connect_and_serve(self) -> None:
        settings = self._settings
        tls = settings.worker_tls
        channel = open_channel(
            self.address,
            # Read anew with each connection, as certificates are renewed.
            credentials=None if tls is None else tls.channel_credentials(),
            keepalive_s=settings.keepalive_s,
            tls_name=self._tls_name,
        )
        async with channel:
            with peer_errors():
                await wait_connected(channel, self.address, answer_timeout_s(settings.keepalive_s))
                worker = WorkerServiceStub(channel)
                self._know(await worker.GetInfo(worker_pb2.GetInfoRequest(), timeout=_CALL_TIMEOUT_S))
                self._channel = channel
                await self._serve(channel)

    def _end_if_left(self) -> None:
        if self.endpoint is None and not self._handles:
            # Later: whoever closes a session has a last frame to send.
            loop = asyncio.get_running_loop()
            loop.call_soon(self._end_stream, self._call)
            loop.call_later(_END_S, self._end_stream, self._call, True)

    def _end_stream(self, call: object, at_once: bool = False) -> None:
        """Ends the stream of a worker that is still left, behind what is to be sent; or at once, if it is the same."""
        if self.endpoint is not None or self._handles or self._outbox is None or call is not self._call:
            return
        if at_once:
            self._give_up(Unavailable(f"{self.address} is no longer listed"))
        else:
            self._outbox.close()

    def _know(self, info: worker_pb2.GetInfoResponse) -> None:
        if info.role not in (worker_pb2.WORKER_ROLE_UNSPECIFIED, self.kind.role):
            role = worker_pb2.WorkerRole.Name(info.role)
            raise Unavailable(f"{self.address} is a {role.removeprefix('WORKER_ROLE_').lower()}")
        # They are kept, and written to Redis with every commit.
        for field in _NAMES:
            check_name(getattr(info, field), field)
        if self.info is not None and self.info.incarnation != info.incarnation:
            _LOG.info("worker restarted", extra={"worker": self.address})
        # What was said of the load belongs to the stream before; above all, whoever is back does not drain.
        self.info, self.load = info, worker_pb2.GetLoadResponse()

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        outbox: FrameOutbox[Any, Any] = FrameOutbox(self.kind.message)
        looking = asyncio.create_task(self._look_at_load(channel))
        try:
            self._failure = None
            self._call = self.kind.call(channel)(outbox.messages())
            self._outbox, self.problem = outbox, ""
            self.changed.set()
            _LOG.info("connected", extra={"worker": self.address})
            async for message in self._call:
                for frame in message.frames:
                    self._deliver(frame)
        except asyncio.CancelledError:
            # Raised too when `_give_up` cancelled the call; only a task that is being cancelled may let it out.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._failure or Unavailable(f"{self.address}: the stream was cancelled") from None
        finally:
            looking.cancel()
            outbox.close()

    def _deliver(self, frame: Any) -> None:
        handle = self._handles.get(frame.handle)
        if handle is None:
            return
        try:
            handle.receiver.on_frame(frame)
        except Exception as error:
            # What one session cannot take must not cost the others their stream.
            self._unexpected.log("frame not understood", error, worker=self.address)
            self._tell_lost(handle, Unavailable(f"{self.address} sent a frame that makes no sense"))

    def _tell_lost(self, handle: Handle, error: OutriderError) -> None:
        try:
            handle.receiver.on_lost(error)
        except Exception as failure:
            # Nothing more can be done for it; the others have to be told, or go on.
            self._unexpected.log("a session could not be told that its worker is lost", failure, worker=self.address)
            self._handles.pop(handle.number, None)

    def _give_up(self, error: OutriderError) -> None:
        """Breaks the stream from this side. A worker that reads nothing would not notice the end of the outbox."""
        self._failure = error
        if self._call is not None:
            self._call.cancel()

    async def _look_at_load(self, channel: grpc.aio.Channel) -> None:
        worker = WorkerServiceStub(channel)
        interval_s = min(_MAX_LOAD_INTERVAL_S, self._settings.keepalive_s / _POLLS_PER_KEEPALIVE)
        num_unanswered = 0
        while num_unanswered < _MAX_UNANSWERED:
            try:
                self.load = await worker.GetLoad(worker_pb2.GetLoadRequest(), timeout=_CALL_TIMEOUT_S)
                num_unanswered = 0
            except grpc.aio.AioRpcError as error:
                _LOG.debug("no load", extra={"worker": self.address, "code": error.code().name})
                # Any other status is an answer: the worker lives.
                num_unanswered += error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            except Exception as error:
                # It ended the look-out for good once: whoever cannot even be asked has not answered.
                self._unexpected.log("the load could not be asked for", error, worker=self.address)
                num_unanswered += 1
            await asyncio.sleep(interval_s)
        self._give_up(Unavailable(f"{self.address} does not answer"))

    def _lose(self, error: OutriderError) -> None:
        if self.is_up:
            _LOG.warning("stream lost", extra={"worker": self.address, "reason": error.reason})
        self._outbox = self._channel = self._call = None
        self.problem = error.message
        self.changed.set()
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            self._tell_lost(handle, Unavailable(f"{self.address}: {error.message}"))
