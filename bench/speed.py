"""Speed of the embedded target: plain decoding and speculation through the whole stack, compared with transformers.

All modes run the same weights, one at a time, in interleaved rounds, so that noise of the machine affects all equally;
the figures are ratios of medians over the rounds. transformers runs in a process of its own
(`bench.transformers_peer`), because the threads of two models in one process would disturb each other.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.models import transformers_name
from bench.peer import TransformersPeer
from bench.prompts import COPYING, VARIED
from bench.result import BenchResult, machine, median
from outrider.client import (
    Generation,
    GenerationRequest,
    LocalStack,
    Message,
    OutriderClient,
    Speculation,
    StackOptions,
)
from outrider.lm.embedded import NAME as EMBEDDED
from outrider.parameters import SamplingParameters

PLAIN: Final = "plain"
NGRAM: Final = "ngram"
TRANSFORMERS: Final = "transformers"
ASSISTED: Final = "transformers-prompt-lookup"
_NGRAM_LEN: Final = 8


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        num_rounds: interleaved runs, of which the median is reported.
        num_tokens: maximum output tokens per generation.
        num_varied: number of prompts whose answers do not copy.
        num_copying: number of prompts whose answers copy from the prompt.
        num_speculative_tokens: drafted tokens per round, also in transformers' prompt lookup.
    """

    num_rounds: int = 5
    num_tokens: int = 96
    num_varied: int = 3
    num_copying: int = 3
    num_speculative_tokens: int = 5


@dataclass(frozen=True, slots=True)
class _Run:
    """One generation: output tokens per second of the whole call, and speculation statistics."""

    tokens_per_second: float
    token_ids: tuple[int, ...]
    acceptance_rate: float
    tokens_per_pass: float


async def measure(options: Options) -> BenchResult:
    """Run all modes over all prompts, round after round."""
    prompts = [("varied", text) for text in VARIED[: options.num_varied]]
    prompts += [("copying", text) for text in COPYING[: options.num_copying]]
    runs: dict[tuple[str, int], list[_Run]] = {}
    environment = {"OUTRIDER_NUM_SPECULATIVE_TOKENS": str(options.num_speculative_tokens)}
    async with (
        LocalStack(StackOptions(orchestrator_environment=environment)) as stack,
        stack.client() as client,
        TransformersPeer(transformers_name(EMBEDDED)) as peer,
    ):
        for number in range(options.num_rounds + 1):
            for index, (_, text) in enumerate(prompts):
                for mode in (PLAIN, TRANSFORMERS, NGRAM, ASSISTED):
                    run = await _run(client, peer, mode, text, options)
                    if number:  # the first round warms everything up
                        runs.setdefault((mode, index), []).append(run)
    rows = [_row(kind, index, mode, runs[mode, index]) for index, (kind, _) in enumerate(prompts) for mode in _MODES]
    config = {**machine(), "model": "embedded, bfloat16", "decoding": "greedy", **_as_config(options)}
    return BenchResult("speed", config, rows, _figures(rows))


_MODES: Final = (PLAIN, NGRAM, TRANSFORMERS, ASSISTED)


def _as_config(options: Options) -> dict[str, int]:
    return {name: getattr(options, name) for name in Options.__dataclass_fields__}


async def _run(client: OutriderClient, peer: TransformersPeer, mode: str, text: str, options: Options) -> _Run:
    if mode in (TRANSFORMERS, ASSISTED):
        num = options.num_speculative_tokens if mode == ASSISTED else 0
        answer = await peer.chat(text, options.num_tokens, num)
        return _Run(len(answer["token_ids"]) / answer["seconds"], tuple(answer["token_ids"]), 0.0, 0.0)
    request = GenerationRequest(
        messages=[Message("user", text)],
        parameters=SamplingParameters(temperature=0, max_tokens=options.num_tokens),
        speculation=Speculation(disabled=mode == PLAIN),
    )
    started = asyncio.get_running_loop().time()
    generation: Generation = await client.complete(request, timeout_s=300)
    seconds = asyncio.get_running_loop().time() - started
    num_tokens, statistics = len(generation.token_ids), generation.statistics
    return _Run(
        num_tokens / seconds,
        tuple(generation.token_ids),
        statistics.acceptance_rate,
        num_tokens / statistics.num_target_passes,
    )


def _row(kind: str, index: int, mode: str, runs: Sequence[_Run]) -> dict[str, Any]:
    return {
        "prompt": f"{kind} {index}",
        "mode": mode,
        "tokens/s": median(run.tokens_per_second for run in runs),
        "acceptance": median(run.acceptance_rate for run in runs),
        "tokens/pass": median(run.tokens_per_pass for run in runs),
        "tokens": len(runs[0].token_ids),
        "repeated": repeated_share(runs[0].token_ids),
    }


def repeated_share(token_ids: Sequence[int]) -> float:
    """Return the share of tokens at which an n-gram of `_NGRAM_LEN` tokens ends that occurred before in the text.

    Small models repeat themselves under greedy decoding, which favours prompt lookup; this measures by how much.
    """
    seen: set[tuple[int, ...]] = set()
    num_repeated = 0
    for end in range(_NGRAM_LEN, len(token_ids) + 1):
        gram = tuple(token_ids[end - _NGRAM_LEN : end])
        num_repeated += gram in seen
        seen.add(gram)
    return num_repeated / max(1, len(token_ids))


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    speed = {(row["prompt"], row["mode"]): row["tokens/s"] for row in rows}
    prompts = sorted({row["prompt"] for row in rows})
    copying = [prompt for prompt in prompts if prompt.startswith("copying")]

    def ratio(mode: str, other: str, over: Sequence[str]) -> list[float]:
        return [speed[prompt, mode] / speed[prompt, other] for prompt in over]

    return {
        "plain_over_transformers": _mean(ratio(PLAIN, TRANSFORMERS, prompts)),
        "ngram_over_plain_copy": _mean(ratio(NGRAM, PLAIN, copying)),
        "speculation_over_plain_worst": min(ratio(NGRAM, PLAIN, prompts)),
        "ngram_over_transformers_assisted": _mean(ratio(NGRAM, ASSISTED, prompts)),
    }


def _mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean of ratios."""
    product = 1.0
    for value in ratios:
        product *= value
    return float(product ** (1 / len(ratios)))


def plot(result: BenchResult, path: Path) -> None:
    """Plot tokens per second of every mode for each prompt."""
    from bench.pictures import bars

    prompts = list(dict.fromkeys(row["prompt"] for row in result.rows))
    series = {mode: [row["tokens/s"] for row in result.rows if row["mode"] == mode] for mode in _MODES}
    bars(path, prompts, series, "tokens per second, greedy, whole calls")
