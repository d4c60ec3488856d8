"""The cost of the session store: latency of a round's commit, and memory per open and per idle session."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import redis.asyncio

from bench.progress import progress
from bench.result import BenchResult, machine, quantile
from bench.worker import Worker
from orchestrator.store.sessions import Lease, NewRequest
from orchestrator.store.store import SessionStore
from outrider.client import GenerationRequest, LocalStack, Speculation, StackOptions
from outrider.local.valkey import EmbeddedValkey
from outrider.parameters import AcceptanceRule, SamplingParameters

_MODEL: Final = "markov:vocabulary=64,order=1,seed=1"
_NUM_AT_ONCE: Final = 64
_ROUND_LEN: Final = 4
_LEASE_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        num_sessions: open sessions in one Redis server.
        num_rounds: timed commits for each number of streams.
        prompt_len: prompt tokens per session.
    """

    num_sessions: int = 5000
    num_rounds: int = 2000
    prompt_len: int = 200


async def measure(options: Options) -> BenchResult:
    """Open the sessions, commit to some of them, and serve as many through an orchestrator."""
    with progress(4) as step, EmbeddedValkey() as server:
        store = SessionStore(server.url, lease_s=_LEASE_S)
        step("opening sessions")
        before = await _memory(server.url)
        leases = await _opened(store, options)
        session_bytes = (await _memory(server.url) - before) / options.num_sessions
        step("committing, one stream")
        alone = await _commits(store, leases[:1], options.num_rounds, options.prompt_len)
        step(f"committing, {_NUM_AT_ONCE} streams")
        many = await _commits(store, leases[1 : _NUM_AT_ONCE + 1], options.num_rounds, options.prompt_len)
        await store.close()
        step("serving sessions")
        idle_bytes = await _idle_bytes(options)
    rows = [
        {"streams": num, "p50_s": quantile(times, 0.5), "p99_s": quantile(times, 0.99)}
        for num, times in ((1, alone), (_NUM_AT_ONCE, many))
    ]
    figures = {
        "commit_p50_s": quantile(alone, 0.5),
        "commit_p99_s": quantile(alone, 0.99),
        "commit_of_64_p50_s": quantile(many, 0.5),
        "commit_of_64_p99_s": quantile(many, 0.99),
        "redis_bytes_per_session": session_bytes,
        "orchestrator_bytes_per_idle_session": idle_bytes,
    }
    return BenchResult("commits", {**machine(), **asdict(options)}, rows, figures)


def plot(result: BenchResult, path: Path) -> None:
    """Plot p50 and p99 over the number of streams."""
    from bench.pictures import bars

    series = {name: [row[f"{name}_s"] * 1e3 for row in result.rows] for name in ("p50", "p99")}
    bars(path, [f"{row['streams']} streams" for row in result.rows], series, "ms per commit")


async def _memory(url: str) -> int:
    async with redis.asyncio.Redis.from_url(url) as client:
        return int((await client.info("memory"))["used_memory"])


async def _opened(store: SessionStore, options: Options) -> list[Lease]:
    """Begin a request on each session and return the leases."""
    prompt = tuple(range(options.prompt_len))

    async def begin() -> Lease:
        request = NewRequest(
            tenant="bench",
            session_id=uuid.uuid4().hex,
            request_id=uuid.uuid4().hex,
            fingerprint="f" * 64,
            model="m" * 64,
            tokenizer="t" * 64,
            parameters=SamplingParameters(seed=1),
            rule=AcceptanceRule.COUPLED,
            prompt=prompt,
            expected_len=0,
            takes_over=False,
            must_exist=False,
            max_len=1 << 20,
        )
        begun = await store.begin(request)
        if begun.lease is None:
            raise AssertionError("a new session is leased")
        return begun.lease

    leases: list[Lease] = []
    while len(leases) < options.num_sessions:
        num = min(_NUM_AT_ONCE, options.num_sessions - len(leases))
        leases += await asyncio.gather(*(begin() for _ in range(num)))
    return leases


async def _commits(store: SessionStore, leases: Sequence[Lease], num_rounds: int, start: int) -> list[float]:
    """Return the seconds of each commit, with all streams committing concurrently."""
    times: list[float] = []

    async def stream(lease: Lease) -> None:
        length = start
        for _ in range(num_rounds // len(leases)):
            began_s = time.perf_counter()
            length = (await store.append(lease, length, range(_ROUND_LEN))).length
            times.append(time.perf_counter() - began_s)

    await asyncio.gather(*(stream(lease) for lease in leases))
    return times


async def _idle_bytes(options: Options) -> float:
    """Return the growth of an orchestrator's memory per served session, in bytes."""

    def request() -> GenerationRequest:
        parameters = SamplingParameters(max_tokens=1, seed=1)
        plain = Speculation(disabled=True)
        return GenerationRequest(token_ids=tuple(range(8)), parameters=parameters, speculation=plain)

    async with (
        LocalStack(StackOptions(model=_MODEL, drafts=(), target_threads=1)) as stack,
        stack.client() as client,
        Worker(stack.orchestrators[0]) as worker,
    ):

        async def serve(num: int) -> int:
            for start in range(0, num, _NUM_AT_ONCE):
                await asyncio.gather(*(client.complete(request()) for _ in range(min(_NUM_AT_ONCE, num - start))))
            return worker.resident_bytes()

        # One-time allocations happen with the first few hundred sessions.
        before = await serve(min(500, options.num_sessions))
        return max(0.0, (await serve(options.num_sessions) - before) / options.num_sessions)
