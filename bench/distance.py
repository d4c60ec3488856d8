"""What distance between draft and target costs, and what drafting ahead of verdicts gives back.

Each node of the system is one core of this machine: the target has one, the draft the other, together with all that
takes no model (orchestrator, Redis, the proxy that delays, this bench). A planted pair does the work of real models
with random weights, and agrees as often as asked for (`outrider.lm.planted`). Measured in turn, so that a machine that
slows down slows all of them: plain decoding; the draft within the target's process, on the target's core and with both
cores; the draft on its own core at each round-trip time, synchronous (it waits for each verdict) and streaming. A real
pair can be measured the same way.
"""

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bench.kinds import KINDS
from bench.models import planted_pair, served_name
from bench.number_lists import numbers
from bench.progress import progress
from bench.proxy import Proxy
from bench.remote_draft import remote_draft
from bench.result import BenchResult, machine, median
from bench.traffic import Prompts, Trace, follow
from bench.worker import Worker
from outrider.client import GenerationRequest, LocalStack, Message, OutriderClient, Speculation, StackOptions
from outrider.client.events import Statistics
from outrider.errors import InvalidArgument
from outrider.parameters import SamplingParameters

PLAIN: Final = "plain"
COLOCATED: Final = "colocated"
BOTH_CORES: Final = "colocated, both cores"
SYNCHRONOUS: Final = "synchronous"
STREAMING: Final = "streaming"
_TIMEOUT_S: Final = 900.0
_ALONE: Final = (PLAIN, COLOCATED, BOTH_CORES)
_REMOTE: Final = (SYNCHRONOUS, STREAMING)
_WARM_TOKENS: Final = 24


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured.

    Attributes:
        rtts_ms: round-trip times between draft and target, with commas between them.
        acceptances: acceptance rates for which all round-trip times are measured, with commas between them.
        ends: acceptance rates for which the shortest and the longest one are measured only; may be empty.
        num_repeats: measurements of each case, of which the median counts.
        num_rounds: target passes of a measurement, at least.
        num_speculative_tokens: longest main line of a round.
        lookahead: nodes that a streaming draft may hold ahead of the text.
        model: whose passes the target runs. Two models on one machine share its memory's bandwidth, as nodes do not;
            models whose passes only take time share nothing:
            `markov:vocabulary=512;order=1;step_s=0.094;row_s=0.0053;padding=4`.
        draft: whose passes the draft runs; its vocabulary is as large.
        prompt_len: tokens of the prompt.
        temperature: 0 is greedy.
        drafter: of a real pair, such as eagle3: then nothing is planted, `model` and `draft` are what they are (`draft`
            may be empty), prompts are a user's, acceptance is what it is, and modes that need a draft within the
            target's process are left out where this drafter cannot be.
    """

    rtts_ms: str = "0,1,5,10,20,50"
    acceptances: str = "0.8"
    ends: str = "0.6,0.9"
    num_repeats: int = 5
    num_rounds: int = 250
    num_speculative_tokens: int = 7
    lookahead: int = 64
    model: str = "shape:1b"
    draft: str = "shape:1b-draft"
    prompt_len: int = 64
    temperature: float = 0.0
    drafter: str = ""

    @property
    def alone(self) -> tuple[str, ...]:
        """Modes without a draft elsewhere."""
        return _ALONE if self.drafter in ("", "model") else (PLAIN,)

    @property
    def grid(self) -> dict[float | None, tuple[float, ...]]:
        """Round-trip times in milliseconds by acceptance rate; None where that is not planted."""
        rtts = numbers("rtts_ms", self.rtts_ms, float, 0.0)
        if self.drafter:
            return {None: rtts}
        ends = tuple(dict.fromkeys((rtts[0], rtts[-1])))
        found: dict[float | None, tuple[float, ...]] = {}
        for acceptance in numbers("acceptances", self.acceptances, float, 0.0):
            found[acceptance] = rtts
        for acceptance in numbers("ends", self.ends, float, 0.0) if self.ends else ():
            found[acceptance] = ends
        return found


@dataclass(slots=True)
class _Case:
    """Measurements of one mode at one distance.

    Attributes:
        rates: tokens a second.
        predictions: what the target's controller makes of the rounds of each, given what was accepted.
        statistics: of all requests.
    """

    rates: list[float] = field(default_factory=list)
    predictions: list[float] = field(default_factory=list)
    statistics: list[Statistics] = field(default_factory=list)


async def measure(options: Options) -> BenchResult:
    """Measures all cases of all acceptance rates, one pair of models after the other."""
    if (os.cpu_count() or 1) < 2:
        raise InvalidArgument("this bench needs two cores", "cores")
    rows: list[dict[str, Any]] = []
    cores = sorted(os.sched_getaffinity(0))[:2]
    with progress(_num_steps(options)) as step, _pinned({cores[1]}):
        for acceptance, rtts in options.grid.items():
            async with _Site(options, acceptance, cores) as site:
                cases: defaultdict[tuple[str, float | None], _Case] = defaultdict(_Case)
                for _ in range(options.num_repeats):
                    for mode, rtt_ms in _cases(options, rtts):
                        pair = options.drafter if acceptance is None else f"acceptance {acceptance:g}"
                        step(f"{pair}, {mode}" + ("" if rtt_ms is None else f", {rtt_ms:g} ms"))
                        await site.measure(mode, rtt_ms, cases[mode, rtt_ms])
            rows += [_row(acceptance, mode, rtt_ms, case) for (mode, rtt_ms), case in cases.items()]
    return BenchResult("distance", {**machine(), **asdict(options)}, rows, _figures(rows))


def _cases(options: Options, rtts: tuple[float, ...]) -> Iterator[tuple[str, float | None]]:
    for mode in options.alone:
        yield mode, None
    for rtt_ms in rtts:
        for mode in _REMOTE:
            yield mode, rtt_ms


def _num_steps(options: Options) -> int:
    return options.num_repeats * sum(len(list(_cases(options, rtts))) for rtts in options.grid.values())


class _Site:
    """The stacks of one planted pair, each on its cores, and the delay between draft and target.

    Args:
        options: what is measured.
        acceptance: of the pair; None for a real one.
        cores: the target's and the draft's.
    """

    def __init__(self, options: Options, acceptance: float | None, cores: list[int]) -> None:
        self._options = options
        if acceptance is None:
            self._target, self._draft = served_name(options.model), options.draft and served_name(options.draft)
        else:
            self._target, self._draft = planted_pair(options.model, options.draft, acceptance)
        self._texts: Iterator[str] = iter(())
        self._cores = cores
        self._open = AsyncExitStack()
        self._clients: dict[str, OutriderClient] = {}
        self._seed = 0

    async def __aenter__(self) -> "_Site":
        try:
            await self._start()
        except BaseException:
            await self._open.aclose()
            raise
        return self

    async def __aexit__(self, *about: object) -> None:
        await self._open.aclose()

    async def _start(self) -> None:
        draft = await self._open.enter_async_context(remote_draft(self._draft, self._options.drafter or "model"))
        self._proxy = Proxy(draft.address)
        self._open.push_async_callback(self._proxy.close)
        address = await self._proxy.start()
        own = {"OUTRIDER_COLOCATED_DRAFTER": "model", "OUTRIDER_COLOCATED_MODEL": self._draft}
        one, both = frozenset(self._cores[:1]), frozenset(self._cores)
        stacks = {PLAIN: await self._stack({}, one, {"OUTRIDER_DRAFTS": address})}
        if COLOCATED in self._options.alone:
            stacks[COLOCATED] = await self._stack(own, one, {})
            stacks[BOTH_CORES] = await self._stack(own, both, {})
        for mode, stack in stacks.items():
            self._clients[mode] = await self._open.enter_async_context(stack.client())
        self._clients |= dict.fromkeys(_REMOTE, self._clients[PLAIN])
        async with Worker(stacks[PLAIN].targets[0]) as worker:
            self._vocabulary_size = (await worker.info()).vocabulary_size
        self._prompts = Prompts(self._vocabulary_size)
        self._texts = itertools.cycle(KINDS["chat"])
        for mode in (*self._options.alone, *_REMOTE):
            await self._generate(mode, _WARM_TOKENS)

    async def _stack(
        self, settings: Mapping[str, str], cores: frozenset[int], orchestrator: Mapping[str, str]
    ) -> LocalStack:
        options = StackOptions(
            model=self._target,
            drafts=(),
            target_threads=len(cores),
            target_cores=cores,
            target_environment=settings,
            orchestrator_environment={
                "OUTRIDER_NUM_SPECULATIVE_TOKENS": str(self._options.num_speculative_tokens),
                "OUTRIDER_DRAFT_MAX_WAIT_S": "1",
                **orchestrator,
            },
        )
        return await self._open.enter_async_context(LocalStack(options))

    async def measure(self, mode: str, rtt_ms: float | None, case: _Case) -> None:
        """Adds a measurement: as many tokens as the rounds give, at the pace of those before."""
        # All modes get the same prompts, so that none is lucky with what is accepted.
        self._prompts = Prompts(self._vocabulary_size, 1 + len(case.rates))
        self._texts = itertools.cycle(text for texts in zip(*KINDS.values(), strict=True) for text in texts)
        self._proxy.up.latency_s = self._proxy.down.latency_s = (rtt_ms or 0.0) / 2000
        await self._generate(mode, _WARM_TOKENS)
        num_rounds, seconds, num_tokens = 0, 0.0, 0
        num_expected, expected_s = 0, 0.0
        while num_rounds < self._options.num_rounds:
            trace = await self._generate(mode, self._options.num_rounds)
            num_rounds += trace.statistics.num_target_passes
            # From the first delta to the last: what came with the first one is not in this time.
            later = trace.num_tokens - 1
            if later < 1:
                continue
            num_tokens += later
            seconds += later / trace.statistics.tokens_per_second
            num_expected += trace.statistics.num_expected_tokens
            expected_s += trace.statistics.expected_time_s
            case.statistics.append(trace.statistics)
        case.rates.append(num_tokens / seconds)
        case.predictions.append(num_expected / expected_s)

    async def _generate(self, mode: str, num_tokens: int) -> Trace:
        options = self._options
        speculation = Speculation(disabled=mode == PLAIN, lookahead=0)
        if mode == STREAMING:
            speculation = replace(speculation, lookahead=options.lookahead)
        self._seed += 1
        is_real = bool(options.drafter)
        parameters = SamplingParameters(
            temperature=options.temperature, max_tokens=num_tokens, ignore_eos=not is_real, seed=self._seed
        )
        request = GenerationRequest(
            token_ids=None if is_real else tuple(self._prompts.draw(options.prompt_len)),
            messages=(Message("user", next(self._texts)),) if is_real else None,
            parameters=parameters,
            speculation=speculation,
        )
        return await follow(self._clients[mode], request, Trace(), _TIMEOUT_S)


@contextmanager
def _pinned(cores: set[int]) -> Iterator[None]:
    """Runs this thread, and the processes that it starts, on some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _row(acceptance: float | None, mode: str, rtt_ms: float | None, case: _Case) -> dict[str, Any]:
    found = case.statistics
    num_passes = sum(item.num_target_passes for item in found)
    duration_s = sum(item.duration_s for item in found)
    num_drafts = sum(item.num_drafts for item in found)
    return {
        "acceptance": acceptance,
        "mode": mode,
        "rtt_ms": rtt_ms,
        "tokens_per_s": median(case.rates),
        "least": min(case.rates),
        "most": max(case.rates),
        "num_rounds": num_passes,
        "hit_rate": sum(item.num_hits for item in found) / num_passes,
        "mean_acceptance_length": 1 + sum(item.num_accepted_tokens for item in found) / max(1, num_drafts),
        "wasted_nodes_per_round": sum(item.num_wasted_nodes for item in found) / num_passes,
        "model_share": sum(item.target_time_s for item in found) / duration_s,
        "wait_share": sum(item.wait_time_s for item in found) / duration_s,
        "queue_share": sum(item.queue_time_s for item in found) / duration_s,
        "predicted_tokens_per_s": median(case.predictions),
        "prediction_error": abs(median(case.predictions) / median(case.rates) - 1),
    }


