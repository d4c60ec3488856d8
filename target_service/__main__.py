"""Starts a target: `python -m target_service --help`."""

import asyncio
import functools
import os
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor

import torch

from outrider.lm.loading import load_model
from outrider.serving.server import Server, favour_engine, run_process
from outrider.serving.settings import load_settings
from outrider.serving.telemetry import configure_logging
from outrider.v1.target_pb2_grpc import add_TargetServiceServicer_to_server
from outrider.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from target_service.engine import Engine
from target_service.servicer import TargetServicer, TargetWorkerServicer
from target_service.settings import TargetSettings


async def serve(settings: TargetSettings) -> None:
    """Loads the model, then serves until SIGTERM."""
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    # In a thread that ends: OpenMP keeps workers for every thread that ever computed, and with more workers than cores
    # they stop spinning between operations, which doubled the time of a pass (18 to 33 ms on 2 cores).
    with ThreadPoolExecutor(max_workers=1) as loader:
        load = functools.partial(
            load_model,
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            quantization=settings.quantization,
            kv_budget_bytes=settings.kv_budget_bytes,
            compiles=settings.compile,
        )
        loaded = await asyncio.get_running_loop().run_in_executor(loader, load)
    favour_engine()
    # Without its engine the process can only hold sessions up: gone at once, they go on elsewhere.
    engine = Engine(loaded.model, settings, on_failure=lambda: os._exit(os.EX_SOFTWARE))
    engine.start()
    target = TargetServicer(engine)
    server = Server(settings, name="target", drain=target.drain)
    replica = settings.replica or f"{socket.gethostname()}-{os.getpid()}"
    worker = TargetWorkerServicer(engine, loaded, settings, replica, secrets.token_hex(8))
    server.register(add_TargetServiceServicer_to_server, target, "outrider.v1.TargetService")
    server.register(add_WorkerServiceServicer_to_server, worker, "outrider.v1.WorkerService")
    await server.run()
    engine.stop()


def main() -> None:
    """Reads the settings and serves."""
    settings = load_settings(TargetSettings, program="python -m target_service")
    configure_logging(service="target", level=settings.log_level, form=settings.log_format)
    run_process(serve(settings))


if __name__ == "__main__":
    main()
