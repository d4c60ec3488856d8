"""Links to workers: one long-lived stream each, on which the frames of many sessions travel."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc

from outrider.discovery.endpoints import Endpoint
from outrider.errors import OutriderError, Overloaded, Unavailable
from outrider.serving.channel import answer_timeout_s, open_channel, wait_connected
from outrider.serving.frames import FrameOutbox
from outrider.serving.status import peer_errors
from outrider.serving.tls import TlsFiles
from outrider.serving.unexpected import UnexpectedErrors
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2
from outrider.v1.worker_pb2_grpc import WorkerServiceStub
from outrider.wire import check_name
from outrider.workers.load_polling import interval_s, polled_loads

_LOG: Final = logging.getLogger(__name__)
_FIRST_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 1.0
_INFO_TIMEOUT_S: Final = 5.0
_END_S: Final = 5.0
"""How long a worker that is no longer listed may take to end its stream, once its last session is closed."""
_NAMES: Final = (
    "replica",
    "incarnation",
    "model_fingerprint",
    "tokenizer_fingerprint",
    "weights_fingerprint",
    "target_fingerprint",
)


class LinkSettings(Protocol):
    """The settings of a process that calls workers, as far as links need them."""

    @property
    def keepalive_s(self) -> float:
        """Seconds of silence after which a worker is pinged."""

    @property
    def worker_tls(self) -> TlsFiles | None:
        """Certificate for workers and their authorities; None where they are called without TLS."""


class Receiver(Protocol):
    """The receiver of a session's frames; called in the event loop, must not block or raise."""

    def on_frame(self, frame: Any) -> None:
        """Handle a frame of the session."""

    def on_lost(self, error: OutriderError) -> None:
        """Handle the loss of the stream; no frame follows."""


@dataclass(frozen=True, slots=True)
class StreamKind:
    """The RPC and the messages of a kind of stream."""

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


class StreamHandle:
    """A session's handle on the stream of a link."""

    def __init__(self, link: "WorkerLink", number: int, receiver: Receiver) -> None:
        self.link = link
        self.number = number
        self.receiver = receiver

    def send(self, **content: Any) -> None:
        """Send one frame, without waiting; do nothing on a broken stream, whose loss the receiver handles."""
        self.link.send(self.link.kind.frame(handle=self.number, **content))

    def close(self, **content: Any) -> None:
        """Send a last frame, and deliver no more."""
        if self.link.forget(self):
            self.send(**content)