def _figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the ratios at the first acceptance rate; the worst one, and the errors of predictions, over all."""
    rates = {(row["acceptance"], row["mode"], row["rtt_ms"]): row["tokens_per_s"] for row in rows}
    first = rows[0]["acceptance"]
    figures: dict[str, float] = {}
    for acceptance, mode, rtt_ms in rates:
        if acceptance != first or mode != STREAMING:
            continue
        streaming = rates[first, STREAMING, rtt_ms]
        figures[f"streaming_over_synchronous_rtt_{rtt_ms:g}ms"] = streaming / rates[first, SYNCHRONOUS, rtt_ms]
        for name, other in (("colocated", COLOCATED), ("colocated_both_cores", BOTH_CORES), ("plain", PLAIN)):
            if (first, other, None) in rates:
                figures[f"streaming_over_{name}_rtt_{rtt_ms:g}ms"] = streaming / rates[first, other, None]
    figures["streaming_over_plain_worst"] = min(
        rate / rates[acceptance, PLAIN, None] for (acceptance, mode, _), rate in rates.items() if mode == STREAMING
    )
    errors = [row["prediction_error"] for row in rows]
    return figures | {"prediction_error_median": median(errors), "prediction_error_worst": max(errors)}


def plot(result: BenchResult, path: Path) -> None:
    """Draws tokens a second of each mode for each round-trip time, at the first acceptance rate."""
    from bench.pictures import bars

    first = result.rows[0]["acceptance"]
    rows = [row for row in result.rows if row["acceptance"] == first]
    rtts = sorted({row["rtt_ms"] for row in rows if row["rtt_ms"] is not None})
    series = {}
    for mode in (*_ALONE, *_REMOTE):
        found = {row["rtt_ms"]: row["tokens_per_s"] for row in rows if row["mode"] == mode}
        if not found:
            continue
        series[mode] = [found[rtt_ms] if rtt_ms in found else found[None] for rtt_ms in rtts]
    pair = result.config["drafter"] if first is None else f"acceptance rate {first:g}"
    bars(path, [f"{rtt_ms:g} ms" for rtt_ms in rtts], series, f"tokens per second, {pair}")
