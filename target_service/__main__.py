"""Starts a target: `python -m target_service --help`."""

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Callable
from typing import Any, Final

from outrider.serving.metrics import new_registry
from outrider.serving.server import Server, begin_loading, run_process, tune_interpreter
from outrider.serving.settings import load_settings
from outrider.serving.spans import export_spans
from outrider.serving.telemetry import configure_logging
from outrider.v1.target_pb2_grpc import add_TargetServiceServicer_to_server
from outrider.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from target_service.frontend import Frontend
from target_service.loaded_engine import LoadedEngine
from target_service.metrics import watch
from target_service.servicer import TargetServicer
from target_service.settings import EngineKind, TargetSettings
from target_service.worker import TargetWorkerServicer

_HAND_OVER_SHARE: Final = 0.5
"""Share of the drain budget after which sessions that have not ended go on at another target."""
_MAX_PASS_S: Final = 600.0
"""Seconds in one pass after which the liveness check fails. The first pass may compile the model."""


async def serve(settings: TargetSettings) -> None:
    """Load the engine, then serve until SIGTERM, or run a part of the model for the process that serves."""
    loaded = await load_engine(settings)
    tune_interpreter()
    if isinstance(loaded, LoadedEngine):
        await lead(loaded, settings)
    else:
        loaded()


async def load_engine(settings: TargetSettings) -> LoadedEngine[Any] | Callable[[], None]:
    """Return the engine that the settings choose; see `own_engine.load`. Only that engine's modules are imported."""
    if settings.engine is EngineKind.VLLM:
        from target_service.vllm_engine import loading

        return await loading.load(settings)
    # Not for vLLM: workers that it forks would never collect any.
    begin_loading()
    from target_service import own_engine

    return await own_engine.load(settings)


async def lead(loaded: LoadedEngine[Any], settings: TargetSettings) -> None:
    """Serve an engine that is loaded."""
    end_export = export_spans(settings.otlp_endpoint, "target")
    # Without its engine the process can only delay sessions: once it has ended, they go on at another target.
    frontend = Frontend(loaded.engine, settings.max_sessions, lambda: os._exit(os.EX_SOFTWARE))
    registry = new_registry("target")
    watch(registry, loaded.engine, settings.max_sessions)
    for collector in loaded.collectors:
        registry.register(collector)
    frontend.start()
    max_len = loaded.identity.max_session_len
    target = TargetServicer(frontend, max_len, hand_over_after_s=_HAND_OVER_SHARE * settings.drain_budget_s)
    server = Server(
        settings,
        name="target",
        drain=target.drain,
        is_live=lambda: frontend.loop.is_alive and frontend.loop.busy_s < _MAX_PASS_S,
        is_ready=lambda: frontend.num_sessions < settings.max_sessions,
        registry=registry,
    )
    worker = TargetWorkerServicer(
        loaded.engine,
        frontend,
        loaded.identity,
        settings.max_sessions,
        settings.replica_name,
        secrets.token_hex(8),
    )
    server.register(add_TargetServiceServicer_to_server, target, "outrider.v1.TargetService")
    server.register(add_WorkerServiceServicer_to_server, worker, "outrider.v1.WorkerService")
    try:
        await server.run()
    finally:
        frontend.loop.stop()
        await asyncio.to_thread(end_export)
        loaded.close()


def main() -> None:
    """Read the settings and serve."""
    settings = load_settings(TargetSettings, program="python -m target_service")
    configure_logging(service="target", level=settings.log_level, form=settings.log_format)
    run_process(serve(settings))
    if settings.engine is EngineKind.VLLM:
        # The interpreter would take seconds to tear down vLLM's modules, of the time that a pod has to end.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(os.EX_OK)


if __name__ == "__main__":
    main()