class WorkerLink:
    """A stream to one worker, kept open from `run` to its cancellation.

    Args:
        address: of the worker.
        kind: `TARGET` or `DRAFT`.
        settings: of the process.
        tls_name: name that the worker's certificate must have; empty for the host of the address.

    Attributes:
        address: of the worker.
        kind: `TARGET` or `DRAFT`.
        info: the worker's last answer to GetInfo; None before the first one.
        load: its load, as of the last poll.
        problem: the reason why there is no stream now; empty while there is one.
        endpoint: its endpoint in discovery; None where it is no longer listed.
        changed: set when the stream opens or breaks.
    """

    def __init__(self, address: str, kind: StreamKind, settings: LinkSettings, tls_name: str = "") -> None:
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
        self._handles: dict[int, StreamHandle] = {}
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
        """Sessions that this orchestrator has open on the worker."""
        return len(self._handles)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the frames that wait to be sent."""
        return self._outbox.pending_bytes if self._outbox else 0

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel, for unary calls; raises `Unavailable` without one."""
        if self._channel is None:
            raise Unavailable(f"{self.address}: {self.problem}")
        return self._channel

    def open(self, receiver: Receiver) -> StreamHandle:
        """Return a new handle; raise `Unavailable` without a stream."""
        if self._outbox is None:
            raise Unavailable(f"{self.address}: {self.problem}")
        handle = self._handles[self._next_number] = StreamHandle(self, self._next_number, receiver)
        self._next_number = self._next_number % (2**32 - 1) + 1
        return handle

    def send(self, frame: Any) -> None:
        """Queue a frame; break the stream of a worker that reads too slowly."""
        if self._outbox is None:
            return
        try:
            self._outbox.put(frame)
        except Overloaded as error:
            self._break(error)

    def forget(self, handle: StreamHandle) -> bool:
        """Stop delivering frames to a handle; return whether it was open."""
        was_open = self._handles.pop(handle.number, None) is not None
        self._end_if_unlisted()
        return was_open

    def unlist(self) -> None:
        """Record that the worker is no longer listed: the stream ends with its last session, and `run` with it."""
        self.endpoint = None
        self._end_if_unlisted()

    async def run(self) -> None:
        """Connect, serve the stream, and connect again when it breaks, until cancelled, or no longer listed."""
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
        """Connect and serve until that fails; return the error."""
        try:
            await self._connect_and_serve()
        except OutriderError as error:
            return error
        except Exception:
            # No error that a peer can provoke may end the link for good.
            _LOG.exception("stream failed", extra={"worker": self.address})
            return Unavailable(f"{self.address}: the stream failed")
        return Unavailable(f"{self.address} ended the stream")

    async def _connect_and_serve(self) -> None:
        settings, tls = self._settings, self._settings.worker_tls
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
                self._set_info(await worker.GetInfo(worker_pb2.GetInfoRequest(), timeout=_INFO_TIMEOUT_S))
                self._channel = channel
                await self._serve(channel)

    def _end_if_unlisted(self) -> None:
        if self.endpoint is None and not self._handles:
            # Later: the session that is being closed sends a last frame.
            asyncio.get_running_loop().call_soon(self._end_stream, self._call)
            asyncio.get_running_loop().call_later(_END_S, self._end_stream, self._call, True)

    def _end_stream(self, call: object, at_once: bool = False) -> None:
        """End a stream of a worker that is still unlisted: behind the queued frames, or at once."""
        if self.endpoint is not None or self._handles or self._outbox is None or call is not self._call:
            return
        if at_once:
            self._break(Unavailable(f"{self.address} is no longer listed"))
        else:
            self._outbox.close()

    def _set_info(self, info: worker_pb2.GetInfoResponse) -> None:
        if info.role not in (worker_pb2.WORKER_ROLE_UNSPECIFIED, self.kind.role):
            role = worker_pb2.WorkerRole.Name(info.role)
            raise Unavailable(f"{self.address} is a {role.removeprefix('WORKER_ROLE_').lower()}")
        # The names are kept, and written to Redis with every commit.
        for field in _NAMES:
            check_name(getattr(info, field), field)
        if self.info is not None and self.info.incarnation != info.incarnation:
            _LOG.info("worker restarted", extra={"worker": self.address})
        # The load belongs to the stream before; above all, a worker that is back is not draining.
        self.info, self.load = info, worker_pb2.GetLoadResponse()

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        outbox: FrameOutbox[Any, Any] = FrameOutbox(self.kind.message)
        polling = asyncio.create_task(self._poll_load(channel))
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
            # Also raised when `_break` cancelled the call; only a task that is being cancelled may let it out.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._failure or Unavailable(f"{self.address}: the stream was cancelled") from None
        finally:
            polling.cancel()
            outbox.close()

    def _deliver(self, frame: Any) -> None:
        handle = self._handles.get(frame.handle)
        if handle is None:
            return
        try:
            handle.receiver.on_frame(frame)
        except Exception as error:
            # An error in one session must not cost the others their stream.
            self._unexpected.log("invalid frame", error, worker=self.address)
            self._notify_lost(handle, Unavailable(f"{self.address} sent an invalid frame"))

    def _notify_lost(self, handle: StreamHandle, error: OutriderError) -> None:
        try:
            handle.receiver.on_lost(error)
        except Exception as failure:
            # The other sessions still have to be notified, or continue.
            self._unexpected.log("a session failed to handle the loss of its worker", failure, worker=self.address)
            self._handles.pop(handle.number, None)

    def _break(self, error: OutriderError) -> None:
        """Break the stream from this side. A worker that reads nothing would not notice the end of the outbox."""
        self._failure = error
        if self._call is not None:
            self._call.cancel()

    async def _poll_load(self, channel: grpc.aio.Channel) -> None:
        async for load in polled_loads(channel, self.address, interval_s(self._settings.keepalive_s), self._unexpected):
            self.load = load
        self._break(Unavailable(f"{self.address} does not answer"))

    def _lose(self, error: OutriderError) -> None:
        if self.is_up:
            _LOG.warning("stream lost", extra={"worker": self.address, "reason": error.reason})
        self._outbox = self._channel = self._call = None
        self.problem = error.message
        self.changed.set()
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            self._notify_lost(handle, Unavailable(f"{self.address}: {error.message}"))
