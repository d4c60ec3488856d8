"""The throughput and latency of one orchestrator, with stub workers without models.

Every round has all steps: verdict, draft, proposal, verification, commit, delta. The orchestrator has a core of its own
if there are two; workers, client and Redis share the others. They do more work per round than the orchestrator, so that
the orchestrator's sustained throughput is computed as rounds divided by its CPU time.
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

from bench.number_lists import numbers
from bench.progress import progress
from bench.result import BenchResult, machine, quantile
from bench.stub_workers import NUM_SPECULATIVE_TOKENS, StubTarget, stub_workers
from outrider.client import Delta, GenerationRequest, OutriderClient, Speculation
from outrider.local.process import ProcessSpec, ServiceProcess
from outrider.local.valkey import EmbeddedValkey
from outrider.parameters import SamplingParameters

_WARM_UP_S: Final = 1.0
_READY_S: Final = 60.0
_MAX_TOKENS: Final = 1 << 16
_RATE: Final = 10.0
"""Rounds per second of a session: 40 tokens per second at four tokens per round."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        sessions: numbers of concurrent sessions, comma-separated.
        duration_s: duration of each measurement, in seconds.
    """

    sessions: str = "1,8,64,256"
    duration_s: float = 6.0

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of concurrent sessions; raises `InvalidArgument` if they are invalid."""
        return numbers("sessions", self.sessions, int, 1)


@dataclass(slots=True)
class _Measured:
    """The measurements of one number of sessions.

    Attributes:
        rounds_per_s: rounds per second.
        processor_s: CPU seconds of the orchestrator per round.
        waits_s: seconds from a verdict to the next proposal, at the target.
        delays_s: seconds from a verdict to its committed tokens at the client.
    """

    rounds_per_s: float = 0.0
    processor_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)

    @property
    def sustained(self) -> float:
        """Rounds per second that one core sustains."""
        return 1 / self.processor_s if self.processor_s else 0.0


async def measure(options: Options) -> BenchResult:
    """Run sessions at full speed; then with rounds spread over time, at the full and at half of the sustained rate.

    At full speed verdicts arrive together, as those of a target pass do, and are sent and committed together. Spread
    over time, each is sent and committed alone.
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
    """Plot the rounds per second that one core sustains over the number of sessions."""
    from bench.pictures import bars

    rows = [row for row in result.rows if row["requested rounds/s"] == "any"]
    series = {"one core sustains": [row["a core sustains"] for row in rows]}
    bars(path, [f"{row['sessions']} sessions" for row in rows], series, "rounds per second")


def _row(number: int, requested: str, measured: _Measured) -> dict[str, Any]:
    return {
        "sessions": number,
        "requested rounds/s": requested,
        "rounds/s": measured.rounds_per_s,
        "a core sustains": measured.sustained,
        "added p50 s": quantile(measured.waits_s, 0.5),
        "added p99 s": quantile(measured.waits_s, 0.99),
        "delta p99 s": quantile(measured.delays_s, 0.99),
    }


@asynccontextmanager
async def _stage() -> AsyncIterator[tuple[StubTarget, ServiceProcess]]:
    """Run stub workers in this process, and an orchestrator on a core of its own."""
    with (
        spare_core() as core,
        tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder,
        EmbeddedValkey() as server,
    ):
        async with stub_workers() as (target, target_address, draft_address):
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
    """Exclude one core from this process and its children, and yield it; yield None if there is only one core."""
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


async def _run(target: StubTarget, process: ServiceProcess, number: int, duration_s: float) -> _Measured:
    delays_s: list[float] = []
    async with OutriderClient(process.address) as client:
        sessions = [asyncio.create_task(generate_forever(client, target, index, delays_s)) for index in range(number)]
        try:
            await until_all_run(sessions, [target], number)
            await asyncio.sleep(_WARM_UP_S)
            target.waits_s, target.num_rounds = [], 0
            target.verdict_times_s.clear()
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


async def until_all_run(sessions: Sequence["asyncio.Task[None]"], targets: Sequence[StubTarget], number: int) -> None:
    """Wait until so many sessions speculate at these targets; raise the error of a session that has failed."""
    async with asyncio.timeout(_READY_S):
        while sum(target.num_speculating for target in targets) < number:
            for session in sessions:
                if session.done():
                    session.result()
            await asyncio.sleep(0.01)


async def generate_forever(
    client: OutriderClient, target: StubTarget | None, number: int, delays_s: list[float]
) -> None:
    """Generate in one session without end; record the delay from each verdict to its tokens at the client."""
    prompt = (number, 1, 2, 3)
    parameters = SamplingParameters(max_tokens=_MAX_TOKENS, temperature=0)
    speculation = Speculation(num_speculative_tokens=NUM_SPECULATIVE_TOKENS)
    while True:
        request = GenerationRequest(token_ids=prompt, parameters=parameters, speculation=speculation)
        async with aclosing(client.generate(request)) as events:
            async for event in events:
                if not isinstance(event, Delta) or target is None:
                    continue
                # A delta may have the tokens of several verdicts; the delay is that of the last one.
                with suppress(KeyError):
                    sent_s = target.verdict_times_s.pop((number, len(prompt) + event.offset + len(event.token_ids)))
                    delays_s.append(time.perf_counter() - sent_s)


def processor_s(pid: int) -> float:
    """Return the CPU time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
