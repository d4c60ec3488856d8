"""The asyncio client: streams generations from any of several orchestrators and resumes them when one is lost."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from grpc import aio
from opentelemetry import trace

import outrider
from outrider.client.addresses import checked_addresses
from outrider.client.conversation import Conversation
from outrider.client.events import Event, Generation, collected
from outrider.client.prompt import Prompt
from outrider.client.request import GenerationRequest, Speculation
from outrider.client.retry import Attempts, ClientClosed, Deadline, RetryPolicy, is_transient
from outrider.client.stream import ResumableStream
from outrider.errors import OutriderError
from outrider.parameters import SamplingParameters
from outrider.serving.affinity import SESSION
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


class AsyncClient:
    """A client of one or many orchestrators, which are replicas of each other.

    Requests are spread over the addresses round robin. A stream that breaks continues at the next address where it
    stopped; no token is yielded twice and none is lost. Every failure is an `OutriderError` of `outrider.errors`.

        async with AsyncClient("127.0.0.1:50050") as client:
            async for event in client.generate("Once upon a time", SamplingParameters(max_tokens=20)):
                ...

    A prompt is a text to continue, token ids to continue, or a conversation's new messages, each such as
    `{"role": "user", "content": "Hello"}`; a `GenerationRequest` has a prompt and everything else of a request.

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
        self.addresses = checked_addresses(addresses)
        self.retry = retry or RetryPolicy()
        self.timeout_s = timeout_s
        self._metadata = (*metadata, *_authorization(token))
        self._connect = connect or functools.partial(_connect, tls)
        self._channels: dict[str, aio.Channel] = {}
        self._is_closed = False
        self._firsts = itertools.cycle(range(len(self.addresses)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; running calls and later ones raise `ClientClosed`."""
        self._is_closed = True
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    def generate(
        self,
        prompt: GenerationRequest | Prompt,
        parameters: SamplingParameters | None = None,
        *,
        speculation: Speculation | None = None,
        session_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Yield `Accepted`, then deltas, then `Finished`.

        To stop early, close the iterator: the session stays resumable. `cancel` ends the request for good.

        Args:
            prompt: a text, token ids or messages; or a whole request, and then nothing of the following three.
            parameters: sampling parameters and limits; the service has defaults for what is not given.
            speculation: how to speculate.
            session_id: session to continue or to create.
            timeout_s: bound on the whole generation, resumes included; None for no bound.

        Raises:
            InvalidArgument: a field of the request is wrong.
            SessionBusy: another request is running on the session.
            Overloaded: every attempt met a limit.
            Unavailable: no orchestrator could be reached within the bounds of `retry`.
            ClientClosed: the client is closed.
            DeadlineExceeded: `timeout_s` passed.
            OutriderError: any other refusal, by its reason.
        """
        return self._events(GenerationRequest.of(prompt, parameters, speculation, session_id), timeout_s)

    async def complete(
        self,
        prompt: GenerationRequest | Prompt,
        parameters: SamplingParameters | None = None,
        *,
        speculation: Speculation | None = None,
        session_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Generation:
        """Return the whole generation; arguments and errors as for `generate`."""
        request = GenerationRequest.of(prompt, parameters, speculation, session_id)
        return await collected(self._events(request, timeout_s))

    def conversation(
        self,
        system: str = "",
        parameters: SamplingParameters | None = None,
        *,
        speculation: Speculation | None = None,
        session_id: str | None = None,
    ) -> Conversation:
        """Return a conversation in a session of its own, or in the one given; arguments as for `Conversation`."""
        given: dict[str, Any] = {"parameters": parameters, "speculation": speculation, "session_id": session_id}
        return Conversation(self, system, **{name: value for name, value in given.items() if value is not None})

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

    async def _events(self, request: GenerationRequest, timeout_s: float | None) -> AsyncGenerator[Event, None]:
        attempts = Attempts(self.retry, Deadline.after(timeout_s), len(self.addresses))
        with _traced() as span, self._ended_by_close():
            # Beside the message's own field: a gateway reads metadata only.
            session = ((SESSION, request.session_id),) if request.session_id else ()
            metadata = (*self._metadata, *session, *_trace_context(span))
            stream = ResumableStream(request, self._stubs(), attempts, metadata, span)
            async with aclosing(stream.events()) as events:
                async for event in events:
                    yield event

    async def _unary(
        self, method: Callable[[GenerationServiceAsyncStub], aio.UnaryUnaryMultiCallable[Q, R]], message: Q
    ) -> R:
        """Make a unary call; all of them are idempotent, so one without an answer is repeated at the next address."""
        attempts = Attempts(self.retry, Deadline.after(self.timeout_s), len(self.addresses))
        next_stub = self._stubs()
        while True:
            call = method(next_stub())
            try:
                with self._ended_by_close():
                    return await call(message, timeout=attempts.deadline.remaining_s, metadata=self._metadata)
            except aio.AioRpcError as rpc_error:
                error = error_from_rpc(rpc_error)
            await attempts.failed(error, retry=is_transient(error))

    @contextmanager
    def _ended_by_close(self) -> Iterator[None]:
        """Raise `ClientClosed` where gRPC cancels the call within because its channel closed; no task is cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and not (task and task.cancelling()):
                raise ClientClosed from None
            raise

    def _stubs(self) -> Callable[[], GenerationServiceAsyncStub]:
        """Return a function that gives each attempt of one call its stub.

        It begins at the next address that all calls share, and goes on from there by itself: if later attempts took the
        next shared address, some would meet the same dead address again and again.
        """
        first = next(self._firsts)
        addresses = itertools.cycle(self.addresses[first:] + self.addresses[:first])
        return lambda: self._stub(next(addresses))

    def _stub(self, address: str) -> GenerationServiceAsyncStub:
        if self._is_closed:
            raise ClientClosed
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        return GenerationServiceStub(self._channels[address])


OutriderClient = AsyncClient
"""The earlier name of `AsyncClient`."""


def _connect(tls: TlsFiles | None, address: str) -> aio.Channel:
    """Open a channel that detects within 15 s that an orchestrator hangs, and at once that one has ended."""
    credentials = None if tls is None else tls.channel_credentials()
    return open_channel(address, credentials=credentials, keepalive_s=_KEEPALIVE_S, balances=True)


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
