"""The cost of a round in CPU time and Redis operations, with one orchestrator and with several.

There are eight stub targets and eight stub drafts without models, and each orchestrator has a stream to each. Sessions
run at a constant rate, with a constant number per orchestrator. Orchestrators share no state except Redis, and no
operation affects more than one session; so the cost of a round should not depend on the number of orchestrators.

Processes that share a core slow each other down. So the total number of orchestrators is constant: four fleets of one
orchestrator, each with its own workers and Redis, are compared with two fleets of two, and one of four.
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

from bench.number_lists import numbers
from bench.orchestrator import generate_forever, processor_s, spare_core, until_all_run
from bench.progress import progress
from bench.result import BenchResult, machine, median
from bench.stub_workers import StubTarget, stub_workers
from outrider.client import OutriderClient
from outrider.errors import InvalidArgument
from outrider.local.process import ProcessSpec, ServiceProcess
from outrider.local.valkey import EmbeddedValkey

_READY_S: Final = 60.0
_WARM_UP_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        orchestrators: numbers of orchestrators per fleet, comma-separated; each divides the largest.
        num_workers: number of targets, and of drafts.
        sessions_each: sessions per orchestrator.
        rate: rounds per second of a session.
        duration_s: duration of a measurement, in seconds.
        num_repeats: measurements per number, in turn, of which the median is reported.
    """

    orchestrators: str = "1,2,4"
    num_workers: int = 8
    sessions_each: int = 16
    rate: float = 10.0
    duration_s: float = 8.0
    num_repeats: int = 3


@dataclass(frozen=True, slots=True)
class _Fleet:
    """Orchestrators with shared targets and Redis."""

    orchestrators: list[ServiceProcess]
    targets: list[StubTarget]
    redis_url: str


@dataclass(frozen=True, slots=True)
class _Cost:
    """Rounds per second; and per round: CPU seconds, and operations, bytes and CPU seconds of Redis.

    Operations within scripts are counted too: a commit is one script with several operations.
    """

    rounds_per_s: float
    processor_s: float
    operations: float
    redis_bytes: float
    redis_s: float


async def measure(options: Options) -> BenchResult:
    """Measure each number of orchestrators in turn."""
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
    """Start a fleet, which ends with the exit stack, without waiting until its orchestrators are ready."""
    server = open_ones.enter_context(EmbeddedValkey())
    workers = [await open_ones.enter_async_context(stub_workers()) for _ in range(options.num_workers)]
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
                    asyncio.create_task(generate_forever(client, None, first + number, []))
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
    """Return the total rounds and costs (see `_Cost`) since the start; those of Redis include these queries."""
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
    """Return the spread of each cost per round over the numbers of orchestrators: the largest over the smallest."""
    spreads = {
        "processor_time_spread": "processor ms/round",
        "redis_operations_spread": "redis operations/round",
        "redis_bytes_spread": "redis bytes/round",
    }
    return {name: max(row[of] for row in rows) / min(row[of] for row in rows) for name, of in spreads.items()}
