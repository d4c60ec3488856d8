"""Structured output: what constraints cost, what drafts and forced tokens gain with them, and the times of grammars.

`schema_over_free_N` compares plain decoding of as many tokens in N sessions, with a schema and without.
`speculation_over_plain_schema` compares requests that extract facts as JSON, with all that a request does by default
and without any proposal. All modes run in interleaved rounds; the figures are ratios of medians.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer

from bench.prompts import EXTRACTION
from bench.result import BenchResult, machine, median, quantile
from outrider.client import (
    DraftOptions,
    Generation,
    GenerationRequest,
    LocalStack,
    Message,
    OutriderClient,
    Speculation,
    StackOptions,
)
from outrider.constraint import Constraint
from outrider.grammar import GRAMMAR_LIBRARY
from outrider.grammar.compilation import compiled, load_tokenizer
from outrider.lm.embedded import ensure_embedded
from outrider.parameters import SamplingParameters

FREE: Final = "free"
SCHEMA: Final = "schema"
PLAIN: Final = "schema, plain"
SPECULATION: Final = "schema, speculation"
_ENDLESS: Final = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 200},
            "year": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["title", "year", "tags"],
        "additionalProperties": False,
    },
    "minItems": 100,
}
"""A schema whose outputs are longer than those that are measured."""
_LIST: Final = "Write a list of famous books with their years and subjects."
_FLOWS: Final = Speculation(disabled=True)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        num_rounds: interleaved runs, of which the median is reported.
        num_tokens: output tokens of the comparison with free text.
        sessions: numbers of sessions at once, separated by commas.
        num_prompts: prompts that extract facts.
        drafter: that proposes for them; at a service and within the target.
        model: the target.
    """

    num_rounds: int = 5
    num_tokens: int = 96
    sessions: str = "1,16"
    num_prompts: int = 6
    drafter: str = "block"
    model: str = "embedded"


async def measure(options: Options) -> BenchResult:
    """Run all modes, round after round, then time grammars in this process."""
    drafts = tuple(DraftOptions(drafter=options.drafter, at=place) for place in ("service", "target"))
    loads = [int(number) for number in options.sessions.split(",")]
    rates: dict[tuple[str, str], list[float]] = {}
    passes: dict[str, list[float]] = {}
    async with LocalStack(StackOptions(model=options.model, drafts=drafts)) as stack, stack.client() as client:
        for number in range(options.num_rounds + 1):
            measured = [*await _loads(client, loads, options), *await _extractions(client, options)]
            # The first round warms everything up.
            for what, mode, rate, num_passes in measured if number else ():
                rates.setdefault((what, mode), []).append(rate)
                passes.setdefault(f"{what} {mode}", []).append(num_passes)
    rows = [
        {"what": what, "mode": mode, "tokens/s": median(found), "tokens/pass": median(passes[f"{what} {mode}"])}
        for (what, mode), found in rates.items()
    ]
    times = _grammar_times(options.num_prompts)
    given = {name: getattr(options, name) for name in options.__slots__}
    config = {**machine(), "library": GRAMMAR_LIBRARY, **given}
    return BenchResult("grammar", config, [*rows, times], _figures(rows, loads, times))


async def _loads(client: OutriderClient, loads: Sequence[int], options: Options) -> list[tuple[str, str, float, float]]:
    """Return the rates of plain decoding with a schema and without, for each number of sessions.

    In each round both run twice, each once before the other: what slows down over time slows both down.
    """
    found = []
    free, schema = (FREE, None), (SCHEMA, Constraint(json_schema=json.dumps(_ENDLESS)))
    for num in loads:
        for mode, constraint in (free, schema, schema, free):
            parameters = SamplingParameters(temperature=0, max_tokens=options.num_tokens, ignore_eos=constraint is None)
            if constraint is not None:
                parameters = parameters.replace(constraint=constraint)
            started = time.perf_counter()
            outputs = await asyncio.gather(*(_complete(client, _LIST, parameters, _FLOWS) for _ in range(num)))
            rate = sum(len(item.token_ids) for item in outputs) / (time.perf_counter() - started)
            found.append((f"{num} sessions", mode, rate, 1.0))
    return found


