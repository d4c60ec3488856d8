"""GenerationService: what clients call."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing

import grpc
from opentelemetry.trace import Span, SpanKind

from orchestrator.admission import Admission
from orchestrator.encoding import EncodingThreads
from orchestrator.generation import Generation, Services
from orchestrator.links import WorkerLink
from orchestrator.output import OutputText
from orchestrator.prompts import PromptTerms, check_prompt, prompt_tokens
from orchestrator.quotas import Quotas
from orchestrator.requests import CheckedRequest, check_id, check_request
from orchestrator.session_tokens import SessionTokens
from orchestrator.sessions import BeginOutcome, Begun, NewRequest, SessionRecord
from orchestrator.tenants import Tenants
from orchestrator.tokenizer import Tokenizer
from outrider import wire
from outrider.errors import DataLoss, InvalidArgument, OutriderError, SessionNotFound, Unavailable
from outrider.serving.spans import TRACER, context_of, log_fields
from outrider.serving.telemetry import add_log_fields
from outrider.v1 import generation_pb2, generation_pb2_grpc, worker_pb2


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves clients; see proto/outrider/v1/generation.proto."""

    def __init__(self, services: Services, admission: Admission, tenants: Tenants, quotas: Quotas) -> None:
        self._services = services
        self._store = services.store
        self._admission = admission
        self._tenants = tenants
        self._quotas = quotas
        self._encoding = EncodingThreads()
        self._running: dict[tuple[str, str], Generation] = {}
        self._releases: set[asyncio.Task[None]] = set()

    async def drain(self) -> None:
        """Admits nothing more; running streams go on within the drain budget."""
        self._admission.close()

    async def settle(self) -> None:
        """Returns when the leases of all streams that have ended are given back, and their tenants' places."""
        self._encoding.close()
        await asyncio.gather(*self._releases, return_exceptions=True)
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
            async with self._admission.turn(), self._quotas.stream(tenant, checked.session_id) as usage:
                times.admitted(is_resumed=checked.resume_offset is not None)
                link = await self._services.replicas.target("")
                tokenizer = await self._services.replicas.tokenizer(link)
                begun = await self._begin(request, checked, tenant.name, link, tokenizer)
                if begun.outcome is BeginOutcome.NEW:
                    times.begun(begun.record.prompt_len - begun.record.prompt_start)
                # Closed here and now, not when the garbage collector finds it: the lease waits for it.
                async with aclosing(self._stream(begun, checked, link, tokenizer, span)) as events:
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

    async def _begin(
        self,
        request: generation_pb2.GenerateRequest,
        checked: CheckedRequest,
        tenant: str,
        link: WorkerLink,
        tokenizer: Tokenizer | None,
    ) -> Begun:
        info = _info(link)
        checked.parameters.check_vocabulary(info.vocabulary_size)
        # The default is not held against a small model: the end of the context ends the output anyway.
        if request.parameters.HasField("max_tokens") and checked.parameters.max_tokens > info.max_session_len:
            raise InvalidArgument(
                f"max_tokens is {checked.parameters.max_tokens}, sessions have at most {info.max_session_len} tokens",
                "max_tokens",
            )
        OutputText(tokenizer, checked.parameters)
        record = await self._store.get(tenant, checked.session_id)
        is_known = record is not None and record.request_id == checked.request_id
        prompt: tuple[int, ...] = ()
        if not is_known and checked.resume_offset is None:
            terms = PromptTerms(
                tokenizer=tokenizer,
                vocabulary_size=info.vocabulary_size,
                # The output needs one.
                max_tokens=max(0, info.max_session_len - (record.committed_len if record else 0) - 1),
                continues=record is not None,
                last_token=await self._last_token(record),
            )
            num_chars = check_prompt(request, terms)
            prompt = await self._encoding.run(num_chars, functools.partial(prompt_tokens, request, terms))
        return await self._leased(
            NewRequest(
                tenant=tenant,
                session_id=checked.session_id,
                request_id=checked.request_id,
                fingerprint=checked.fingerprint,
                model=info.model_fingerprint,
                tokenizer=info.tokenizer_fingerprint,
                parameters=checked.parameters,
                rule=checked.rule,
                prompt=prompt,
                expected_len=record.committed_len if record else 0,
                takes_over=checked.resume_offset is not None,
                must_exist=checked.resume_offset is not None or is_known,
                max_len=info.max_session_len,
            )
        )

    async def _leased(self, request: NewRequest) -> Begun:
        """Begins the request; the lease of a caller that is cancelled meanwhile is given back."""
        beginning = asyncio.create_task(self._store.begin(request))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            self._keep(asyncio.create_task(self._give_back(beginning)))
            raise

    async def _give_back(self, beginning: asyncio.Task[Begun]) -> None:
        with contextlib.suppress(OutriderError):
            if (lease := (await beginning).lease) is not None:
                await self._store.release(lease)

    async def _last_token(self, record: SessionRecord | None) -> int | None:
        if record is None or record.committed_len == 0:
            return None
        length = record.committed_len
        tokens = await self._store.read_tokens(record.tenant, record.session_id, length - 1, length)
        return tokens[0] if tokens else None

    async def _stream(
        self, begun: Begun, checked: CheckedRequest, link: WorkerLink, tokenizer: Tokenizer | None, span: Span
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        record = begun.record
        generation: Generation | None = None
        try:
            tokens = await self._store.read_tokens(
                record.tenant, record.session_id, record.prompt_start, record.committed_len
            )
            output = OutputText(tokenizer, record.parameters)
            replay = tokens[record.prompt_len - record.prompt_start :]
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
                    SessionTokens(self._store, record, record.prompt_start, tokens),
                    output,
                    checked.speculation,
                    _stop_token_ids(record, _info(link)),
                    span,
                )
            yield _accepted(record)
            stopped, delta = _replayed(output, replay, offset)
            if delta is not None:
                yield delta
            if generation is None:
                yield _ended(record, output.finish(stopped=stopped))
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
            self._keep(task)

    def _keep(self, release: asyncio.Task[None]) -> None:
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)


