"""Loads vLLM in this process, and states the identity of its model."""

import asyncio
import functools
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

from outrider.errors import InvalidArgument, ModelUnsupported
from outrider.lm.pages import KVUsage
from outrider.vllm.making import version_problem, vllm_version
from target_service.loaded_engine import LoadedEngine
from target_service.settings import TargetSettings
from target_service.vllm_engine.arguments import engine_arguments
from target_service.vllm_engine.embedded import EmbeddedVllm
from target_service.vllm_engine.engine import VllmEngine
from target_service.vllm_engine.own_metrics import VllmMetrics
from target_service.vllm_engine.requests import VllmRequest
from target_service.vllm_engine.steps import StepSource

_LOG: Final = logging.getLogger(__name__)
_ENVIRONMENT: Final = {
    # The engine's thread steps vLLM.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The other runner has no proposals from outside.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Its log records go where those of the process go.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


async def load(settings: TargetSettings) -> LoadedEngine[VllmRequest]:
    """Return the engine, once vLLM has loaded the model.

    Raises:
        InvalidArgument: arguments are at odds with what the target requires, or vLLM refuses them.
        ModelUnsupported: vLLM is not installed, or of a version that was not tested.
    """
    os.environ.update(_ENVIRONMENT)
    arguments = engine_arguments(settings)
    with ThreadPoolExecutor(max_workers=1) as loader:
        return await asyncio.get_running_loop().run_in_executor(loader, _load, settings, arguments)


def _load(settings: TargetSettings, arguments: dict[str, Any]) -> LoadedEngine[VllmRequest]:
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ModelUnsupported(f"engine vllm needs vLLM, which cannot be imported: {error}") from None
    if problem := version_problem(vllm_version()):
        raise ModelUnsupported(problem)
    # Here, since these import vLLM.
    from target_service.vllm_engine.identity import identity_of
    from target_service.vllm_engine.scheduler import TargetScheduler

    source = StepSource()
    TargetScheduler.shared = source
    llm, statistics = _made(arguments)
    config = llm.vllm_config
    identity = identity_of(llm, settings)
    scheduler = llm.engine_core.engine_core.scheduler
    num_blocks, block_bytes = _blocks(config, scheduler.kv_cache_config)

    def kv_usage() -> KVUsage:
        num_held = round(scheduler.kv_cache_manager.usage * (num_blocks - 1))
        return KVUsage(
            page_len=config.cache_config.block_size,
            page_bytes=block_bytes,
            num_pages=num_blocks,
            num_held=num_held,
            num_reusable=0,
            num_hit_tokens=statistics.num_hit_tokens,
            num_evicted_pages=0,
        )

    embedded = EmbeddedVllm(
        llm=llm,
        sampling_params=_sampling_params(),
        set_output=functools.partial(_set_output, llm),
        kv_usage=kv_usage,
        vocabulary_size=identity.vocabulary_size,
        max_len=identity.max_session_len,
        max_rows=scheduler.max_num_scheduled_tokens,
        num_speculative_tokens=config.num_speculative_tokens,
        # The workers only: what else a shutdown of vLLM does takes seconds, and the process ends anyway.
        close=llm.engine_core.engine_core.model_executor.shutdown,
    )
    engine = VllmEngine(embedded, source, settings)
    identity = replace(identity, kv_budget_bytes=num_blocks * block_bytes)
    return LoadedEngine(engine, identity, embedded.close, [VllmMetrics()])


def _made(arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Return vLLM's engine, and the reader of its statistics."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from target_service.vllm_engine.statistics import CacheStatistics

    statistics = CacheStatistics()
    try:
        chosen = EngineArgs(**arguments)
        engine = LLMEngine.from_engine_args(chosen, stat_loggers=[lambda *_: statistics])
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"vLLM refuses its arguments: {error}", "engine_args") from error
    return engine, statistics


def _blocks(config: Any, kv_cache: Any) -> tuple[int, int]:
    """Return the number of blocks of vLLM's KV cache, and the bytes of one, on all of its workers together."""
    num_bytes = sum({tensor.size: 0 for tensor in kv_cache.kv_cache_tensors} or {0: 0})
    num_workers = config.parallel_config.world_size
    return kv_cache.num_blocks, max(1, num_workers * num_bytes // kv_cache.num_blocks)


def _sampling_params() -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    def make(*, structured_outputs: dict[str, Any] | None = None, **arguments: Any) -> Any:
        constraint = None if structured_outputs is None else StructuredOutputsParams(**structured_outputs)
        return SamplingParams(
            output_kind=RequestOutputKind.DELTA, detokenize=False, structured_outputs=constraint, **arguments
        )

    return make


def _set_output(llm: Any, vllm_id: str, token_ids: Sequence[int]) -> None:
    llm.collective_rpc(set_output_of_worker, args=(vllm_id, list(token_ids)))


def set_output_of_worker(worker: Any, vllm_id: str, token_ids: list[int]) -> None:
    """Replace the output that a worker of vLLM has of a request; it is read when the request is scheduled next."""
    worker.model_runner.requests[vllm_id].output_token_ids[:] = token_ids
