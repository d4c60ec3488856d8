"""GenerationService: what clients call."""

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
from orchestrator.generation.generation import Generation, Services
from orchestrator.generation.replay import accepted, ended, replayed
from orchestrator.generation.session_tokens import SessionTokens
from orchestrator.store.sessions import BeginOutcome, Begun
from orchestrator.text.output import OutputText
from orchestrator.workers.model import Model
from outrider import wire
from outrider.errors import DataLoss, InvalidArgument, SessionNotFound
from outrider.serving.spans import TRACER, context_of, log_fields
from outrider.serving.telemetry import add_log_fields
from outrider.v1 import generation_pb2, generation_pb2_grpc


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves clients; see proto/outrider/v1/generation.proto."""

    def __init__(self, services: Services, admission: Admission, tenants: Tenants, quotas: Quotas) -> None:
        self._services = services
        self._store = services.store
        self._admission = admission
        self._tenants = tenants
        self._quotas = quotas
        self._leasing = Leasing(services.store, services.replicas)
        self._running: dict[tuple[str, str], Generation] = {}

    async def drain(self) -> None:
        """Admits nothing more; running streams go on within the drain budget."""
        self._admission.close()

    async def settle(self) -> None:
        """Returns when the leases of all streams that have ended are given back, and their tenants' places."""
        await self._leasing.settle()
        await self._quotas.settle()

    async def Generate(
        self,
        request: generation_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse],
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Streams a continuation."""
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
                self._admission.turn(),
                # Ahead of the quota, so that both are one round trip.
                self._leasing.looking(tenant.name, checked.session_id) as looking,
                self._quotas.stream(tenant, checked.session_id) as usage,
            ):
                times.admitted(is_resumed=checked.resume_offset is not None)
                begun, model = await self._leasing.begin(request, checked, tenant.name, looking)
                if begun.outcome is BeginOutcome.NEW:
                    times.begun(begun.record.prompt_len - begun.record.prompt_start)
                # Closed here and now, not when the garbage collector finds it: the lease waits for it.
                async with aclosing(self._stream(begun, checked, model, span)) as events:
                    async for event in events:
                        usage.add(len(event.delta.origins))
                        times.event(event)
                        yield event

    async def CancelGeneration(
        self,
        request: generation_pb2.CancelGenerationRequest,
        context: grpc.aio.ServicerContext[
            generation_pb2.CancelGenerationRequest, generation_pb2.CancelGenerationResponse
        ],
    ) -> generation_pb2.CancelGenerationResponse:
        """Ends a running request."""
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
        """Returns a session's record."""
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
        """Deletes a session."""
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
        """Returns the workers."""
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
                # Of a request that has not ended the store may have lost tokens that the client has been given.
                raise InvalidArgument(problem, "resume_offset") if begun.lease is None else DataLoss(problem)
            if begun.lease is not None:
                generation = Generation(
                    self._services,
                    record,
                    begun.lease,
                    SessionTokens(self._store, record, record.prompt_start, begun.token_ids),
                    output,
                    checked.speculation,
                    model.stop_token_ids(record.parameters),
                    span,
                )
            yield accepted(record)
            stopped, delta = replayed(output, replay, offset)
            if delta is not None:
                yield delta
            if generation is None:
                yield ended(record, output.finish(stopped=stopped))
                return
            self._running[record.tenant, record.session_id] = generation
            async with aclosing(generation.events()) as events:
                async for event in events:
                    yield event
        finally:
            self._close(begun, generation)

    def _close(self, begun: Begun, generation: Generation | None) -> None:
        if generation is not None:
            # A later request of the session may run here already.
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
    """Returns the trace context that a call came with; empty where it came with none."""
    return next((str(value) for key, value in metadata or () if key == "traceparent"), "")