def _traceparent(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Returns the trace context that a call came with; empty where it came with none."""
    return next((str(value) for key, value in metadata or () if key == "traceparent"), "")


def _info(link: WorkerLink) -> worker_pb2.GetInfoResponse:
    if link.info is None:
        raise Unavailable(f"{link.address}: {link.problem}")
    return link.info


def _stop_token_ids(record: SessionRecord, info: worker_pb2.GetInfoResponse) -> tuple[int, ...]:
    eos = () if record.parameters.ignore_eos else tuple(info.eos_token_ids)
    return tuple(sorted({*record.parameters.stop_token_ids, *eos}))


def _accepted(record: SessionRecord) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        accepted=generation_pb2.Accepted(
            request_id=record.request_id,
            session_id=record.session_id,
            seed=record.parameters.seed or 0,
            num_prompt_tokens=record.prompt_len - record.prompt_start,
            session_len=record.prompt_start,
        )
    )


def _replayed(
    output: OutputText, token_ids: list[int], offset: int
) -> tuple[bool, generation_pb2.GenerateResponse | None]:
    """Absorbs committed output; returns whether a stop string ended it, and what the client does not have yet."""
    stopped = output.absorb(token_ids[:offset]).stopped
    rest = output.absorb(token_ids[offset:])
    if offset == len(token_ids):
        return stopped, None
    delta = generation_pb2.Delta(offset=offset, token_ids=token_ids[offset:], text=rest.text)
    return stopped or rest.stopped, generation_pb2.GenerateResponse(delta=delta)


def _ended(record: SessionRecord, text: str) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        finished=generation_pb2.Finished(
            finish_reason=wire.finish_to_number(record.finish_reason),
            num_output_tokens=record.committed_len - record.prompt_len,
            text=text,
            statistics=generation_pb2.GenerationStatistics(),
        )
    )
