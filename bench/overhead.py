"""Time per round outside the two models: gRPC, Redis, scheduling.

The models are trivial: a greedy Markov model, whose text soon repeats, and prompt lookup, which predicts repetitions.
The target waits for every proposal, so that each round has all steps: verdict, draft, proposal, verification, commit,
delta. The time of a round is that between two deltas at the client, minus the time of the target's passes.
"""

import itertools
import time
from dataclasses import dataclass
from pathlib import Path

from bench.result import BenchResult, machine, quantile
from outrider.client import (
    Delta,
    DraftOptions,
    Finished,
    GenerationRequest,
    LocalStack,
    OutriderClient,
    StackOptions,
)
from outrider.parameters import SamplingParameters

MODEL = "markov:vocabulary=16"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        num_requests: number of sequential requests.
        num_tokens: output tokens per request.
        num_speculative_tokens: drafted tokens per round.
    """

    num_requests: int = 10
    num_tokens: int = 300
    num_speculative_tokens: int = 4


async def measure(options: Options) -> BenchResult:
    """Run generations on a whole local stack with trivial models."""
    stack_options = StackOptions(
        model=MODEL,
        drafts=(DraftOptions(drafter="ngram"),),
        target_threads=1,
        target_environment={"OUTRIDER_ADAPTIVE_SPECULATION": "false"},
        orchestrator_environment={
            "OUTRIDER_NUM_SPECULATIVE_TOKENS": str(options.num_speculative_tokens),
            "OUTRIDER_DRAFT_MAX_WAIT_S": "1",
        },
    )
    rounds: list[float] = []
    rows = []
    async with LocalStack(stack_options) as stack, stack.client() as client:
        await _rounds(client, options, 0)  # warms the stack up
        for seed in range(1, options.num_requests + 1):
            gaps = await _rounds(client, options, seed)
            rounds += gaps
            rows.append(
                {"request": seed, "rounds": len(gaps), "p50_s": quantile(gaps, 0.5), "p99_s": quantile(gaps, 0.99)}
            )
    config = {**machine(), "model": MODEL, "num_speculative_tokens": options.num_speculative_tokens}
    figures = {"round_overhead_p50_s": quantile(rounds, 0.5), "round_overhead_p99_s": quantile(rounds, 0.99)}
    return BenchResult("overhead", config, rows, figures)


async def _rounds(client: OutriderClient, options: Options, seed: int) -> list[float]:
    """Return the seconds of each round of one generation, minus its mean model time."""
    request = GenerationRequest(
        token_ids=(1, 2, seed % 16), parameters=SamplingParameters(temperature=0, max_tokens=options.num_tokens)
    )
    times: list[float] = []
    async for event in client.generate(request, timeout_s=120):
        match event:
            case Delta():
                times.append(time.perf_counter())
            case Finished():
                model_s = event.statistics.target_time_s / event.statistics.num_target_passes
    # During the first rounds the draft is still opening the session.
    return [later - earlier - model_s for earlier, later in itertools.pairwise(times[3:])]


def plot(result: BenchResult, path: Path) -> None:
    """Plot p50 and p99 of each request."""
    from bench.pictures import bars

    series = {name: [row[f"{name}_s"] * 1e3 for row in result.rows] for name in ("p50", "p99")}
    bars(path, [str(row["request"]) for row in result.rows], series, "ms per round outside the models")
