"""The process of an orchestrator: `python -m orchestrator --help`."""

import asyncio
import os

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
from outrider.serving.server import Server, run_process
from outrider.serving.settings import load_settings
from outrider.serving.spans import export_spans
from outrider.serving.telemetry import configure_logging
from outrider.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server


async def serve(settings: OrchestratorSettings) -> None:
    """Serve until SIGTERM."""
    store = SessionStore(
        settings.redis_url,
        lease_s=settings.lease_s,
        ttl_s=settings.session_ttl_s,
        timeout_s=settings.redis_timeout_s,
        durability=settings.durable,
    )
    tenants = Tenants(settings.tenants_file)
    replicas = Replicas(settings)
    admission = Admission(settings.max_active_requests, settings.max_queued_requests, settings.max_queue_s)
    quotas = Quotas(store.connection, settings.session_ttl_s)
    registry = new_registry("orchestrator")
    metrics = OrchestratorMetrics(registry)
    register_gauges(registry, admission, replicas)
    end_export = export_spans(settings.otlp_endpoint, "orchestrator")
    service = GenerationService(Services(store, replicas, settings, metrics), admission, tenants, quotas)
    watch = StoreWatch(store.connection)
    server = Server(
        settings,
        name="orchestrator",
        drain=service.drain,
        is_ready=lambda: watch.takes_writes,
        # A full orchestrator stays ready: it answers OVERLOADED with the time after which to retry.
        registry=registry,
        authenticate=tenants.of,
    )
    server.register(
        add_GenerationServiceServicer_to_server, GenerationServicer(service), "outrider.v1.GenerationService"
    )
    if settings.http_address:
        server.listen(http_listener(settings, service, server.calls, lambda: server.is_ready, registry))
    try:
        await watch.start()
        await replicas.start()
        await server.run()
    finally:
        await service.settle()
        await watch.stop()
        await replicas.stop()
        await store.close()
        await asyncio.to_thread(end_export)


def main() -> None:
    """Read the settings and serve."""
    settings = load_settings(OrchestratorSettings, program="python -m orchestrator")
    # The threads of orchestrator.api.encoding_threads encode; the library must not start one for each core in addition.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    configure_logging(service="orchestrator", level=settings.log_level, form=settings.log_format)
    run_process(serve(settings))


if __name__ == "__main__":
    main()
