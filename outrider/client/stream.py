"""A generation as one unbroken stream of events, over as many connections as it takes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from grpc import aio
from opentelemetry.trace import Span

from outrider.client.events import Accepted, Delta, Event, Finished, event_from_message
from outrider.client.request import GenerationRequest
from outrider.client.retry import Attempts, is_transient
from outrider.errors import DataLoss, OutriderError, RequestNotFound, SessionBusy, SessionNotFound, Unavailable
from outrider.serving.status import error_from_rpc

if TYPE_CHECKING:
    from outrider.v1.generation_pb2_grpc import GenerationServiceAsyncStub


class ResumableStream:
    """Run one request to its end and yield every event once, whatever happens to the connections.

    A connection that breaks is followed by one to the next address, which continues at the number of tokens already
    received. The service guarantees that text from an offset continues exactly, so nothing is repeated or lost.
    """

    def __init__(
        self,
        request: GenerationRequest,
        next_stub: Callable[[], GenerationServiceAsyncStub],
        attempts: Attempts,
        metadata: tuple[tuple[str, str], ...],
        span: Span,
    ) -> None:
        self._message = request.to_message()
        self._next_stub = next_stub
        self._attempts = attempts
        self._metadata = metadata
        self._span = span
        self._accepted: Accepted | None = None
        self._num_tokens = request.resume_offset or 0
        self._is_ambiguous = False

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield `Accepted`, then deltas, then `Finished`; raise the `OutriderError` of the last attempt."""
        while True:
            try:
                async with aclosing(self._attempt()) as events:
                    async for event in events:
                        yield event
                        if isinstance(event, Finished):
                            return
                raise Unavailable("the stream ended without a terminal event")
            except OutriderError as error:
                await self._recover(error)

    async def _attempt(self) -> AsyncGenerator[Event, None]:
        call = self._next_stub().Generate(
            self._message, timeout=self._attempts.deadline.remaining_s, metadata=self._metadata
        )
        try:
            async for message in call:
                event = self._checked(event_from_message(message))
                if event is not None:
                    yield event
        except aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        finally:
            # A consumer that stops early must not leave the service generating.
            call.cancel()

    def _checked(self, event: Event) -> Event | None:
        """Return the event to yield, None for a repeated acceptance; update the resume offset."""
        match event:
            case Accepted():
                return self._first_acceptance(event)
            case Delta():
                self._count(event)
            case Finished() if event.num_output_tokens != self._num_tokens:
                raise DataLoss(
                    f"the request ended at {event.num_output_tokens} tokens, {self._num_tokens} were received"
                )
        return event

    def _first_acceptance(self, event: Accepted) -> Accepted | None:
        is_first = self._accepted is None
        self._accepted = event
        self._message.resume_offset = self._num_tokens
        return event if is_first else None

    def _count(self, delta: Delta) -> None:
        if delta.offset != self._num_tokens:
            raise DataLoss(f"the stream jumped to token {delta.offset}, {self._num_tokens} were received")
        self._num_tokens += len(delta.token_ids)
        self._message.resume_offset = self._num_tokens
        self._attempts.progressed()

    async def _recover(self, error: OutriderError) -> None:
        may_be_ours = self._accepted is None and self._is_ambiguous and self._reinterpret(error)
        await self._attempts.failed(error, retry=may_be_ours or is_transient(error))
        self._span.add_event("retry", {"outrider.reason": error.reason, "outrider.num_tokens": self._num_tokens})
        self._is_ambiguous = True

    def _reinterpret(self, error: OutriderError) -> bool:
        """Return whether a refusal may concern this very request, begun by an earlier attempt whose reply was lost.

        SESSION_BUSY is then most likely that request, held by an orchestrator that is gone: resuming at offset 0 takes
        it over. If there is no such request, another one is running or this one never began: send it as a new one.
        """
        resumes = self._message.HasField("resume_offset")
        if isinstance(error, SessionBusy) and not resumes:
            self._message.resume_offset = 0
            return True
        if isinstance(error, (RequestNotFound, SessionNotFound)) and resumes:
            self._message.ClearField("resume_offset")
            return True
        return False
