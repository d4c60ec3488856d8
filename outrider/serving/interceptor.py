"""What happens around every call a server takes: errors become statuses, and calls in flight are counted."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import grpc

from outrider.serving.status import CODES, grpc_status_from_error

_LOG: Final = logging.getLogger(__name__)

_Behaviour = Callable[[Any, Any], Any]
# Generic in the stubs only, so their parameters stay in strings.
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class CallsInFlight:
    """Counts the calls that a server is serving, its own bookkeeping services (health, reflection) aside."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """Calls in flight."""
        return self._count

    async def wait_idle(self) -> None:
        """Returns as soon as no call is in flight."""
        await self._idle.wait()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Counts one call for the time of the block."""
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if self._count == 0:
                self._idle.set()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call whose servicer raised with the status of the error, as the table in `status` has it.

    Errors that the table does not hold are logged, once, and cross the wire as INTERNAL without any text. A
    CancelledError passes only when the call itself is being cancelled: from within a servicer it would end the call
    without any status, and the client would wait until its deadline.
    """

    def __init__(self, calls: CallsInFlight) -> None:
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Returns the method's handler, wrapped; None where there is no such method."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        return _with_behaviour(handler, lambda behaviour: self._wrapped(behaviour, method))

    def _wrapped(self, behaviour: _Behaviour, method: str) -> _Behaviour:
        if inspect.isasyncgenfunction(behaviour):

            async def stream(request: Any, context: _Context) -> AsyncIterator[Any]:
                with self._calls.entered():
                    try:
                        async for response in behaviour(request, context):
                            yield response
                    except (Exception, asyncio.CancelledError) as error:
                        await _abort(error, method, context)

            return stream

        async def call(request: Any, context: _Context) -> Any:
            with self._calls.entered():
                try:
                    return await behaviour(request, context)
                except (Exception, asyncio.CancelledError) as error:
                    await _abort(error, method, context)

        return call


async def _abort(error: BaseException, method: str, context: _Context) -> None:
    """Ends the call with the status of the error. Raises always."""
    if isinstance(error, grpc.aio.AbortError) or (isinstance(error, asyncio.CancelledError) and _is_cancelled()):
        raise error
    failure = error if isinstance(error, Exception) else RuntimeError("a servicer let a CancelledError out")
    if getattr(failure, "reason", None) not in CODES:
        _LOG.error("call failed", exc_info=error, extra={"method": method})
    await context.abort_with_status(grpc_status_from_error(failure))


def _is_cancelled() -> bool:
    """Tells whether the running task itself was asked to end, as gRPC does when the client or the server gives up."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _with_behaviour(handler: _Handler, wrap: Callable[[_Behaviour], _Behaviour]) -> _Handler:
    """Returns a handler of the same kind, its behaviour wrapped."""
    kinds: dict[tuple[bool, bool], tuple[Any, Any]] = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }
    behaviour, make = kinds[handler.request_streaming, handler.response_streaming]
    wrapped: _Handler = make(wrap(behaviour), handler.request_deserializer, handler.response_serializer)
    return wrapped
