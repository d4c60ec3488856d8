"""Whether sessions that are left give everything back: KV cache in use, and the target's resident memory."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.held import hold
from bench.progress import Step
from bench.traffic import Ask, Prompts, run_wave
from bench.worker import Worker
from outrider.client import LocalStack, OutriderClient, StackOptions

_AT_ONCE: Final = 16
_PROMPT_LEN: Final = 24
_NUM_TOKENS: Final = 8
_LONG_TOKENS: Final = 2000
_SETTLE_S: Final = 10.0
_POLL_S: Final = 0.1
_SMALL_CACHE: Final = {"OUTRIDER_KV_BUDGET_BYTES": str(4 << 20)}
"""So little that the first sessions fill it: pages of idle sessions are kept as long as there is room for them."""


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What is measured.

    Attributes:
        model: as the target loads it.
        num_sessions: sessions opened, used and left.
        num_warm: sessions before that, after which memory should grow no more.
    """

    model: str
    num_sessions: int = 2000
    num_warm: int = 2000


async def measure_memory(options: MemoryOptions, step: Step) -> dict[str, float]:
    """Opens sessions, a few at once, generates with each, and leaves it.

    Returns:
        pages of KV cache in use at the end (of the size that a session of two tokens takes), and resident memory at
        the end over that after the first sessions.
    """
    async with (
        LocalStack(StackOptions(model=options.model, drafts=(), target_environment=_SMALL_CACHE)) as stack,
        stack.client() as client,
        Worker(stack.targets[0]) as worker,
    ):
        prompts = Prompts((await worker.info()).vocabulary_size)
        async with hold(client, [prompts.draw(1)], Ask(_LONG_TOKENS)):
            page_bytes = (await worker.load()).kv_used_bytes
        await _come_and_go(client, prompts, options.num_warm)
        warm_bytes = worker.resident_bytes()
        step(f"{options.num_sessions} sessions that come and go")
        await _come_and_go(client, prompts, options.num_sessions)
        left_bytes = await _settled(worker)
        after_bytes = worker.resident_bytes()
    return {
        "num_pages_left": left_bytes / max(1, page_bytes),
        "rss_after_over_warm": after_bytes / warm_bytes,
        "rss_warm_bytes": float(warm_bytes),
    }


async def _come_and_go(client: OutriderClient, prompts: Prompts, num_sessions: int) -> None:
    asked = [prompts.draw(_PROMPT_LEN) for _ in range(num_sessions)]
    await asyncio.gather(*(_one_by_one(client, asked[first::_AT_ONCE]) for first in range(_AT_ONCE)))


async def _one_by_one(client: OutriderClient, asked: Sequence[tuple[int, ...]]) -> None:
    for prompt in asked:
        await run_wave(client, [prompt], Ask(_NUM_TOKENS, timeout_s=60.0))


async def _settled(worker: Worker) -> int:
    """Returns the KV cache in use once it is none, or does not come to nothing in time."""
    for _ in range(int(_SETTLE_S / _POLL_S)):
        if (used := (await worker.load()).kv_used_bytes) == 0:
            return 0
        await asyncio.sleep(_POLL_S)
    return used
