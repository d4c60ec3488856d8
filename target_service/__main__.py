"""Starts a target: `python -m target_service --help`."""

import asyncio
import logging
import os
import secrets
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from outrider.drafters.loading import load_drafter
from outrider.errors import InvalidArgument
from outrider.lm.load_options import LoadedModel, LoadOptions, chosen_device
from outrider.lm.loading import load_model
from outrider.lm.model import LanguageModel
from outrider.lm.ranks import Ranks, num_ranks
from outrider.serving.metrics import new_registry
from outrider.serving.server import Server, run_process, tune_interpreter
from outrider.serving.settings import load_settings
from outrider.serving.spans import export_spans
from outrider.serving.telemetry import configure_logging
from outrider.v1.target_pb2_grpc import add_TargetServiceServicer_to_server
from outrider.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from target_service.engine.colocated import ColocatedDraft, check_colocated
from target_service.engine.engine import Engine
from target_service.frontend import Frontend
from target_service.kv_blocks.remote_blocks import RemoteBlocks
from target_service.kv_blocks.store import BlockStore
from target_service.metrics import watch
from target_service.servicer import TargetServicer
from target_service.settings import BlockUse, TargetSettings
from target_service.worker import TargetWorkerServicer

_LOG: Final = logging.getLogger(__name__)
_MIN_SECRET_LEN: Final = 16
_HAND_OVER_SHARE: Final = 0.5
"""Share of the drain budget after which sessions that have not ended go on at another target."""
_MAX_PASS_S: Final = 600.0
"""Seconds in one pass after which the liveness check fails. The first pass may compile the model."""
_KV_BLOCK_TTL_S: Final = 3600.0
"""Seconds until a KV block that is not used expires. A full store evicts blocks earlier."""
_KV_BLOCK_QUEUE_BYTES: Final = 256 << 20
"""Bytes of KV blocks that wait to be written: little memory beside a KV cache of gigabytes. Blocks without room are
dropped, and computed where they are missed."""


async def serve(settings: TargetSettings) -> None:
    """Load the model, then serve until SIGTERM; where several ranks run it, the others follow the first one."""
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    ranks = Ranks(chosen_device(settings.device)) if num_ranks() > 1 else None
    # In a thread that ends: OpenMP keeps workers for every thread that ever computed, and with more workers than cores
    # they stop spinning between operations, which doubled the time of a pass (18 to 33 ms on 2 cores).
    with ThreadPoolExecutor(max_workers=1) as loader:
        options = LoadOptions(
            dtype=settings.dtype,
            device=settings.device,
            quantization=settings.quantization,
            kv_budget_bytes=settings.kv_budget_bytes,
            compiles=settings.compile,
            ranks=ranks,
            invariant=settings.invariant,
        )
        loop = asyncio.get_running_loop()
        loaded = await loop.run_in_executor(loader, load_model, settings.model, options)
        draft = await loop.run_in_executor(loader, colocated_draft, loaded.model, settings)
    tune_interpreter()
    if ranks is not None and ranks.rank > 0:
        follow(loaded, ranks)
        return
    await lead(loaded, settings, draft)
    if ranks is not None:
        ranks.leave()


def follow(loaded: LoadedModel, ranks: Ranks) -> None:
    """Run the passes that the first rank sends. Signals are ignored: the first rank needs this one while it drains."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if loaded.run is not None:
        ranks.follow(loaded.run)
    ranks.leave()


def colocated_draft(model: LanguageModel, settings: TargetSettings) -> ColocatedDraft | None:
    """Return the draft within this process; None where there is none.

    Raises:
        OutriderError: it does not fit the target.
    """
    if settings.drafter_options is None:
        return None
    drafter = load_drafter(settings.drafter_options)
    check_colocated(drafter, model.info.tokenizer_fingerprint)
    return ColocatedDraft(drafter)


async def lead(loaded: LoadedModel, settings: TargetSettings, draft: ColocatedDraft | None = None) -> None:
    """Serve a model that is loaded."""
    blocks = remote_blocks(loaded.model, settings)
    end_export = export_spans(settings.otlp_endpoint, "target")
    engine = Engine(loaded.model, settings, blocks, draft)
    # Without its engine the process can only delay sessions: once it has ended, they go on at another target.
    frontend = Frontend(engine, settings.max_sessions, lambda: os._exit(os.EX_SOFTWARE))
    registry = new_registry("target")
    watch(registry, engine, loaded.model, settings)
    frontend.start()
    target = TargetServicer(frontend, engine.max_len, hand_over_after_s=_HAND_OVER_SHARE * settings.drain_budget_s)
    server = Server(
        settings,
        name="target",
        drain=target.drain,
        is_live=lambda: frontend.loop.is_alive and frontend.loop.busy_s < _MAX_PASS_S,
        is_ready=lambda: frontend.num_sessions < settings.max_sessions,
        registry=registry,
    )
    worker = TargetWorkerServicer(engine, frontend, loaded, settings, settings.replica_name, secrets.token_hex(8))
    server.register(add_TargetServiceServicer_to_server, target, "outrider.v1.TargetService")
    server.register(add_WorkerServiceServicer_to_server, worker, "outrider.v1.WorkerService")
    try:
        await server.run()
    finally:
        frontend.loop.stop()
        await asyncio.to_thread(end_export)
        if blocks is not None:
            blocks.close()


def remote_blocks(model: LanguageModel, settings: TargetSettings) -> RemoteBlocks | None:
    """Return the model's KV blocks in Redis; None where they are off, or the model has none."""
    if not settings.kv_blocks_url or settings.kv_blocks is BlockUse.NEVER:
        return None
    if model.blocks is None:
        _LOG.warning("this model has no KV blocks to keep in Redis")
        return None
    store = BlockStore(settings.kv_blocks_url, timeout_s=settings.kv_blocks_timeout_s, ttl_s=_KV_BLOCK_TTL_S)
    numerics = f"{model.info.fingerprint} {model.info.numerics}"
    secret = kv_blocks_secret(settings)
    return RemoteBlocks(model.blocks, numerics, store, settings.kv_blocks, _KV_BLOCK_QUEUE_BYTES, secret)


def kv_blocks_secret(settings: TargetSettings) -> bytes:
    """Return the secret that seals KV blocks, empty without a file; raise `InvalidArgument` for a file without one."""
    if settings.kv_blocks_secret_file is None:
        return b""
    try:
        secret = settings.kv_blocks_secret_file.read_bytes().strip()
    except OSError as error:
        raise InvalidArgument(f"cannot be read: {error.strerror}", "kv_blocks_secret_file") from None
    if len(secret) < _MIN_SECRET_LEN:
        raise InvalidArgument(f"has {len(secret)} bytes, must have {_MIN_SECRET_LEN}", "kv_blocks_secret_file")
    return secret


def main() -> None:
    """Read the settings and serve."""
    settings = load_settings(TargetSettings, program="python -m target_service")
    configure_logging(service="target", level=settings.log_level, form=settings.log_format)
    run_process(serve(settings))


if __name__ == "__main__":
    main()
