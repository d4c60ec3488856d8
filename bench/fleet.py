"""What a round costs, in processor time and in operations of Redis, with one orchestrator and with several.

Eight targets and eight drafts of zero model time, every orchestrator with a stream to each. Sessions go at a steady
pace, so many for each orchestrator. Orchestrators share no state but Redis, and no operation of theirs touches more
than one session; so what a round costs should not depend on how many there are.

Processes that share a core make each other slower, whatever they do. So there are always as many: four fleets of one
orchestrator, each with workers and a Redis of its own, are held against two fleets of two, and one of four.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import redis.asyncio

from bench.idle import IdleTarget, idle_workers
from bench.number_lists import numbers
from bench.orchestrator import generate_for_ever, processor_s, spare_core, until_all_run
from bench.progress import progress
from bench.result import BenchResult, machine, median
from outrider.client import OutriderClient
from outrider.errors import InvalidArgument
from outrider.local.process import ProcessSpec, ServiceProcess
from outrider.local.valkey import EmbeddedValkey

_READY_S: Final = 60.0
_WARM_UP_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Options:
    """How much to measure.

    Attributes:
        orchestrators: numbers of them in a fleet, with commas between them; each divides the largest.
        num_workers: targets, and drafts.
        sessions_each: sessions of each orchestrator.
        rate: rounds a second of a session.
        duration_s: seconds of a measurement.
        num_repeats: measurements of each number, in turn, of which the median counts.
    """

    orchestrators: str = "1,2,4"
    num_workers: int = 8
    sessions_each: int = 16
    rate: float = 10.0
    duration_s: float = 8.0
    num_repeats: int = 3


@dataclass(frozen=True, slots=True)
class _Fleet:
    """Orchestrators, the targets that they share, and their Redis."""

    orchestrators: list[ServiceProcess]
    targets: list[IdleTarget]
    redis_url: str


@dataclass(frozen=True, slots=True)
class _Cost:
    """Rounds a second; and for each round, processor seconds, and operations, bytes and processor seconds of Redis.

    Operations within scripts count too: a commit is one script, of several.
    """

    rounds_per_s: float
    processor_s: float
    operations: float
    redis_bytes: float
    redis_s: float


async def measure(options: Options) -> BenchResult:
    """Measures each number of orchestrators in turn."""
    found: dict[int, list[_Cost]] = {num: [] for num in numbers("orchestrators", options.orchestrators, int, 1)}
    if any(max(found) % num for num in found):
        raise InvalidArgument(
            f"orchestrators is {options.orchestrators!r}, each must divide the largest", "orchestrators"
        )
    with progress(len(found) * options.num_repeats) as step:
        for _ in range(options.num_repeats):
            for num, costs in found.items():
                step(f"{max(found) // num} times {num} orchestrators")
                async with _stage(options, num, max(found) // num) as fleets:
                    costs.append(await _run(options, fleets))
    rows = [_row(num, costs) for num, costs in found.items()]
    return BenchResult("fleet", {**machine(), **asdict(options)}, rows, _figures(rows))


@asynccontextmanager
async def _stage(options: Options, num: int, num_fleets: int) -> AsyncIterator[list[_Fleet]]:
    async with AsyncExitStack() as open_ones:
        core = open_ones.enter_context(spare_core())
        folder = Path(open_ones.enter_context(tempfile.TemporaryDirectory(prefix="outrider-bench-")))
        fleets = [await _fleet(options, num, place, folder, core, open_ones) for place in range(num_fleets)]
        for process in (process for fleet in fleets for process in fleet.orchestrators):
            await process.wait_ready(_READY_S)
        yield fleets


async def _fleet(
    options: Options, num: int, place: int, folder: Path, core: int | None, open_ones: AsyncExitStack
) -> _Fleet:
    """Starts a fleet, whose orchestrators are not ready yet, and whose end is that of the stack."""
    server = open_ones.enter_context(EmbeddedValkey())
    workers = [await open_ones.enter_async_context(idle_workers()) for _ in range(options.num_workers)]
    targets = [target for target, _, _ in workers]
    for target in targets:
        target.pace_s = 1 / options.rate
    settings = {
        "OUTRIDER_ADDRESS": "127.0.0.1:0",
        "OUTRIDER_REDIS_URL": server.url,
        "OUTRIDER_TARGETS": ",".join(address for _, address, _ in workers),
        "OUTRIDER_DRAFTS": ",".join(address for _, _, address in workers),
    }
    specs = [ProcessSpec(f"orchestrator-{place}-{number}", "orchestrator", settings) for number in range(num)]
    orchestrators = [ServiceProcess(spec, folder) for spec in specs]
    for process in orchestrators:
        open_ones.callback(process.kill)
        process.start()
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
    return _Fleet(orchestrators, targets, server.url)


async def _run(options: Options, fleets: list[_Fleet]) -> _Cost:
    async with AsyncExitStack() as open_ones:
        sessions = []
        for fleet in fleets:
            for place, process in enumerate(fleet.orchestrators):
                client = await open_ones.enter_async_context(OutriderClient(process.address))
                first = place * options.sessions_each
                sessions += [
                    asyncio.create_task(generate_for_ever(client, None, first + number, []))
                    for number in range(options.sessions_each)
                ]
        stores = [
            await open_ones.enter_async_context(redis.asyncio.Redis.from_url(fleet.redis_url)) for fleet in fleets
        ]
        try:
            targets = [target for fleet in fleets for target in fleet.targets]
            await until_all_run(sessions, targets, len(sessions))
            await asyncio.sleep(_WARM_UP_S)
            before = await _counts(fleets, stores)
            await asyncio.sleep(options.duration_s)
            after = await _counts(fleets, stores)
        finally:
            for session in sessions:
                session.cancel()
            await asyncio.gather(*sessions, return_exceptions=True)
    num, *costs = (now - then for now, then in zip(after, before, strict=True))
    return _Cost(num / options.duration_s, *(cost / num for cost in costs))


async def _counts(fleets: list[_Fleet], stores: list[redis.asyncio.Redis]) -> tuple[float, ...]:
    """Returns rounds and the costs of `_Cost`, since the start; a few of Redis for the asking."""
    num = sum(target.num_rounds for fleet in fleets for target in fleet.targets)
    busy_s = sum(processor_s(process.pid) for fleet in fleets for process in fleet.orchestrators)
    found: list[dict[str, Any]] = [await store.info("stats") for store in stores]
    num_bytes = sum(info["total_net_input_bytes"] + info["total_net_output_bytes"] for info in found)
    redis_s = 0.0
    for store in stores:
        spent: dict[str, Any] = await store.info("cpu")
        redis_s += spent["used_cpu_user"] + spent["used_cpu_sys"]
    return num, busy_s, sum(info["total_commands_processed"] for info in found), num_bytes, redis_s


def _row(num: int, costs: list[_Cost]) -> dict[str, Any]:
    return {
        "orchestrators": num,
        "rounds/s": median(cost.rounds_per_s for cost in costs),
        "processor ms/round": 1e3 * median(cost.processor_s for cost in costs),
        "redis operations/round": median(cost.operations for cost in costs),
        "redis bytes/round": median(cost.redis_bytes for cost in costs),
        "redis processor ms/round": 1e3 * median(cost.redis_s for cost in costs),
    }


def _figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns how far the costs of a round lie apart: the largest over the smallest."""
    spreads = {
        "processor_time_spread": "processor ms/round",
        "redis_operations_spread": "redis operations/round",
        "redis_bytes_spread": "redis bytes/round",
    }
    return {name: max(row[of] for row in rows) / min(row[of] for row in rows) for name, of in spreads.items()}