async def _extractions(client: OutriderClient, options: Options) -> list[tuple[str, str, float, float]]:
    """Return the rates of requests that extract facts, with proposals and without; the text is the same."""
    found = []
    for number, (text, schema) in enumerate(EXTRACTION[: options.num_prompts]):
        parameters = SamplingParameters(
            temperature=0, max_tokens=256, constraint=Constraint(json_schema=json.dumps(schema))
        )
        texts = set()
        for mode, speculation in ((PLAIN, _FLOWS), (SPECULATION, Speculation())):
            started = time.perf_counter()
            output = await _complete(client, text, parameters, speculation)
            rate = len(output.token_ids) / (time.perf_counter() - started)
            texts.add(output.text)
            found.append(
                (f"extraction {number}", mode, rate, len(output.token_ids) / output.statistics.num_target_passes)
            )
        if len(texts) > 1:
            raise AssertionError(f"speculation changed the text: {texts}")
    return found


async def _complete(
    client: OutriderClient, text: str, parameters: SamplingParameters, speculation: Speculation
) -> Generation:
    request = GenerationRequest(messages=[Message("user", text)], parameters=parameters, speculation=speculation)
    return await client.complete(request, timeout_s=300)


def _grammar_times(num_prompts: int) -> dict[str, Any]:
    """Return how long the schemas take to compile, and a mask to compute, in this process alone."""
    tokenizer = load_tokenizer((ensure_embedded() / "tokenizer.json").read_text(), 49152, (2, 0))
    compile_s: list[float] = []
    mask_s: list[float] = []
    for _, schema in EXTRACTION[:num_prompts]:
        constraint = Constraint(json_schema=json.dumps(schema))
        started = time.perf_counter()
        matcher = compiled(constraint, tokenizer).deep_copy()
        compile_s.append(time.perf_counter() - started)
        mask_s += _mask_times(matcher, tokenizer)
    return {
        "what": "grammars",
        "mode": "in this process",
        "compile_ms": 1e3 * median(compile_s),
        "mask_us": 1e6 * median(mask_s),
        "mask_p99_us": 1e6 * quantile(mask_s, 0.99),
    }


def _mask_times(matcher: LLMatcher, tokenizer: LLTokenizer, most: int = 64) -> list[float]:
    """Return the seconds of each mask along an output that takes the lowest token that is allowed."""
    found = []
    for _ in range(most):
        started = time.perf_counter()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        found.append(time.perf_counter() - started)
        token_id = (mask & -mask).bit_length() - 1
        if token_id in tokenizer.eos_tokens or not matcher.consume_token(token_id):
            break
    return found


def _figures(rows: Sequence[dict[str, Any]], loads: Sequence[int], times: dict[str, Any]) -> dict[str, float]:
    speed = {(row["what"], row["mode"]): row["tokens/s"] for row in rows}
    ratios = [speed[what, mode] / speed[what, PLAIN] for what, mode in speed if mode == SPECULATION]
    product = 1.0
    for ratio in ratios:
        product *= ratio
    figures = {
        f"schema_over_free_{num}": speed[f"{num} sessions", SCHEMA] / speed[f"{num} sessions", FREE] for num in loads
    }
    figures["speculation_over_plain_schema"] = product ** (1 / len(ratios))
    return figures | {name: times[name] for name in ("compile_ms", "mask_us", "mask_p99_us")}


def plot(result: BenchResult, path: Path) -> None:
    """Plot tokens per second with proposals and without, for each prompt that extracts facts."""
    from bench.pictures import bars

    rows = [row for row in result.rows if row["what"].startswith("extraction")]
    prompts = list(dict.fromkeys(row["what"] for row in rows))
    series = {mode: [row["tokens/s"] for row in rows if row["mode"] == mode] for mode in (PLAIN, SPECULATION)}
    bars(path, prompts, series, "tokens per second, greedy, whole calls")
