"""The quality of a draft: its acceptance on forty prompts of four kinds, and the speedup over plain decoding.

Both are measured for chains, and for trees if the drafter supports them. For acceptance every round waits for a whole
proposal; for speed the policy may skip speculation, as in service. If transformers can run the draft, its assisted
generation with the same draft is measured for comparison.
"""

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

from bench.kinds import KINDS
from bench.models import served_name, transformers_name
from bench.peer import TransformersPeer
from bench.prompts import COPYING
from bench.result import BenchResult, machine, median
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
from outrider.drafter_names import main_of
from outrider.lm.embedded import NAME as EMBEDDED
from outrider.parameters import SamplingParameters
from outrider.statistics import SpeculationStatistics

_GREEDY: Final = 0.0
_TREES: Final = ("model", "eagle3", "block", "medusa")
_PATIENT: Final = {"OUTRIDER_DRAFT_MAX_WAIT_S": "30"}
_COPY: Final = "copy"
_ALWAYS_SPECULATES: Final = {"OUTRIDER_ADAPTIVE_SPECULATION": "false"}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        drafter: ngram, suffix, model, layers, eagle3, block or medusa; or one combined with suffix, as eagle3+suffix.
        draft: model or folder of the draft, if the drafter has one; empty with block and eagle3 for the shipped heads.
        num_layers: number of target layers of a `layers` draft.
        at: where it runs: service, or target, within the target's process.
        model: target model.
        num_prompts: prompts per kind.
        num_copies: prompts of a fifth kind, whose answers copy them, with figures of their own.
        num_tokens: maximum output tokens per generation.
        num_speculative_tokens: drafted tokens per round along one path.
        max_nodes: maximum nodes of a tree.
        assisted: 1 to measure transformers' assisted generation too, for a `model` draft in a folder; 0 not to.
    """

    drafter: str = "block+suffix"
    draft: str = ""
    num_layers: int = 4
    at: str = "service"
    model: str = EMBEDDED
    num_prompts: int = 10
    num_copies: int = 0
    num_tokens: int = 64
    num_speculative_tokens: int = 4
    max_nodes: int = 7
    assisted: int = 1

    @property
    def prompts(self) -> dict[str, tuple[str, ...]]:
        """The prompts by their kind."""
        prompts = {kind: prompts[: self.num_prompts] for kind, prompts in KINDS.items()}
        return {**prompts, _COPY: COPYING[: self.num_copies]} if self.num_copies else prompts


async def measure(options: Options) -> BenchResult:
    """Measure acceptance (`pos k`, mean acceptance `length`), then speed in tokens per second, and waits (`wait_s`)."""
    drafted = await _drafted(options)
    speeds = {temperature: await _speeds(options, temperature) for temperature in (_GREEDY, 1.0)}
    depth = options.num_speculative_tokens
    rows = [_row(case, found, depth, speeds[case.temperature]) for case, found in drafted.items()]
    config = {**machine(), **{name: getattr(options, name) for name in Options.__dataclass_fields__}}
    return BenchResult("drafts", config, rows, _figures(drafted, speeds))


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of prompt, a temperature, and a proposal shape."""

    kind: str
    temperature: float
    shape: str


def _shapes(options: Options) -> dict[str, Speculation]:
    """Return the speculation parameters of each proposal shape."""
    depth = options.num_speculative_tokens
    shapes = {"chain": Speculation(num_speculative_tokens=depth, max_nodes=depth, lookahead=0)}
    if main_of(options.drafter) in _TREES and options.max_nodes > depth:
        shapes["tree"] = Speculation(num_speculative_tokens=depth, max_nodes=options.max_nodes, lookahead=0)
    return shapes


async def _drafted(options: Options) -> dict[Case, SpeculationStatistics]:
    """Return the speculation statistics of each case."""
    found: dict[Case, SpeculationStatistics] = {}
    async with _stack(options, patient=True) as stack, stack.client() as client:
        for temperature, (shape, speculation) in product((_GREEDY, 1.0), _shapes(options).items()):
            for kind, prompts in options.prompts.items():
                for text in prompts:
                    generation, _ = await _generate(client, text, temperature, options, speculation)
                    case = Case(kind, temperature, shape)
                    found.setdefault(case, SpeculationStatistics()).add(_counts(generation))
    return found


@dataclass(slots=True)
class _Speeds:
    """Speeds at a temperature.

    Attributes:
        rates: tokens per second, by mode and kind of prompt.
        waits_s: of each request the seconds that its target waited for a proposal, in the mean, by mode.
    """

    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    waits_s: dict[str, list[float]] = field(default_factory=dict)


async def _speeds(options: Options, temperature: float) -> _Speeds:
    """Return the speeds at a temperature; transformers' only greedily."""
    modes = {"plain": Speculation(disabled=True), **_shapes(options)}
    speeds = _Speeds({mode: {} for mode in modes}, {mode: [] for mode in modes})
    compares = options.drafter == "model" and options.assisted and Path(options.draft).is_dir()
    compares = compares and temperature == _GREEDY
    async with AsyncExitStack() as open_until_done:
        stack = await open_until_done.enter_async_context(_stack(options, patient=False))
        client = await open_until_done.enter_async_context(stack.client())
        peer = None
        if compares:
            peer = await open_until_done.enter_async_context(TransformersPeer(transformers_name(options.model)))
        for kind, prompts in options.prompts.items():
            for text in prompts:
                for mode, speculation in modes.items():
                    generation, rate = await _generate(client, text, temperature, options, speculation)
                    speeds.rates[mode].setdefault(kind, []).append(rate)
                    if generation.statistics.num_drafts:
                        wait_s = generation.statistics.wait_time_s / generation.statistics.num_drafts
                        speeds.waits_s[mode].append(wait_s)
                if peer is not None:
                    answer = await peer.assist(text, options.num_tokens, options.draft)
                    rate = len(answer["token_ids"]) / answer["seconds"]
                    speeds.rates.setdefault("assisted", {}).setdefault(kind, []).append(rate)
    return speeds


