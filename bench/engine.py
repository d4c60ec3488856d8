"""The target engine's performance: one session compared with transformers and the roofline, shared prefixes, memory.

The parts run on separate stacks, and are chosen by `part`:

- `speed`: one session, plain decoding through the whole stack, compared with transformers' `generate` in interleaved
  rounds; the share of the roofline, the token rate at which reading all weights saturates the memory bandwidth, which
  is read in every round; and the time to the first token of prompts that no session shares, compared likewise.
- `passes`: the milliseconds of a pass by part, and of sampling at temperature 0 and 1; see `bench.pass_parts`.
- `prefix`: many sessions with one long system prompt; see `bench.prefix`.
- `memory`: thousands of short sessions; see `bench.memory`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.memory import MemoryOptions, measure_memory
from bench.models import served_name, transformers_name
from bench.number_lists import numbers
from bench.pass_parts import measure_pass_parts
from bench.peer import TransformersPeer
from bench.prefix import PrefixOptions, measure_prefix
from bench.progress import Step, progress
from bench.result import BenchResult, machine, median
from bench.traffic import Prompts, RequestTemplate, run_wave
from bench.worker import Worker
from outrider.client import LocalStack, OutriderClient, StackOptions
from outrider.errors import InvalidArgument

_PARTS = ("speed", "passes", "prefix", "memory")
_PASS_SESSIONS = (1, 16)
_PASS_CONTEXT = 160


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        part: parts to run, of speed, passes, prefix and memory, comma-separated.
        model: model of speed, passes and prefix: a model name, or a shape such as `shape:8b`.
        num_rounds: interleaved runs, of which the median is reported.
        num_tokens: output tokens per run.
        prompt_len: prompt tokens per run.
        first_token_lens: prompt tokens of the runs that end with their first token, comma-separated.
        num_sharing: sessions that share a system prompt.
        prefix_len: tokens of the system prompt.
        memory_model: model of memory, where only the number of sessions matters.
        num_sessions: measured sessions of memory.
        num_warm: sessions before these, after which memory should not grow.
    """

    part: str = "speed,passes,prefix"
    model: str = "embedded"
    num_rounds: int = 5
    num_tokens: int = 96
    prompt_len: int = 32
    first_token_lens: str = "500,1000,2000"
    num_sharing: int = 32
    prefix_len: int = 1000
    memory_model: str = "shape:tiny"
    num_sessions: int = 2000
    num_warm: int = 2000

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts to run; raises `InvalidArgument` for an unknown part."""
        chosen = tuple(self.part.split(","))
        if unknown := [part for part in chosen if part not in _PARTS]:
            raise InvalidArgument(f"{unknown[0]!r} is not a part; the parts are {', '.join(_PARTS)}", "part")
        return chosen


@dataclass(frozen=True, slots=True)
class _Rates:
    """The output tokens per second of one round, the memory bandwidth in bytes per second, and times over others'."""

    plain: float
    decode: float
    transformers: float
    bandwidth: float
    first_token: dict[int, float]


async def measure(options: Options) -> BenchResult:
    """Run the chosen parts, one after another."""
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    parts = options.parts
    lens = numbers("first_token_lens", options.first_token_lens, int, 1)
    with progress(options.num_rounds + 6) as step:
        if "speed" in parts:
            rows, figures = await _measure_speed(options, lens, step)
        if "passes" in parts:
            step("parts of a pass")
            name = served_name(options.model)
            figures |= await asyncio.to_thread(measure_pass_parts, name, _PASS_SESSIONS, _PASS_CONTEXT)
        if "prefix" in parts:
            step("shared prefix")
            figures |= await measure_prefix(
                PrefixOptions(served_name(options.model), options.num_sharing, options.prefix_len)
            )
        if "memory" in parts:
            step("short sessions, warm-up")
            memory = MemoryOptions(served_name(options.memory_model), options.num_sessions, options.num_warm)
            figures |= await measure_memory(memory, step)
    return BenchResult("engine", {**machine(), **asdict(options)}, rows, figures)


async def _measure_speed(
    options: Options, lens: Sequence[int], step: Step
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run one session and transformers in turn; return a row per round, and the figures."""
    step("loading")
    async with (
        LocalStack(StackOptions(model=served_name(options.model), drafts=())) as stack,
        stack.client() as client,
        Worker(stack.targets[0]) as worker,
        TransformersPeer(transformers_name(options.model)) as peer,
    ):
        prompts = Prompts((await worker.info()).vocabulary_size)
        rounds = []
        for number in range(options.num_rounds + 1):
            step(f"round {number}")
            rates = await _round(client, peer, prompts, lens, options)
            if number:  # the first round warms everything up
                rounds.append(rates)
        return [asdict(rates) for rates in rounds], _speed_figures(rounds, peer.weight_bytes)


async def _round(
    client: OutriderClient, peer: TransformersPeer, prompts: Prompts, lens: Sequence[int], options: Options
) -> _Rates:
    prompt = prompts.draw(options.prompt_len)
    (trace,) = await run_wave(client, [prompt], RequestTemplate(options.num_tokens))
    seconds = trace.times_s[-1] - trace.started_s
    # The time to the first delta is prefill.
    decode_s = trace.times_s[-1] - trace.times_s[0]
    return _Rates(
        plain=trace.num_tokens / seconds,
        decode=(len(trace.times_s) - 1) / decode_s,
        transformers=options.num_tokens / await peer.generate(prompt, options.num_tokens),
        bandwidth=await peer.bandwidth(),
        first_token={length: await _first_token(client, peer, prompts.draw(length)) for length in lens},
    )


async def _first_token(client: OutriderClient, peer: TransformersPeer, prompt: tuple[int, ...]) -> float:
    """Return the time to the first token over that of transformers."""
    (trace,) = await run_wave(client, [prompt], RequestTemplate(1))
    return trace.first_token_s / await peer.generate(prompt, 1)


def _speed_figures(rounds: Sequence[_Rates], weight_bytes: int) -> dict[str, float]:
    bandwidth = median(rates.bandwidth for rates in rounds)
    decode = median(rates.decode for rates in rounds)
    return {
        "plain_over_transformers": median(rates.plain for rates in rounds)
        / median(rates.transformers for rates in rounds),
        "roofline_share": decode * weight_bytes / bandwidth,
        "decode_tokens_per_s": decode,
        "roofline_tokens_per_s": bandwidth / weight_bytes,
        "weight_bytes": float(weight_bytes),
        "read_bytes_per_s": bandwidth,
        **{
            f"ttft_over_transformers_{length}": median(rates.first_token[length] for rates in rounds)
            for length in rounds[0].first_token
        },
    }


def plot(result: BenchResult, path: Path) -> None:
    """Plot tokens per second of each round, if speed was measured."""
    from bench.pictures import bars

    names = ("plain", "decode", "transformers")
    series = {name: [row[name] for row in result.rows] for name in names}
    bars(path, [str(number) for number in range(1, len(result.rows) + 1)], series, "tokens per second, one session")
