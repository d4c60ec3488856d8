"""The servicer of GenerationService, the API for clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing

import grpc
from opentelemetry.trace import Span, SpanKind

from orchestrator.api.admission import Admission
from orchestrator.api.leasing import Leasing
from orchestrator.api.quotas import Quotas
from orchestrator.api.requests import CheckedRequest, check_id, check_request
from orchestrator.api.tenants import Tenants
from orchestrator.generation.generation import Generation, accepted_event, finished_event, replayed_event
from orchestrator.generation.request import RunningRequest, Services, SessionTokens
from orchestrator.store.sessions import BeginOutcome, Begun
from orchestrator.text.output import OutputText
from orchestrator.workers.model import Model
from outrider import wire
from outrider.errors import DataLoss, InvalidArgument, SessionNotFound
from outrider.serving.spans import TRACER, context_of, log_fields
from outrider.serving.telemetry import add_log_fields
from outrider.v1 import generation_pb2, generation_pb2_grpc


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """GenerationService; see proto/outrider/v1/generation.proto."""

    def __init__(self, services: Services, admission: Admission, tenants: Tenants, quotas: Quotas) -> None:
        self._services = services
        self._store = services.store
        self._admission = admission
        self._tenants = tenants
        self._quotas = quotas
        self._leasing = Leasing(services.store, services.replicas)
        self._running: dict[tuple[str, str], Generation] = {}

    async def drain(self) -> None:
        """Admit no further request; running streams continue within the drain budget."""
        self._admission.close()

    async def settle(self) -> None:
        """Return when the leases and the quotas of all streams that have ended are released."""
        await self._leasing.settle()
        await self._quotas.settle()

    async def Generate(
        self,
        request: generation_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse],
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Stream a continuation."""
        metadata = context.invocation_metadata()
        span = TRACER.start_span("generate", context_of(_traceparent(metadata)), SpanKind.SERVER)
        add_log_fields(**log_fields(span))
        with self._services.metrics.request(span) as times:
            tenant = self._tenants.of(metadata)
            checked = check_request(request, tenant.name, self._services.settings)
            ids = {"request_id": checked.request_id, "session_id": checked.session_id, "tenant": tenant.name}
            add_log_fields(**ids)
            span.set_attributes({f"outrider.{name}": value for name, value in ids.items()})
            async with (
                self._admission.admit(),
                # Begun before the quota, so that both take one round trip.
                self._leasing.reading(tenant.name, checked.session_id) as reading,
                self._quotas.stream(tenant, checked.session_id) as usage,
            ):
                times.record_admitted(is_resumed=checked.resume_offset is not None)
                begun, model = await self._leasing.begin(request, checked, tenant.name, reading)
                if begun.outcome is BeginOutcome.NEW:
                    times.record_begun(begun.record.prompt_len - begun.record.prompt_start)
                # Closed at once, not by the garbage collector: it releases the lease.
                async with aclosing(self._stream(begun, checked, model, span)) as events:
                    async for event in events:
                        usage.add(len(event.delta.origins))
                        times.record_event(event)
                        yield event

    async def CancelGeneration(
        self,
        request: generation_pb2.CancelGenerationRequest,
        context: grpc.aio.ServicerContext[
            generation_pb2.CancelGenerationRequest, generation_pb2.CancelGenerationResponse
        ],
    ) -> generation_pb2.CancelGenerationResponse:
        """Cancel a running request."""
        tenant = self._tenants.of(context.invocation_metadata())
        check_id("session_id", request.session_id)
        if request.request_id:
            check_id("request_id", request.request_id)
        cancelled = await self._store.cancel(tenant.name, request.session_id, request.request_id)
        running = self._running.get((tenant.name, request.session_id))
        if cancelled and running is not None and request.request_id in ("", running.request_id):
            running.cancel()
        return generation_pb2.CancelGenerationResponse(cancelled=cancelled)

    async def GetSession(
        self,
        request: generation_pb2.GetSessionRequest,
        context: grpc.aio.ServicerContext[generation_pb2.GetSessionRequest, generation_pb2.GetSessionResponse],
    ) -> generation_pb2.GetSessionResponse:
        """Return a session's record."""
        tenant = self._tenants.of(context.invocation_metadata()).name
        check_id("session_id", request.session_id)
        record = await self._store.get(tenant, request.session_id)
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
        lifetime_s = await self._store.expires_in_s(tenant, request.session_id)
        response.expire_time.seconds += int(lifetime_s)
        if request.with_token_ids:
            response.token_ids[:] = await self._store.read_tokens(tenant, record.session_id, 0, record.committed_len)
        return response

    async def DeleteSession(
        self,
        request: generation_pb2.DeleteSessionRequest,
        context: grpc.aio.ServicerContext[generation_pb2.DeleteSessionRequest, generation_pb2.DeleteSessionResponse],
    ) -> generation_pb2.DeleteSessionResponse:
        """Delete a session."""
        tenant = self._tenants.of(context.invocation_metadata())
        check_id("session_id", request.session_id)
        self._services.replicas.forget_session(await self._store.delete(tenant.name, request.session_id))
        await self._quotas.forget(tenant, request.session_id)
        return generation_pb2.DeleteSessionResponse()

    async def ListModels(
        self,
        request: generation_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[generation_pb2.ListModelsRequest, generation_pb2.ListModelsResponse],
    ) -> generation_pb2.ListModelsResponse:
        """Return the workers."""
        self._tenants.of(context.invocation_metadata())
        return generation_pb2.ListModelsResponse(
            workers=self._services.replicas.statuses(),
            default_num_speculative_tokens=self._services.settings.num_speculative_tokens,
        )

    async def _stream(
        self, begun: Begun, checked: CheckedRequest, model: Model, span: Span
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        record = begun.record
        generation: Generation | None = None
        try:
            output = OutputText(model.tokenizer, record.parameters)
            replay = begun.token_ids[record.prompt_len - record.prompt_start :]
            offset = checked.resume_offset or 0
            if offset > len(replay):
                problem = f"resume_offset is {offset}, the output has {len(replay)} tokens"
                # The store may have lost tokens that a client of a running request has received.
                raise InvalidArgument(problem, "resume_offset") if begun.lease is None else DataLoss(problem)
            generation = self._generation(begun, checked, model, output, span)
            yield accepted_event(record)
            stopped, delta = replayed_event(output, replay, offset)
            if delta is not None:
                yield delta
            if generation is None:
                yield finished_event(record, output.finish(stopped=stopped))
                return
            self._running[record.tenant, record.session_id] = generation
            async with aclosing(generation.events()) as events:
                async for event in events:
                    yield event
        finally:
            self._close(begun, generation)

    def _generation(
        self, begun: Begun, checked: CheckedRequest, model: Model, output: OutputText, span: Span
    ) -> Generation | None:
        """Return the generation of a request that has begun; None for one that had finished before."""
        record = begun.record
        if begun.lease is None:
            return None
        running = RunningRequest(
            record,
            begun.lease,
            SessionTokens(self._store, record, record.prompt_start, begun.token_ids),
            checked.speculation,
            model.stop_token_ids(record.parameters),
            span,
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


def _traceparent(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the trace context of a call; empty without one."""
    return next((str(value) for key, value in metadata or () if key == "traceparent"), "")
