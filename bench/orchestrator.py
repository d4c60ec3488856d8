"""What an orchestrator's own work comes to: workers of zero model time, and one orchestrator process between them.

Every round makes the whole way: verdict, draft, proposal, verification, commit, delta. The orchestrator has a core to
itself where there are two; workers, client and Redis share the rest. They do more for a round than the orchestrator
does, so what it sustains on its core is the rounds divided by the seconds of processor time that it took for them.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.idle import NUM_SPECULATIVE_TOKENS, IdleTarget, idle_workers
from bench.progress import progress
from bench.result import BenchResult, machine, quantile
from outrider.client import Delta, GenerationRequest, OutriderClient, Speculation
from outrider.errors import InvalidArgument
from outrider.local.process import ProcessSpec, ServiceProcess
from outrider.local.valkey import EmbeddedValkey
from outrider.parameters import SamplingParameters

_WARM_UP_S: Final = 1.0
_READY_S: Final = 60.0
_MAX_TOKENS: Final = 1 << 16
_RATE: Final = 10.0
"""Rounds a second of a session: 40 tokens a second, at four tokens a round."""


@dataclass(frozen=True, slots=True)
class Options:
    """How much to measure.

    Attributes:
        sessions: numbers of sessions at once, with commas between them.
        duration_s: seconds that each is measured for.
    """

    sessions: str = "1,8,64,256"
    duration_s: float = 6.0

    @property
    def numbers(self) -> list[int]:
        """The numbers of sessions."""
        try:
            numbers = [int(number) for number in self.sessions.split(",")]
        except ValueError as error:
            raise InvalidArgument(f"sessions is {self.sessions!r}, must be numbers with commas", "sessions") from error
        if min(numbers) < 1:
            raise InvalidArgument("sessions must be positive", "sessions")
        return numbers


@dataclass(slots=True)
class _Measured:
    """What came of a number of sessions.

    Attributes:
        rounds_per_s: that were made.
        processor_s: of the orchestrator, for a round.
        waits_s: from a verdict to the proposal behind it, at the target.
        delays_s: from a verdict to its tokens at the client, committed.
    """

    rounds_per_s: float = 0.0
    processor_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)

    @property
    def sustained(self) -> float:
        """Rounds a second for which a core suffices."""
        return 1 / self.processor_s if self.processor_s else 0.0


async def measure(options: Options) -> BenchResult:
    """Runs sessions as fast as they go; then with their rounds spread over time, all and half of what it sustains.

    As fast as they go, verdicts come together, as those of a target's pass do, and travel and are committed together.
    Spread over time each travels by itself.
    """
    numbers = options.numbers
    rows: list[dict[str, Any]] = []
    with progress(len(numbers) + 3) as step:
        step("starting")
        async with _stage() as (target, process):
            best: tuple[float, int] = (0.0, 0)
            for number in numbers:
                step(f"{number} sessions")
                measured = await _run(target, process, number, options.duration_s)
                best = max(best, (measured.sustained, number))
                rows.append(_row(number, "any", measured))
            together, number = best
            step("spread over time")
            target.pace_s = number / together
            spread = await _run(target, process, number, options.duration_s)
            rows.append(_row(number, f"{together:.0f}", spread))
            step("half the load")
            target.pace_s = 2 * number / spread.sustained
            half = await _run(target, process, number, options.duration_s)
            rows.append(_row(number, f"{spread.sustained / 2:.0f}", half))
    figures = {
        "rounds_per_second": spread.sustained,
        "rounds_per_second_together": together,
        "sessions_at_10_rounds_per_second": spread.sustained / _RATE,
        "added_latency_p50_s": quantile(half.waits_s, 0.5),
        "added_latency_p99_s": quantile(half.waits_s, 0.99),
        "delta_latency_p99_s": quantile(half.delays_s, 0.99),
    }
    return BenchResult("orchestrator", {**machine(), **asdict(options)}, rows, figures)


def plot(result: BenchResult, path: Path) -> None:
    """Draws what a core sustains against the number of sessions."""
    from bench.pictures import bars

    rows = [row for row in result.rows if row["asked rounds/s"] == "any"]
    series = {"one core sustains": [row["a core sustains"] for row in rows]}
    bars(path, [f"{row['sessions']} sessions" for row in rows], series, "rounds per second")


def _row(number: int, asked: str, measured: _Measured) -> dict[str, Any]:
    return {
        "sessions": number,
        "asked rounds/s": asked,
        "rounds/s": measured.rounds_per_s,
        "a core sustains": measured.sustained,
        "added p50 s": quantile(measured.waits_s, 0.5),
        "added p99 s": quantile(measured.waits_s, 0.99),
        "delta p99 s": quantile(measured.delays_s, 0.99),
    }


@asynccontextmanager
async def _stage() -> AsyncIterator[tuple[IdleTarget, ServiceProcess]]:
    """Workers in this process, and an orchestrator on a core of its own."""
    with (
        spare_core() as core,
        tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder,
        EmbeddedValkey() as server,
    ):
        async with idle_workers() as (target, target_address, draft_address):
            settings = {
                "OUTRIDER_ADDRESS": "127.0.0.1:0",
                "OUTRIDER_REDIS_URL": server.url,
                "OUTRIDER_TARGETS": target_address,
                "OUTRIDER_DRAFTS": draft_address,
                "OUTRIDER_MAX_ACTIVE_REQUESTS": "4096",
            }
            process = ServiceProcess(ProcessSpec("orchestrator", "orchestrator", settings), Path(folder))
            process.start()
            try:
                if core is not None:
                    os.sched_setaffinity(process.pid, {core})
                await process.wait_ready(_READY_S)
                yield target, process
            finally:
                process.kill()


@contextmanager
def spare_core() -> Iterator[int | None]:
    """Leaves a core to another process: yields it, and keeps this one, and what it starts, away from it."""
    known = os.sched_getaffinity(0)
    if len(known) < 2:
        yield None
        return
    core = min(known)
    os.sched_setaffinity(0, known - {core})
    try:
        yield core
    finally:
        os.sched_setaffinity(0, known)


async def _run(target: IdleTarget, process: ServiceProcess, number: int, duration_s: float) -> _Measured:
    delays_s: list[float] = []
    async with OutriderClient(process.address) as client:
        sessions = [asyncio.create_task(generate_for_ever(client, target, index, delays_s)) for index in range(number)]
        try:
            await until_all_run(sessions, [target], number)
            await asyncio.sleep(_WARM_UP_S)
            target.waits_s, target.num_rounds = [], 0
            target.said_s.clear()
            delays_s.clear()
            began_s, began_processor_s = time.perf_counter(), processor_s(process.pid)
            await asyncio.sleep(duration_s)
            taken_s, num = time.perf_counter() - began_s, target.num_rounds
            cost_s = (processor_s(process.pid) - began_processor_s) / max(1, num)
            return _Measured(num / taken_s, cost_s, list(target.waits_s), list(delays_s))
        finally:
            for session in sessions:
                session.cancel()
            await asyncio.gather(*sessions, return_exceptions=True)


async def until_all_run(sessions: Sequence["asyncio.Task[None]"], targets: Sequence[IdleTarget], number: int) -> None:
    """Returns when so many sessions speculate at these targets; raises the error of one that has failed."""
    async with asyncio.timeout(_READY_S):
        while sum(target.num_speculating for target in targets) < number:
            for session in sessions:
                if session.done():
                    session.result()
            await asyncio.sleep(0.01)


async def generate_for_ever(
    client: OutriderClient, target: IdleTarget | None, number: int, delays_s: list[float]
) -> None:
    """Has one session generate for ever; notes how long each verdict of a target took to come here as tokens."""
    prompt = (number, 1, 2, 3)
    parameters = SamplingParameters(max_tokens=_MAX_TOKENS, temperature=0)
    speculation = Speculation(num_speculative_tokens=NUM_SPECULATIVE_TOKENS)
    while True:
        request = GenerationRequest(token_ids=prompt, parameters=parameters, speculation=speculation)
        async with aclosing(client.generate(request)) as events:
            async for event in events:
                if not isinstance(event, Delta) or target is None:
                    continue
                # A delta may have the tokens of several verdicts; the last one's time is asked for.
                with suppress(KeyError):
                    said_s = target.said_s.pop((number, len(prompt) + event.offset + len(event.token_ids)))
                    delays_s.append(time.perf_counter() - said_s)


def processor_s(pid: int) -> float:
    """Returns the processor time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
