"""Memory after many sessions have ended: KV cache in use, and resident memory of the target."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.background import background_sessions
from bench.progress import Step
from bench.traffic import Prompts, RequestTemplate, run_wave
from bench.worker import Worker
from outrider.client import LocalStack, OutriderClient, StackOptions

_AT_ONCE: Final = 16
_PROMPT_LEN: Final = 24
_NUM_TOKENS: Final = 8
_LONG_TOKENS: Final = 2000
_SETTLE_S: Final = 10.0
_POLL_S: Final = 0.1
_SMALL_CACHE: Final = {"OUTRIDER_KV_BUDGET_BYTES": str(4 << 20)}
"""A KV cache so small that the first sessions fill it, because pages of idle sessions remain cached while they fit."""


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Options of the measurement.

    Attributes:
        model: model name, as the target loads it.
        num_sessions: measured sessions.
        num_warm: sessions before these, after which memory should not grow.
    """

    model: str
    num_sessions: int = 2000
    num_warm: int = 2000


async def measure_memory(options: MemoryOptions, step: Step) -> dict[str, float]:
    """Run many short sessions, 16 at a time.

    Returns:
        KV cache pages in use at the end, and resident memory at the end divided by that after the warm-up; the warm-up
        value in bytes.
    """
    async with (
        LocalStack(StackOptions(model=options.model, drafts=(), target_environment=_SMALL_CACHE)) as stack,
        stack.client() as client,
        Worker(stack.targets[0]) as worker,
    ):
        prompts = Prompts((await worker.info()).vocabulary_size)
        async with background_sessions(client, [prompts.draw(1)], RequestTemplate(_LONG_TOKENS)):
            page_bytes = (await worker.load()).kv_used_bytes
        await _run_sessions(client, prompts, options.num_warm)
        warm_bytes = worker.resident_bytes()
        step(f"{options.num_sessions} short sessions")
        await _run_sessions(client, prompts, options.num_sessions)
        left_bytes = await _settled(worker)
        after_bytes = worker.resident_bytes()
    return {
        "num_pages_left": left_bytes / max(1, page_bytes),
        "rss_after_over_warm": after_bytes / warm_bytes,
        "rss_warm_bytes": float(warm_bytes),
    }


async def _run_sessions(client: OutriderClient, prompts: Prompts, num_sessions: int) -> None:
    drawn = [prompts.draw(_PROMPT_LEN) for _ in range(num_sessions)]
    await asyncio.gather(*(_run_sequentially(client, drawn[first::_AT_ONCE]) for first in range(_AT_ONCE)))


async def _run_sequentially(client: OutriderClient, prompts: Sequence[tuple[int, ...]]) -> None:
    for prompt in prompts:
        await run_wave(client, [prompt], RequestTemplate(_NUM_TOKENS, timeout_s=60.0))


async def _settled(worker: Worker) -> int:
    """Return the KV cache in use, in bytes, once it is 0 or after a timeout."""
    for _ in range(int(_SETTLE_S / _POLL_S)):
        if (used := (await worker.load()).kv_used_bytes) == 0:
            return 0
        await asyncio.sleep(_POLL_S)
    return used
