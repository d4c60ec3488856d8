"""Starts a draft: `python -m draft_service --help`."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

from draft_service.engine.engine import Engine
from draft_service.engine.load import EngineLimits
from draft_service.metrics import watch
from draft_service.servicer import DraftServicer
from draft_service.settings import DraftSettings
from draft_service.worker import WorkerIdentity, WorkerServicer
from outrider.drafters.loading import load_drafter
from outrider.serving.metrics import new_registry
from outrider.serving.server import Server, begin_loading, run_process, tune_interpreter
from outrider.serving.settings import load_settings
from outrider.serving.spans import export_spans
from outrider.serving.telemetry import configure_logging
from outrider.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server
from outrider.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server

_DRAIN_SHARE = 0.5
"""Share of the drain's budget in which open sessions may end: losing their draft costs them speed only."""

_MAX_STEP_S = 60.0
"""Seconds in one step after which the liveness check fails. A step is one pass of a small model."""


async def serve(settings: DraftSettings) -> None:
    """Load the drafter, then serve until SIGTERM."""
    begin_loading()
    loop = asyncio.get_running_loop()
    # In a thread that ends, so that the engine's is the only one for which OpenMP keeps workers.
    with ThreadPoolExecutor(max_workers=1) as loader:
        drafter = await loop.run_in_executor(loader, load_drafter, settings)
    tune_interpreter()
    end_export = export_spans(settings.otlp_endpoint, "draft")
    # Without its engine the process can only delay sessions: it ends at once, with the exit status of a failure.
    engine = Engine(drafter, _limits(settings), lambda: os._exit(os.EX_SOFTWARE))
    registry = new_registry("draft")
    watch(registry, engine, settings)
    servicer = DraftServicer(engine.loop, drafter.info)
    drain_s = _DRAIN_SHARE * settings.drain_budget_s
    server = Server(
        settings,
        name="draft",
        drain=lambda: servicer.drain(drain_s),
        is_live=lambda: engine.loop.is_alive and engine.loop.busy_s < _MAX_STEP_S,
        is_ready=lambda: engine.load.num_active_sessions < settings.max_sessions,
        registry=registry,
    )
    server.register(add_DraftServiceServicer_to_server, servicer, "outrider.v1.DraftService")
    worker = WorkerServicer(engine, drafter.info, _identity(settings))
    server.register(add_WorkerServiceServicer_to_server, worker, "outrider.v1.WorkerService")
    engine.loop.start()
    try:
        await server.run()
    finally:
        engine.loop.stop()
        await asyncio.to_thread(end_export)


def main() -> None:
    """Read the settings and serve."""
    settings = load_settings(DraftSettings, program="python -m draft_service")
    configure_logging(service="draft", level=settings.log_level, form=settings.log_format)
    run_process(serve(settings))


def _limits(settings: DraftSettings) -> EngineLimits:
    return EngineLimits(
        max_sessions=settings.max_sessions,
        max_cached_sessions=settings.max_cached_sessions,
        idle_ttl_s=settings.idle_ttl_s,
    )


def _identity(settings: DraftSettings) -> WorkerIdentity:
    return WorkerIdentity(
        replica=settings.replica_name,
        max_sessions=settings.max_sessions,
        kv_budget_bytes=settings.kv_budget_bytes,
    )


if __name__ == "__main__":
    main()
