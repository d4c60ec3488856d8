"""An orchestrator in this process, behind its real server, with everything around it real but the workers."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import httpx
from prometheus_client import CollectorRegistry

from orchestrator.api.admission import Admission
from orchestrator.api.quotas import Quotas
from orchestrator.api.service import GenerationService
from orchestrator.api.servicer import GenerationServicer
from orchestrator.api.tenants import Tenants
from orchestrator.gauges import register_gauges
from orchestrator.generation.request import Services
from orchestrator.http.listener import http_listener
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.settings import OrchestratorSettings
from orchestrator.store.store import SessionStore
from orchestrator.store.watch import StoreWatch
from orchestrator.workers.replicas import Replicas
from outrider.serving.metrics import new_registry
from outrider.serving.server import Server
from outrider.serving.status import peer_errors
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc
from tests.orchestrator.scripted import ScriptedDraft, ScriptedTarget

PROMPT = [5, 6, 7]


class Orchestrator:
    """A running orchestrator, and a stub to call it."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        services: Services,
        registry: CollectorRegistry,
        watch: StoreWatch,
    ) -> None:
        self.registry = registry
        self.watch = watch
        self.settings, self.metrics = services.settings, services.metrics
        self.address = address
        self.http_address = ""
        self.redis_url = services.settings.redis_url
        self.replicas, self.store = services.replicas, services.store
        self.stub = generation_pb2_grpc.GenerationServiceStub(channel)

    def http_client(self) -> httpx.AsyncClient:
        """A client of its HTTP API, which reads no authorities' certificates: that takes 40 ms."""
        return httpx.AsyncClient(base_url=f"http://{self.http_address}", timeout=20, verify=False)

    async def events(self, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        """Returns all events of a request; raises the error that ends it."""
        with peer_errors():
            return [event async for event in self.stub.Generate(request, timeout=20)]

    async def session(self, session_id: str) -> pb.GetSessionResponse:
        """Returns a session with its log."""
        with peer_errors():
            return await self.stub.GetSession(pb.GetSessionRequest(session_id=session_id, with_token_ids=True))

    async def until_drafts(self, num: int) -> None:
        """Returns once so many drafts are in rotation."""
        async with asyncio.timeout(10):
            while sum(not self.replicas.draft_problem(link) for link in self.replicas.drafts) != num:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def orchestrating(
    redis_url: str,
    targets: tuple[ScriptedTarget, ...],
    drafts: tuple[ScriptedDraft, ...] = (),
    /,
    *,
    window: int = 16,
    **more: object,
) -> AsyncIterator[Orchestrator]:
    """Runs an orchestrator whose drafts are connected; `more` are further settings, or other places of workers."""
    settings = OrchestratorSettings(
        **{
            "targets": tuple(target.address for target in targets),
            "drafts": tuple(draft.address for draft in drafts),
            "redis_url": redis_url,
            "failover_timeout_s": 2.0,
            "draft_retry_s": 0.1,
            # It polls loads ten times as often.
            "keepalive_s": 1.0,
            "num_speculative_tokens": 3,
            "drain_budget_s": 2.0,
            **more,
        }  # type: ignore[arg-type]
    )
    store = SessionStore(
        redis_url, lease_s=settings.lease_s, ttl_s=settings.session_ttl_s, timeout_s=settings.redis_timeout_s
    )
    replicas = Replicas(settings)
    await replicas.start()
    admission = Admission(settings.max_active_requests, settings.max_queued_requests, settings.max_queue_s)
    tenants, quotas = Tenants(settings.tenants_file), Quotas(store.connection, settings.session_ttl_s)
    registry = new_registry("orchestrator")
    metrics = OrchestratorMetrics(registry)
    register_gauges(registry, admission, replicas)
    services = Services(store, replicas, settings, metrics, window)
    service = GenerationService(services, admission, tenants, quotas)
    watch = StoreWatch(store.connection, period_s=0.05)
    server = Server(
        settings,
        name="orchestrator",
        drain=service.drain,
        is_ready=lambda: watch.takes_writes,
        registry=registry,
        authenticate=tenants.of,
    )
    server.register(
        generation_pb2_grpc.add_GenerationServiceServicer_to_server,
        GenerationServicer(service),
        "outrider.v1.GenerationService",
    )
    if settings.http_address:
        listener = http_listener(settings, service, server.calls, lambda: server.is_ready, registry)
        server.listen(listener)
    await watch.start()
    address = await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            orchestrator = Orchestrator(channel, address, services, registry, watch)
            orchestrator.http_address, orchestrator.server = server.address_of("http_address"), server
            fitting = [
                draft
                for draft in drafts
                if draft.info.tokenizer_fingerprint == "t" and not draft.info.target_fingerprint
            ]
            await orchestrator.until_drafts(len(fitting))
            yield orchestrator
    finally:
        await server.stop()
        await service.settle()
        await watch.stop()
        await replicas.stop()
        await store.close()


def asking(
    prompt: list[int] | None = None,
    *,
    request_id: str = "",
    session_id: str = "",
    resume_offset: int | None = None,
    plain: bool = False,
    **parameters: object,
) -> pb.GenerateRequest:
    """A request for a continuation of token ids, of 20 tokens by default."""
    request = pb.GenerateRequest(request_id=request_id, session_id=session_id, resume_offset=resume_offset)
    request.token_ids.token_ids.extend(PROMPT if prompt is None else prompt)
    request.speculation.disabled = plain
    for name, value in ({"max_tokens": 20} | parameters).items():
        if isinstance(value, list):
            getattr(request.parameters, name).extend(value)
        else:
            setattr(request.parameters, name, value)
    return request


def tokens_of(events: list[pb.GenerateResponse]) -> list[int]:
    """Returns the output's tokens; their offsets must follow each other."""
    tokens: list[int] = []
    start: int | None = None
    for event in events:
        if event.HasField("delta"):
            start = event.delta.offset if start is None else start
            if event.delta.offset != start + len(tokens):
                raise AssertionError(f"offset {event.delta.offset} behind {len(tokens)} tokens from {start}")
            tokens += event.delta.token_ids
    return tokens


async def until(holds: Callable[[], bool], bound_s: float = 20.0) -> None:
    """Returns once something holds."""
    async with asyncio.timeout(bound_s):
        while not holds():
            await asyncio.sleep(0.01)


async def early_in_a_minute() -> None:
    """Returns where what a test does next falls into one minute of Redis's clock, which is this machine's."""
    while time.time() % 60 > 55:
        await asyncio.sleep(0.1)


def text_of(events: list[pb.GenerateResponse]) -> str:
    """Returns the text of all deltas and of the end."""
    return "".join(event.delta.text + event.finished.text for event in events)