def _stack(options: Options, *, patient: bool) -> LocalStack:
    draft = DraftOptions(options.drafter, options.draft, options.num_layers, at=options.at)
    environment = {"OUTRIDER_NUM_SPECULATIVE_TOKENS": str(options.num_speculative_tokens)}
    return LocalStack(
        StackOptions(
            model=served_name(options.model),
            drafts=(draft,),
            target_environment=_ALWAYS_SPECULATES if patient else {},
            orchestrator_environment={**environment, **(_PATIENT if patient else {})},
        )
    )


async def _generate(
    client: OutriderClient, text: str, temperature: float, options: Options, speculation: Speculation
) -> tuple[Generation, float]:
    request = GenerationRequest(
        messages=[Message("user", text)],
        parameters=SamplingParameters(temperature=temperature, seed=1, max_tokens=options.num_tokens),
        speculation=speculation,
    )
    started_s = asyncio.get_running_loop().time()
    generation = await client.complete(request, timeout_s=300)
    return generation, len(generation.token_ids) / (asyncio.get_running_loop().time() - started_s)


def _counts(generation: Generation) -> SpeculationStatistics:
    given = generation.statistics
    return SpeculationStatistics(
        num_drafts=given.num_drafts,
        num_draft_tokens=given.num_draft_tokens,
        num_accepted_tokens=given.num_accepted_tokens,
        num_accepted_tokens_per_pos=list(given.num_accepted_tokens_per_pos),
    )


def _row(case: Case, found: SpeculationStatistics, depth: int, speeds: _Speeds) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": case.kind, "temperature": case.temperature, "proposal": case.shape}
    rates = found.acceptance_rates
    row |= {f"pos {place + 1}": rates[place] if place < len(rates) else None for place in range(depth)}
    row["length"] = found.mean_acceptance_length
    for name, mode in (("plain", "plain"), ("drafted", case.shape), ("assisted", "assisted")):
        measured = speeds.rates.get(mode, {}).get(case.kind)
        row[name] = median(measured) if measured else None
    return row


def _figures(drafted: dict[Case, SpeculationStatistics], speeds: dict[float, _Speeds]) -> dict[str, float]:
    """Return the figures of trees, if there are any, and of chains."""
    rates, sampled_rates = speeds[_GREEDY].rates, speeds[1.0].rates
    shapes = [mode for mode in ("tree", "chain") if mode in rates]
    figures: dict[str, float] = {}
    for shape in shapes:
        greedy, sampled = SpeculationStatistics(), SpeculationStatistics()
        for case, found in drafted.items():
            if case.shape == shape and case.kind != _COPY:
                (greedy if case.temperature == _GREEDY else sampled).add(found)
        suffix = "" if shape == shapes[0] else f"_{shape}"
        by_position, waits_s = greedy.acceptance_rates, speeds[_GREEDY].waits_s[shape]
        figures |= {
            f"acceptance_rate_pos_1_greedy{suffix}": by_position[0] if by_position else 0.0,
            f"mean_acceptance_length_greedy{suffix}": greedy.mean_acceptance_length,
            f"mean_acceptance_length_t1{suffix}": sampled.mean_acceptance_length,
            f"shipped_over_plain_greedy{suffix}": _over(rates[shape], rates["plain"]),
            f"shipped_over_plain_t1{suffix}": _over(sampled_rates[shape], sampled_rates["plain"]),
            f"proposal_p50_s{suffix}": median(waits_s) if waits_s else 0.0,
        }
        if _COPY in rates["plain"]:
            figures[f"shipped_over_plain_copies{suffix}"] = _over(rates[shape], rates["plain"], (_COPY,))
        if "assisted" in rates:
            figures[f"shipped_over_transformers_assisted{suffix}"] = _over(rates[shape], rates["assisted"])
    return figures


def _over(some: dict[str, list[float]], others: dict[str, list[float]], kinds: Iterable[str] = KINDS) -> float:
    """Return the geometric mean, over all prompts of some kinds, of the ratio of two speeds."""
    ratios = [one / other for kind in kinds for one, other in zip(some[kind], others[kind], strict=True)]
    product = 1.0
    for ratio in ratios:
        product *= ratio ** (1 / len(ratios))
    return product


def plot(result: BenchResult, path: Path) -> None:
    """Plot the acceptance rate at each position for each kind of prompt."""
    from bench.pictures import bars

    labels = [f"{row['kind']}, {row['proposal']}, T={row['temperature']:g}" for row in result.rows]
    places = sorted({name for name in result.rows[0] if name.startswith("pos ")})
    bars(path, labels, {name: [row[name] or 0.0 for row in result.rows] for name in places}, "acceptance rate")
