"""The response to a request for generation: its choices run side by side, in one piece or as a stream."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Final, TypeAlias

from starlette.responses import Response

from orchestrator.api.service import GenerationService
from orchestrator.http.asgi import Headers, Receive, Scope, Send, send_body, send_error
from orchestrator.http.errors import as_http, encoded
from orchestrator.http.forms import Form
from orchestrator.http.protocol import ABORT
from outrider.errors import DeadlineExceeded, Overloaded, RequestNotFound, SessionNotFound
from outrider.serving.affinity import REPLICA, SESSION
from outrider.serving.interceptor import Metadata
from outrider.v1 import generation_pb2

_KEEP_ALIVE_S: Final = 10.0
"""Silence after which a comment tells the client, and proxies between, that the stream lives."""
_READER_TIMEOUT_S: Final = 60.0
"""Seconds that a part of a stream waits for a reader that takes nothing, as in gRPC."""

_Event: TypeAlias = "tuple[int, generation_pb2.GenerateResponse]"


class _NotRead(Overloaded):
    """The client takes nothing of its stream."""


class Answer(Response):
    """Runs the choices of a request and writes them in a form.

    A client that leaves ends its choices at their next token; they stay resumable.

    Args:
        service: generates.
        messages: one for each choice of `form`.
        form: how the response is written.
        metadata: of the request: its headers.
        names: the route's own names of generation.proto's fields, for errors.
        streams: whether the response is a stream.
        timeout_s: bound on the whole response; None for none.
    """

    def __init__(
        self,
        service: GenerationService,
        messages: Sequence[generation_pb2.GenerateRequest],
        form: Form,
        metadata: Metadata,
        *,
        names: Mapping[str, str],
        streams: bool,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self._service = service
        self._messages = messages
        self._form = form
        self._metadata = metadata
        self._names = names
        self._streams = streams
        self._timeout_s = timeout_s
        self._has_begun = False
        self._has_left = False
        self._sent_s = 0.0
        self._abort: Callable[[], None] = _nothing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and respond."""
        task = asyncio.current_task()
        assert task is not None
        self._abort = scope.get("extensions", {}).get(ABORT, self._abort)
        watch = asyncio.create_task(self._watch(receive, send, task))
        try:
            await self._respond_or_fail(send)
        except asyncio.CancelledError:
            if not self._has_left:
                raise
            # By the watch alone: the connection has gone, and there is nothing left to say.
            task.uncancel()
        finally:
            watch.cancel()

    async def _respond_or_fail(self, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s), aclosing(self._events()) as events:
                await self._write(events, send)
        except TimeoutError:
            await self._fail(send, DeadlineExceeded(f"not complete within {self._timeout_s:g} s"))
        except Exception as error:
            await self._fail(send, error)

    async def _write(self, events: AsyncGenerator[_Event, None], send: Send) -> None:
        form = self._form
        choices, num_accepted = form.choices, 0
        early: list[_Event] = []
        async for index, event in events:
            choice = choices[index]
            kind = event.WhichOneof("event")
            if kind == "accepted":
                choice.accepted = event.accepted
                choice.offset = self._messages[index].resume_offset
                num_accepted += 1
                # Headers wait until every choice is accepted: until then the request may still be refused as a whole.
                if self._streams and num_accepted == len(choices):
                    await self._begin(send)
                    for number, waiting in early:
                        await self._send_part(number, waiting, send)
            elif not self._streams:
                if kind == "finished":
                    choice.finished = event.finished
                choice.collect(event)
            elif num_accepted < len(choices):
                early.append((index, event))
            else:
                await self._send_part(index, event, send)
        if self._streams:
            await self._send(send, form.end(), more=False)
        else:
            await send_body(send, encoded(form.whole()), headers=self._id_headers())

    async def _begin(self, send: Send) -> None:
        headers = [
            (b"content-type", self._form.stream_type),
            (b"cache-control", b"no-cache"),
            # Proxies that would collect the stream first.
            (b"x-accel-buffering", b"no"),
            *self._id_headers(),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._has_begun = True
        is_resumed = any(choice.offset for choice in self._form.choices)
        await self._send(send, self._form.begin(is_resumed=is_resumed))

    async def _send_part(self, index: int, event: generation_pb2.GenerateResponse, send: Send) -> None:
        form, choice = self._form, self._form.choices[index]
        match event.WhichOneof("event"):
            case "delta":
                choice.offset = event.delta.offset + len(event.delta.token_ids)
                part = form.delta(choice, event.delta)
            case "finished":
                choice.finished = event.finished
                part = form.finish(choice, event.finished)
            case _:
                part = form.notice(choice, event.notice)
        await self._send(send, part)

    async def _send(self, send: Send, part: bytes, *, more: bool = True) -> None:
        if not part and more:
            return
        self._sent_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(_READER_TIMEOUT_S):
                await send({"type": "http.response.body", "body": part, "more_body": more})
        except TimeoutError:
            raise _NotRead(f"nothing was read of the stream for {_READER_TIMEOUT_S:g} s") from None

    def _id_headers(self) -> Headers:
        """Return the names of the request, of its session where it names one, and of this orchestrator."""
        first, replica = self._messages[0], self._service.replica
        headers = [(b"x-request-id", first.request_id.encode())]
        if first.session_id:
            headers.append((SESSION.encode(), first.session_id.encode()))
        if replica:
            headers.append((REPLICA.encode(), replica.encode()))
        return headers

    async def _fail(self, send: Send, error: Exception) -> None:
        refusal = as_http(error, self._names)
        if not self._has_begun:
            await send_error(send, refusal, error, self._form.error_body(refusal))
            return
        if not isinstance(error, _NotRead):
            with suppress(_NotRead):
                await self._send(send, self._form.failure(refusal), more=False)
                return
        # Its reader takes nothing: to close the connection in order would wait for it without end.
        self._abort()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, receive: Receive, send: Send, task: "asyncio.Task[None]") -> None:
        """Cancel the response when the client leaves; keep a silent stream alive."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(_KEEP_ALIVE_S):
                    message = await receive()
            except TimeoutError:
                if self._has_begun and self._form.keep_alive and loop.time() - self._sent_s >= _KEEP_ALIVE_S:
                    await self._keep_alive(send)
                continue
            if message["type"] == "http.disconnect":
                self._has_left = True
                task.cancel()
                return

    async def _keep_alive(self, send: Send) -> None:
        try:
            await self._send(send, self._form.keep_alive)
        except _NotRead:
            self._abort()

    async def _events(self) -> AsyncGenerator[_Event, None]:
        """Yield the events of all choices with their numbers."""
        if len(self._messages) == 1:
            async with aclosing(self._generate(self._messages[0])) as events:
                async for event in events:
                    yield 0, event
            return
        async with _merged([self._generate(message) for message in self._messages]) as merged:
            async for numbered in merged:
                yield numbered

    async def _generate(
        self, message: generation_pb2.GenerateRequest
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield the events of a choice; one that is resumed before it ever began begins now."""
        has_events = False
        try:
            async with aclosing(self._service.generate(message, self._metadata, awaits_reasoning=True)) as events:
                async for event in events:
                    has_events = True
                    yield event
            return
        except (SessionNotFound, RequestNotFound) as error:
            has_begun = message.resume_offset or self._form.has_begun
            if has_events or has_begun or not message.HasField("resume_offset"):
                if message.session_id or isinstance(error, RequestNotFound):
                    raise
                # The client named no session, and cannot know of one.
                raise RequestNotFound("there is no such request, or it ended more than 300 s ago") from None
        message.ClearField("resume_offset")
        async with aclosing(self._service.generate(message, self._metadata, awaits_reasoning=True)) as events:
            async for event in events:
                yield event


def _nothing() -> None:
    """Abort a connection that cannot be aborted."""


@asynccontextmanager
async def _merged(
    streams: Sequence[AsyncGenerator[generation_pb2.GenerateResponse, None]],
) -> AsyncIterator[AsyncIterator[_Event]]:
    """Give the events of several streams as they come; the first error ends all. No more than one event each waits."""
    queue: asyncio.Queue[tuple[int, generation_pb2.GenerateResponse | None, Exception | None]] = asyncio.Queue(
        len(streams)
    )

    async def pump(index: int, stream: AsyncGenerator[generation_pb2.GenerateResponse, None]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put((index, event, None))
        except Exception as error:
            await queue.put((index, None, error))
        else:
            await queue.put((index, None, None))

    async def events() -> AsyncIterator[_Event]:
        num_running = len(streams)
        while num_running:
            index, event, error = await queue.get()
            if error is not None:
                raise error
            if event is None:
                num_running -= 1
            else:
                yield index, event

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        yield events()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
