"""The asyncio client: streams generations from any of several orchestrators and resumes them when one is lost."""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from grpc import aio
from opentelemetry import trace

import outrider
from outrider.client.events import Event, Generation
from outrider.client.request import GenerationRequest
from outrider.client.retry import Attempts, Deadline, RetryPolicy, is_transient
from outrider.client.stream import ResumableStream
from outrider.errors import InvalidArgument, OutriderError
from outrider.serving.channel import open_channel
from outrider.serving.spans import fail, traceparent_of
from outrider.serving.status import error_from_rpc
from outrider.serving.tls import TlsFiles
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from outrider.v1.generation_pb2_grpc import GenerationServiceAsyncStub

# Above the least interval between pings that servers allow.
_KEEPALIVE_S = 10.0

Q = TypeVar("Q")
R = TypeVar("R")


class OutriderClient:
    """A client of one or many orchestrators, which are replicas of each other.

    Requests are spread over the addresses round robin. A stream that breaks continues at the next address where it
    stopped; no token is yielded twice and none is lost. Every failure is an `OutriderError` of `outrider.errors`.

        async with OutriderClient("127.0.0.1:50050") as client:
            async for event in client.generate(GenerationRequest(text="Once upon a time")):
                ...

    `token` is the bearer token, where orchestrators require one; `tls` encrypts the connection and names the files
    to show and to trust. `connect` opens the channel to an address, for whatever else a connection needs.

    Attributes:
        addresses: host:port of each orchestrator.
        retry: bounds on trying again.
        timeout_s: bound on each call that is not a generation.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        retry: RetryPolicy | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        token: str = "",
        tls: TlsFiles | None = None,
        timeout_s: float = 10.0,
        connect: Callable[[str], aio.Channel] | None = None,
    ) -> None:
        self.addresses = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self.addresses:
            raise InvalidArgument("needs at least one address", "addresses")
        self.retry = retry or RetryPolicy()
        self.timeout_s = timeout_s
        self._metadata = (*metadata, *_authorization(token))
        self._connect = connect or functools.partial(_connect, tls)
        self._channels: dict[str, aio.Channel] = {}
        self._firsts = itertools.cycle(range(len(self.addresses)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; running calls end."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield `Accepted`, then deltas, then `Finished`.

        To stop early, close the iterator: the session stays resumable. `cancel` ends the request for good.

        Args:
            request: what to generate.
            timeout_s: bound on the whole generation, resumes included; None for no bound.

        Raises:
            InvalidArgument: a field of the request is wrong.
            SessionBusy: another request is running on the session.
            Overloaded: every attempt met a limit.
            Unavailable: no orchestrator could be reached within the bounds of `retry`.
            DeadlineExceeded: `timeout_s` passed.
            OutriderError: any other refusal, by its reason.
        """
        attempts = Attempts(self.retry, Deadline.after(timeout_s), len(self.addresses))
        with _traced() as span:
            metadata = (*self._metadata, *_trace_context(span))
            stream = ResumableStream(request, self._stubs(), attempts, metadata, span)
            async with aclosing(stream.events()) as events:
                async for event in events:
                    yield event

    async def complete(self, request: GenerationRequest, *, timeout_s: float | None = None) -> Generation:
        """Return the whole generation; arguments and errors as for `generate`."""
        generation = Generation()
        async with aclosing(self.generate(request, timeout_s=timeout_s)) as events:
            async for event in events:
                generation.add(event)
        return generation

    async def cancel(self, session_id: str, request_id: str = "") -> bool:
        """End a running request at its next token; return whether one was running."""
        message = pb.CancelGenerationRequest(session_id=session_id, request_id=request_id)
        return (await self._unary(lambda stub: stub.CancelGeneration, message)).cancelled

    async def get_session(self, session_id: str, *, with_token_ids: bool = False) -> pb.GetSessionResponse:
        """Return the session's record; raise `SessionNotFound`."""
        message = pb.GetSessionRequest(session_id=session_id, with_token_ids=with_token_ids)
        return await self._unary(lambda stub: stub.GetSession, message)

    async def delete_session(self, session_id: str) -> None:
        """Delete the session, its log and its KV caches; raise `SessionNotFound`."""
        await self._unary(lambda stub: stub.DeleteSession, pb.DeleteSessionRequest(session_id=session_id))

    async def list_models(self) -> pb.ListModelsResponse:
        """Return the targets and drafts, including those kept out of rotation, and why."""
        return await self._unary(lambda stub: stub.ListModels, pb.ListModelsRequest())

    async def _unary(
        self, method: Callable[[GenerationServiceAsyncStub], aio.UnaryUnaryMultiCallable[Q, R]], message: Q
    ) -> R:
        """Make a unary call; all of them are idempotent, so one without an answer is repeated at the next address."""
        attempts = Attempts(self.retry, Deadline.after(self.timeout_s), len(self.addresses))
        next_stub = self._stubs()
        while True:
            call = method(next_stub())
            try:
                return await call(message, timeout=attempts.deadline.remaining_s, metadata=self._metadata)
            except aio.AioRpcError as rpc_error:
                error = error_from_rpc(rpc_error)
            await attempts.failed(error, retry=is_transient(error))

    def _stubs(self) -> Callable[[], GenerationServiceAsyncStub]:
        """Return a function that gives each attempt of one call its stub.

        It begins at the next address that all calls share, and goes on from there by itself: if later attempts took the
        next shared address, some would meet the same dead address again and again.
        """
        first = next(self._firsts)
        addresses = itertools.cycle(self.addresses[first:] + self.addresses[:first])
        return lambda: self._stub(next(addresses))

    def _stub(self, address: str) -> GenerationServiceAsyncStub:
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        return GenerationServiceStub(self._channels[address])


def _connect(tls: TlsFiles | None, address: str) -> aio.Channel:
    """Open a channel that detects within 15 s that an orchestrator hangs, and at once that one has ended."""
    credentials = None if tls is None else tls.channel_credentials()
    return open_channel(address, credentials=credentials, keepalive_s=_KEEPALIVE_S)


@contextmanager
def _traced() -> Iterator[trace.Span]:
    """Run the block as a span of the program's trace; a no-op where the program does not trace."""
    # From the provider that the program has now.
    tracer = trace.get_tracer("outrider", outrider.__version__)
    span = tracer.start_span("outrider.generate", kind=trace.SpanKind.CLIENT)
    try:
        yield span
    except OutriderError as error:
        fail(span, error.reason)
        raise
    finally:
        span.end()


def _trace_context(span: trace.Span) -> tuple[tuple[str, str], ...]:
    traceparent = traceparent_of(span)
    return (("traceparent", traceparent),) if traceparent else ()


def _authorization(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token else ()
