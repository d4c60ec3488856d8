"""What every API for clients calls: requests checked, admitted, leased and generated; sessions read and deleted.

gRPC (`servicer`) and HTTP (`orchestrator.http`) turn their messages into those of generation.proto, and call this.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from opentelemetry.trace import Span, SpanKind

from orchestrator.api.admission import Admission
from orchestrator.api.leasing import Leased, Leasing
from orchestrator.api.quotas import Quotas
from orchestrator.api.requests import CheckedRequest, check_id, check_request
from orchestrator.api.tenants import Tenants
from orchestrator.generation.generation import Generation, accepted_event, finished_event, replayed_event
from orchestrator.generation.parts import PartWriter
from orchestrator.generation.request import RunningRequest, Services, SessionTokens
from orchestrator.store.sessions import BeginOutcome, Begun
from orchestrator.text.output import OutputText
from orchestrator.text.output_parts import OutputParts, Parsing
from orchestrator.workers.model import Model
from outrider import wire
from outrider.errors import DataLoss, InvalidArgument, SessionNotFound
from outrider.serving.interceptor import Metadata
from outrider.serving.spans import TRACER, context_of, log_fields
from outrider.serving.telemetry import add_log_fields
from outrider.v1 import generation_pb2


class GenerationService:
    """Generation and sessions for all tenants.

    Every method takes the metadata of its call, or the headers of its HTTP request, as pairs of a lower-case name and
    a value: they name the tenant. What is called without a known token raises `Unauthenticated` before anything else.

    Args:
        services: store, workers, settings, metrics.
        admission: bounds on the requests of this process.
        tenants: their tokens and limits.
        quotas: counts them.
    """

    def __init__(self, services: Services, admission: Admission, tenants: Tenants, quotas: Quotas) -> None:
        self._services = services
        self._store = services.store
        self._admission = admission
        self._tenants = tenants
        self._quotas = quotas
        self._leasing = Leasing(services.store, services.replicas)
        self._running: dict[tuple[str, str], Generation] = {}

    @property
    def replica(self) -> str:
        """Name of this orchestrator, which responses carry; empty where it has none."""
        return self._services.settings.replica

    async def drain(self) -> None:
        """Admit no further request; running streams continue within the drain budget."""
        self._admission.close()

    async def settle(self) -> None:
        """Return when the leases and the quotas of all streams that have ended are released."""
        await self._leasing.settle()
        await self._quotas.settle()

    async def generate(
        self, message: generation_pb2.GenerateRequest, metadata: Metadata, *, awaits_reasoning: bool = False
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield the events of a request, as generation.proto orders them; close the iterator to leave it resumable.

        Args:
            message: the request.
            metadata: of the call.
            awaits_reasoning: whether a chat's constraint holds from behind the reasoning on that its answer is expected
                to begin with; else from where the constraint itself says.

        Raises:
            OutriderError: the request is refused, or fails.
        """
        span = TRACER.start_span("generate", context_of(_traceparent(metadata)), SpanKind.SERVER)
        add_log_fields(**log_fields(span))
        with self._services.metrics.request(span) as times:
            tenant = self._tenants.of(metadata)
            checked = check_request(message, tenant.name, self._services.settings)
            ids = {"request_id": checked.request_id, "session_id": checked.session_id, "tenant": tenant.name}
            add_log_fields(**ids)
            span.set_attributes({f"outrider.{name}": value for name, value in ids.items()})
            async with (
                self._admission.admit(),
                # Begun before the quota, so that both take one round trip.
                self._leasing.reading(tenant.name, checked.session_id) as reading,
                self._quotas.stream(tenant, checked.counted_session) as usage,
            ):
                times.record_admitted(is_resumed=checked.resume_offset is not None)
                leased = await self._leasing.begin(
                    message, checked, tenant.name, reading, awaits_reasoning=awaits_reasoning
                )
                begun = leased.begun
                if begun.outcome is BeginOutcome.NEW:
                    times.record_begun(begun.record.prompt_len - begun.record.prompt_start)
                # Closed at once, not by the garbage collector: it releases the lease.
                async with aclosing(self._stream(leased, checked, span)) as events:
                    async for event in events:
                        usage.add(len(event.delta.origins))
                        times.record_event(event)
                        yield event

    def authenticate(self, metadata: Metadata) -> None:
        """Raise `Unauthenticated` for a call without a known token."""
        self._tenants.of(metadata)

    async def model(self) -> Model:
        """Return the model of the targets, also while none is in rotation; raise `Unavailable` where none ever was."""
        return self._services.replicas.past_model or await self._services.replicas.model()

    async def tokenize(self, message: generation_pb2.GenerateRequest, model: Model) -> tuple[int, ...]:
        """Return the token ids of a prompt, as a new session would begin with it.

        Raises:
            InvalidArgument: it is empty, cannot be encoded, or fits no session.
            Overloaded: too many prompts wait to be encoded.
        """
        return (await self._leasing.encode(message, model)).token_ids

    async def cancel(self, session_id: str, request_id: str, metadata: Metadata) -> bool:
        """End a running request at its next token; return whether one was running.

        Args:
            session_id: the session.
            request_id: the request; empty for whichever runs.
            metadata: of the call.
        """
        tenant = self._tenants.of(metadata)
        check_id("session_id", session_id)
        if request_id:
            check_id("request_id", request_id)
        cancelled = await self._store.cancel(tenant.name, session_id, request_id)
        running = self._running.get((tenant.name, session_id))
        if cancelled and running is not None and request_id in ("", running.request_id):
            running.cancel()
        return cancelled

    async def session(
        self, session_id: str, metadata: Metadata, *, with_token_ids: bool
    ) -> generation_pb2.GetSessionResponse:
        """Return a session's record; raise `SessionNotFound`."""
        tenant = self._tenants.of(metadata).name
        check_id("session_id", session_id)
        record = await self._store.get(tenant, session_id)
        if record is None:
            raise SessionNotFound("there is no such session")
        response = generation_pb2.GetSessionResponse(
            session_id=record.session_id,
            committed_len=record.committed_len,
            request_id=record.request_id,
            finish_reason=wire.finish_to_number(record.finish_reason),
            prompt_len=record.prompt_len,
            leased=await self._store.is_leased(record),
        )
        response.expire_time.GetCurrentTime()
        lifetime_s = await self._store.expires_in_s(tenant, session_id)
        response.expire_time.seconds += int(lifetime_s)
        if with_token_ids:
            response.token_ids[:] = await self._store.read_tokens(tenant, record.session_id, 0, record.committed_len)
        return response

    async def parsing(self, message: generation_pb2.GenerateRequest) -> Parsing | None:
        """Return how the output of a request is taken apart; None for not at all.

        Raises:
            InvalidArgument: a tool is wrong, or there are too many.
            Overloaded: too many prompts wait to be encoded.
        """
        return await self._leasing.parsing(message)

    async def prompt_end(
        self, message: generation_pb2.GenerateRequest, metadata: Metadata, num_tokens: int
    ) -> Sequence[int]:
        """Return the last tokens of a request's prompt; none where it is not the latest of its session."""
        tenant = self._tenants.of(metadata).name
        checked = check_request(message, tenant, self._services.settings)
        record = await self._store.get(tenant, checked.session_id)
        if record is None or record.request_id != checked.request_id:
            return ()
        start = max(record.prompt_start, record.prompt_len - num_tokens)
        return await self._store.read_tokens(tenant, record.session_id, start, record.prompt_len)

    async def delete_session(self, session_id: str, metadata: Metadata) -> None:
        """Delete a session, its log and its KV caches; raise `SessionNotFound`."""
        tenant = self._tenants.of(metadata)
        check_id("session_id", session_id)
        self._services.replicas.forget_session(await self._store.delete(tenant.name, session_id))
        await self._quotas.forget(tenant, session_id)

    def models(self, metadata: Metadata) -> generation_pb2.ListModelsResponse:
        """Return the workers, those out of rotation too."""
        self._tenants.of(metadata)
        return generation_pb2.ListModelsResponse(
            workers=self._services.replicas.statuses(),
            default_num_speculative_tokens=self._services.settings.num_speculative_tokens,
        )

    async def _stream(
        self, leased: Leased, checked: CheckedRequest, span: Span
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        begun, record = leased.begun, leased.begun.record
        generation: Generation | None = None
        try:
            output = _output(leased)
            replay = begun.token_ids[record.prompt_len - record.prompt_start :]
            offset = checked.resume_offset or 0
            if offset > len(replay):
                problem = f"resume_offset is {offset}, the output has {len(replay)} tokens"
                # The store may have lost tokens that a client of a running request has received.
                raise InvalidArgument(problem, "resume_offset") if begun.lease is None else DataLoss(problem)
            if leased.prediction is not None:
                leased.prediction.follow(replay)
            generation = self._generation(leased, checked, output, span)
            yield accepted_event(record)
            parts = PartWriter(record.request_id)
            stopped, delta = replayed_event(output, replay, offset, parts)
            if delta is not None:
                yield delta
            if generation is None:
                yield finished_event(record, output.finish(stopped=stopped), parts)
                return
            self._running[record.tenant, record.session_id] = generation
            async with aclosing(generation.events()) as events:
                async for event in events:
                    yield event
        finally:
            self._close(begun, generation)

    def _generation(self, leased: Leased, checked: CheckedRequest, output: OutputText, span: Span) -> Generation | None:
        """Return the generation of a request that has begun; None for one that had finished before."""
        begun, record = leased.begun, leased.begun.record
        if begun.lease is None:
            return None
        running = RunningRequest(
            record,
            begun.lease,
            SessionTokens(self._store, record, record.prompt_start, begun.token_ids),
            checked.speculation,
            leased.model.stop_token_ids(record.parameters),
            checked.reports,
            span,
            leased.prediction,
        )
        return Generation(self._services, running, output)

    def _close(self, begun: Begun, generation: Generation | None) -> None:
        if generation is not None:
            # A later request of the session may be running already.
            key = begun.record.tenant, begun.record.session_id
            if self._running.get(key) is generation:
                del self._running[key]
            task = generation.close()
        elif begun.lease is not None:
            task = asyncio.create_task(self._store.release(begun.lease))
        else:
            task = None
        if task is not None:
            self._leasing.keep(task)


def _output(leased: Leased) -> OutputText:
    """Return the text of a request's output, before any of its tokens."""
    record, model = leased.begun.record, leased.model
    parts: OutputParts | None = None
    if leased.parsing is not None and model.tokenizer is not None:
        prompt = leased.begun.token_ids[: record.prompt_len - record.prompt_start]
        parts = OutputParts(model.tokenizer, leased.parsing, prompt, model.stop_token_ids(record.parameters))
    return OutputText(model.tokenizer, record.parameters, parts)


def _traceparent(metadata: Metadata) -> str:
    """Return the trace context of a call; empty without one."""
    return next((str(value) for key, value in metadata or () if key == "traceparent"), "")
