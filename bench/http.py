"""Streams over HTTP against streams over gRPC: the same requests, at one orchestrator, from a process of their own.

Workers are stubs without models, which answer at once, so that nothing but the orchestrator and the way to its client
is measured. Both kinds take turns.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.number_lists import numbers
from bench.orchestrator import processor_s, spare_core
from bench.progress import progress
from bench.result import BenchResult, machine, quantile
from bench.stub_workers import stub_workers
from outrider.errors import OutriderError
from outrider.lm.byte_tokenizer import byte_tokenizer
from outrider.local.process import ProcessSpec, ServiceProcess
from outrider.local.valkey import EmbeddedValkey

_READY_S: Final = 60.0
_KINDS: Final = ("grpc", "http")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        streams: numbers of concurrent streams, comma-separated.
        duration_s: duration of each measurement, in seconds.
        max_tokens: tokens of a request.
        num_repeats: times that each is measured.
    """

    streams: str = "1,16,64"
    duration_s: float = 4.0
    max_tokens: int = 256
    num_repeats: int = 5

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of concurrent streams; raises `InvalidArgument` if they are invalid."""
        return numbers("streams", self.streams, int, 1)


@dataclass(slots=True)
class _Measured:
    """The measurements of one kind with one number of streams, a value for each repetition.

    Attributes:
        tokens_per_s: tokens per second at the client.
        processor_s: CPU seconds of the orchestrator per token.
        first_token_s: median seconds until the first token.
    """

    tokens_per_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)


async def measure(options: Options) -> BenchResult:
    """Stream over HTTP and over gRPC, in turn."""
    numbers = options.numbers
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    with progress(1 + len(numbers) * len(_KINDS) * options.num_repeats) as step:
        step("starting")
        async with _stage() as (process, addresses):
            for number in numbers:
                measured = {kind: _Measured() for kind in _KINDS}
                for _ in range(options.num_repeats):
                    for kind in _KINDS:
                        step(f"{kind}, {number} streams")
                        await _run(kind, addresses[kind], process, number, options, measured[kind])
                rows += [_row(number, kind, measured[kind]) for kind in _KINDS]
                figures |= _figures(number, measured["http"], measured["grpc"])
    return BenchResult("http", {**machine(), **asdict(options)}, rows, figures)


def plot(result: BenchResult, path: Path) -> None:
    """Plot the tokens per second of both kinds over the number of streams."""
    from bench.pictures import bars

    numbers = sorted({row["streams"] for row in result.rows})
    rows = {(row["kind"], row["streams"]): row["tokens/s"] for row in result.rows}
    series = {kind: [rows[kind, number] for number in numbers] for kind in _KINDS}
    bars(path, [f"{number} streams" for number in numbers], series, "tokens per second")


def _row(number: int, kind: str, measured: _Measured) -> dict[str, Any]:
    return {
        "streams": number,
        "kind": kind,
        "tokens/s": median(measured.tokens_per_s),
        "orchestrator us/token": 1e6 * median(measured.processor_s),
        "first token p50 s": median(measured.first_token_s),
    }


def _figures(number: int, http: _Measured, grpc: _Measured) -> dict[str, float]:
    ratios = [one / other for one, other in zip(http.tokens_per_s, grpc.tokens_per_s, strict=True)]
    added = [one - other for one, other in zip(http.first_token_s, grpc.first_token_s, strict=True)]
    costs = [one / other for one, other in zip(http.processor_s, grpc.processor_s, strict=True)]
    return {
        f"http_over_grpc_throughput_{number}": median(ratios),
        f"http_added_ttft_p50_s_{number}": median(added),
        f"http_over_grpc_processor_{number}": median(costs),
    }


@asynccontextmanager
async def _stage() -> AsyncIterator[tuple[ServiceProcess, dict[str, str]]]:
    """Run stub workers in this process, and an orchestrator on a core of its own; yield it and its two addresses."""
    with (
        spare_core() as core,
        tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder,
        EmbeddedValkey() as server,
    ):
        async with stub_workers(byte_tokenizer().files) as (_, target_address, draft_address):
            settings = {
                "OUTRIDER_ADDRESS": "127.0.0.1:0",
                "OUTRIDER_HTTP_ADDRESS": "127.0.0.1:0",
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
                address = await process.wait_ready(_READY_S)
                yield process, {"grpc": address, "http": process.announced("http_address")}
            finally:
                process.kill()


async def _run(
    kind: str, address: str, process: ServiceProcess, number: int, options: Options, measured: _Measured
) -> None:
    arguments = (kind, address, str(number), str(options.duration_s), str(options.max_tokens))
    began_s = processor_s(process.pid)
    generator = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.http_load", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await generator.communicate()
    if generator.returncode != 0:
        raise OutriderError(f"the load generator ended with {generator.returncode}")
    load = json.loads(output)
    measured.tokens_per_s.append(load["num_tokens"] / load["duration_s"])
    # The whole run's time for the tokens of its measured part and of the quarter before.
    num_tokens = load["num_tokens"] * 1.25
    measured.processor_s.append((processor_s(process.pid) - began_s) / max(1, num_tokens))
    measured.first_token_s.append(quantile(load["first_token_s"], 0.5))
