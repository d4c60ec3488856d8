"""Fault 38: thousands of requests, many given up on the way, and nothing stays behind."""

import asyncio
import os
import random
from contextlib import aclosing
from pathlib import Path

import pytest

from outrider.client import Delta, GenerationRequest, OutriderClient
from outrider.local.process import ServiceProcess
from outrider.parameters import SamplingParameters
from tests.faults.scene import Scene

_NUM_AT_ONCE = 32
_NUM_TOKENS = 12
_CANCELLED = 0.2
_PARTS = 5
_POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)


def descriptors(process: ServiceProcess) -> int:
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


def threads(process: ServiceProcess) -> int:
    return len(list(Path(f"/proc/{process.pid}/task").iterdir()))


def resident_bytes(process: ServiceProcess) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1])


async def one(client: OutriderClient, rng: random.Random) -> bool:
    """Runs a request, or gives it up on the way; returns whether it came to its end."""
    prompt = tuple(rng.randrange(16) for _ in range(rng.randrange(1, 30)))
    parameters = SamplingParameters(seed=rng.randrange(2**32), max_tokens=_NUM_TOKENS)
    request = GenerationRequest(token_ids=prompt, parameters=parameters)
    if rng.random() >= _CANCELLED:
        return len((await client.complete(request, timeout_s=30)).token_ids) == _NUM_TOKENS
    after = rng.randrange(_NUM_TOKENS)
    num = 0
    async with aclosing(client.generate(request, timeout_s=30)) as events:
        async for event in events:
            num += len(event.token_ids) if isinstance(event, Delta) else 0
            if num >= after:
                break
    return False


async def run(scene: Scene, num: int, seed: int) -> int:
    """Runs so many requests, some at once; returns how many came to their end."""
    rng = random.Random(seed)
    waiting = [random.Random(rng.random()) for _ in range(num)]

    async def work() -> int:
        done = 0
        while waiting:
            done += await one(scene.client, waiting.pop())
        return done

    return sum(await asyncio.gather(*(work() for _ in range(_NUM_AT_ONCE))))


@pytest.mark.parametrize("num", [400, pytest.param(5000, marks=pytest.mark.slow)])
async def test_fault_38_soak(scene: Scene, num: int) -> None:
    processes = scene.stack.processes
    await run(scene, num // _PARTS, seed=0)
    await scene.freed()
    counts = [(descriptors(process), threads(process)) for process in processes]
    levels = [resident_bytes(process) for process in processes]
    for part in range(1, _PARTS):
        num_done = await run(scene, num // _PARTS, seed=part)
        assert num_done >= 0.7 * (num // _PARTS)
    await scene.freed()
    for process, (num_descriptors, num_threads), level in zip(processes, counts, levels, strict=True):
        name = process.spec.name
        # Connections to Redis, too, are as many as were ever needed at once.
        assert descriptors(process) <= num_descriptors + _NUM_AT_ONCE, name
        # The event loop's pool grows with what was ever asked of it at once.
        assert threads(process) <= num_threads + _POOL_THREADS, name
        growth = resident_bytes(process) / level - 1
        scene.note(f"{name}_growth_percent", round(100 * growth, 1))
        assert growth < 0.05 or num < 5000, f"{name} grew by {100 * growth:.1f} %"
