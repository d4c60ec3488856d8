"""The interceptor around every call of a server: errors to statuses, bad messages, slow readers, calls in flight."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager, nullcontext, suppress
from typing import Any, Final, TypeAlias

import grpc

from outrider.errors import InvalidArgument, Overloaded
from outrider.serving.status import CODES, grpc_status_from_error

_LOG: Final = logging.getLogger(__name__)
_READER_TIMEOUT_S: Final = 60.0
"""Seconds that a message waits for a reader that takes nothing. A reader at 1 kB/s frees a part of gRPC's least window
(64 kB) more often than that."""
_BOOKKEEPING: Final = "/grpc."
"""Prefix of the methods of health and reflection, which need no token and which no drain waits for."""
_MALFORMED_LOG_S: Final = 10.0
"""Least seconds between log records about malformed messages: any caller can send any number of them."""

_Behaviour = Callable[[Any, Any], Any]
# Generic in the stubs only, so their parameters stay in strings.
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]] | None"
Authenticate: TypeAlias = Callable[[Metadata], object]
"""Raises `Unauthenticated` unless the metadata of a call has a known token."""


def any_caller(metadata: Metadata) -> None:
    """Accept every caller, where calls have no tokens."""


class CallsInFlight:
    """The number of calls that a server is serving, without health and reflection."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """Calls in flight."""
        return self._count

    async def wait_idle(self) -> None:
        """Return as soon as no call is in flight."""
        await self._idle.wait()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Count one call for the time of the block."""
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if self._count == 0:
                self._idle.set()


class _Malformed:
    """A message whose bytes could not be parsed; refused once the caller is authenticated."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call whose servicer raised with the status of the error, by the table in `status`.

    Errors that the table does not hold are logged, once, and cross the wire as INTERNAL without any text. A
    CancelledError passes only when the call itself is being cancelled: from within a servicer it would end the call
    without any status, and the client would wait until its deadline.

    A request whose bytes are no message of its type is refused with INVALID_ARGUMENT, behind `authenticate`. A response
    that waits for its reader for 60 s ends the call with OVERLOADED: what the servicer holds is released then,
    whether or not the status ever reaches the caller.

    Args:
        calls: counts the calls.
        authenticate: called with the metadata of a call before a malformed message is refused.
    """

    def __init__(self, calls: CallsInFlight, authenticate: Authenticate = any_caller) -> None:
        self._calls = calls
        self._authenticate = authenticate
        self._num_malformed = 0
        self._next_log_s = 0.0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Return the method's handler, wrapped; None where there is no such method."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        return _with_behaviour(handler, lambda behaviour: self._wrapped(handler, behaviour, method))

    def _wrapped(self, handler: _Handler, behaviour: _Behaviour, method: str) -> _Behaviour:
        respond = _stream if inspect.isasyncgenfunction(behaviour) else _respond
        check = self._checked_stream if handler.request_streaming else self._checked
        entered = nullcontext if method.startswith(_BOOKKEEPING) else self._calls.entered

        async def call(request: Any, context: _Context) -> Any:
            try:
                with entered():
                    return await respond(behaviour, check(request, context, method), context)
            except (Exception, asyncio.CancelledError) as error:
                # No longer counted: the status of a caller that does not read may never get through.
                await _abort(error, method, context)

        return call

    def _checked(self, request: Any, context: _Context, method: str) -> Any:
        """Return the request; raise `InvalidArgument` where its bytes were none, `Unauthenticated` before that."""
        if not isinstance(request, _Malformed):
            return request
        if not method.startswith(_BOOKKEEPING):
            self._authenticate(context.invocation_metadata())
        self._log_malformed(method)
        raise InvalidArgument("the message cannot be read: it is not what the method takes", "request")

    async def _checked_stream(
        self, requests: AsyncIterator[Any], context: _Context, method: str
    ) -> AsyncGenerator[Any, None]:
        async for request in requests:
            yield self._checked(request, context, method)

    def _log_malformed(self, method: str) -> None:
        self._num_malformed += 1
        now = time.monotonic()
        if now >= self._next_log_s:
            about = {"method": method, "num_messages": self._num_malformed}
            _LOG.warning("messages could not be read", extra=about)
            self._num_malformed, self._next_log_s = 0, now + _MALFORMED_LOG_S


async def _respond(behaviour: _Behaviour, request: Any, context: _Context) -> Any:
    return await behaviour(request, context)


async def _stream(behaviour: _Behaviour, request: Any, context: _Context) -> None:
    """Write what a generator yields, each message within a bounded time."""
    # Closed here and now, whatever ends the call: what the generator holds must not wait for the garbage collector.
    async with aclosing(behaviour(request, context)) as responses:
        async for response in responses:
            try:
                async with asyncio.timeout(_READER_TIMEOUT_S):
                    await context.write(response)
            except TimeoutError:
                await responses.athrow(Overloaded(f"nothing was read of the stream for {_READER_TIMEOUT_S:g} s"))


async def _abort(error: BaseException, method: str, context: _Context) -> None:
    """End the call with the status of the error. Raises what ends it in gRPC, where there is something left to end."""
    if isinstance(error, grpc.aio.AbortError) or (isinstance(error, asyncio.CancelledError) and _is_cancelled()):
        raise error
    failure = error if isinstance(error, Exception) else RuntimeError("a servicer let a CancelledError out")
    if getattr(failure, "reason", None) not in CODES:
        _LOG.error("call failed", exc_info=error, extra={"method": method})
    # Where not even the first message got out, gRPC has no way to send a status any more; the call ends all the same.
    with suppress(grpc.aio.InternalError):
        await context.abort_with_status(grpc_status_from_error(failure))


def _is_cancelled() -> bool:
    """Return whether the running task itself was cancelled, as by gRPC when the client or the server gives up."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _with_behaviour(handler: _Handler, wrap: Callable[[_Behaviour], _Behaviour]) -> _Handler:
    """Return a handler of the same kind, its behaviour wrapped; it gets `_Malformed` for bytes that are no message."""
    kinds: dict[tuple[bool, bool], tuple[Any, Any]] = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }
    behaviour, make = kinds[handler.request_streaming, handler.response_streaming]
    read = _reader(handler.request_deserializer)
    wrapped: _Handler = make(wrap(behaviour), read, handler.response_serializer)
    return wrapped


def _reader(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        # DecodeError for what is not protobuf, other exceptions for text that is not UTF-8.
        except Exception:
            return _Malformed()

    return read
