"""Concurrent sessions through the whole stack: throughput, time to first token, inter-token latency.

Target and draft are a synthetic pair (`outrider.lm.synthetic`): both run the passes of real models, and the draft has a
chosen acceptance rate. With another drafter than `model` the target is the model itself, which answers questions. Every
load is measured without and with speculation, and compared with transformers in a process of its own: `generate` for
one session, continuous batching (`generate_batch`) for many. Throughput is the number of output tokens divided by the
time from the first request to the last token, prefill included.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import stdev
from typing import Any, Final

from bench.models import served_name, synthetic_pair, transformers_name
from bench.number_lists import numbers
from bench.peer import TransformersPeer
from bench.progress import Step, progress
from bench.result import BenchResult, machine, median, quantile
from bench.stall import Stall, StallOptions, measure_stall
from bench.traffic import Prompts, Questions, RequestTemplate, Trace, run_wave
from bench.worker import Worker
from outrider.client import DraftOptions, LocalStack, OutriderClient, StackOptions
from outrider.errors import OutriderError
from outrider.lm.synthetic import NEXT_CHOICES

PLAIN: Final = "plain"
SPECULATION: Final = "speculation"
GENERATE: Final = "generate"
BATCH: Final = "generate_batch"
_MANY: Final = 16
_WAVES: Final = 8
_SESSIONS: Final = 64
"""Waves of a round, and sessions of them all, at most, so far as there are several. One wave takes two to ten seconds,
and of two equal ones the second takes 4 to 12 % more or less time on two cores of a machine that others use too."""
_APART_S: Final = 0.01
"""Seconds from each request of a wave to the next: sent at once, they come in any order, and which prompt is read first
makes waves of 2 and 4 sessions by a tenth longer or shorter."""
_WAVE_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        sessions: numbers of concurrent sessions, comma-separated; the figures are of 1 and 16; without 16 there is no
            comparison with transformers.
        prompt_lens: prompt lengths, in tokens, assigned to the sessions in turn, comma-separated; questions have their
            own.
        num_tokens: output tokens per session.
        num_rounds: rounds per load, of which the median is reported, also of speculation over plain decoding, with its
            standard error: on cores that others use too it may be 0.02 and more. A round
            has up to eight waves, of 64 sessions together: all takes 20 minutes on two cores.
        model: base model of the target: a model name, or a shape such as `shape:8b`.
        drafter: model, for the synthetic pair; or a drafter of the model itself: block or eagle3 for the shipped heads,
            suffix, ngram.
        at: where it runs: service, or target, within the target's process.
        draft: base model of the draft, with a vocabulary of the same size.
        draft_layers: number of first layers of the draft to run; 0 for all.
        acceptance: probability that the target outputs the draft's first choice.
        num_speculative_tokens: drafted tokens per round along one path.
        prefill_len: tokens of the long prompt whose effect on other sessions is measured; 0 to skip that.
        batch: `yes` to compare with transformers' continuous batching, `no` not to.
        temperature: sampling temperature of the served sessions; 0 is greedy.
    """

    sessions: str = "1,2,4,8,16,32"
    prompt_lens: str = "16,64,128,256"
    num_tokens: int = 128
    num_rounds: int = 5
    model: str = "embedded"
    drafter: str = "model"
    at: str = "service"
    draft: str = "shape:13m"
    draft_layers: int = 0
    acceptance: float = 0.8
    num_speculative_tokens: int = 5
    prefill_len: int = 2000
    batch: str = "yes"
    temperature: float = 0.0

    @property
    def is_synthetic(self) -> bool:
        """Whether target and draft are a synthetic pair."""
        return self.drafter == "model"

    @property
    def loads(self) -> tuple[int, ...]:
        """Numbers of concurrent sessions."""
        return numbers("sessions", self.sessions, int, 1)

    @property
    def known_lengths(self) -> tuple[int, ...]:
        """Prompt lengths, each once."""
        return numbers("prompt_lens", self.prompt_lens, int, 1)

    def lengths(self, num_sessions: int) -> list[list[int]]:
        """Return the prompt lengths of a round's waves of `num_sessions` sessions; together they have all lengths."""
        known = self.known_lengths
        num_waves = max(-(-len(known) // num_sessions), min(_WAVES, _SESSIONS // num_sessions))
        lengths = [known[index % len(known)] for index in range(num_waves * num_sessions)]
        return [lengths[start : start + num_sessions] for start in range(0, len(lengths), num_sessions)]


async def measure(options: Options) -> BenchResult:
    """Start a stack with a synthetic pair, and transformers for comparison, and run every load."""
    target, draft = served_name(options.model), ""
    if options.is_synthetic:
        target, draft = synthetic_pair(options.model, options.draft, options.acceptance, options.draft_layers)
    stack_options = StackOptions(
        model=target,
        drafts=(DraftOptions(options.drafter, draft, at=options.at),),
        orchestrator_environment={"OUTRIDER_NUM_SPECULATIVE_TOKENS": str(options.num_speculative_tokens)},
    )
    with progress(_num_steps(options)) as step:
        step("loading")
        async with (
            LocalStack(stack_options) as stack,
            stack.client() as client,
            Worker(stack.targets[0]) as worker,
            TransformersPeer(transformers_name(options.model)) as peer,
        ):
            vocabulary_size = (await worker.info()).vocabulary_size
            prompts = Prompts(vocabulary_size)
            questions = None if options.is_synthetic else Questions(transformers_name(options.model))
            return await _Load(options, client, peer, prompts, questions, step).run()


class _Load:
    """The measurements on one stack."""

    def __init__(
        self,
        options: Options,
        client: OutriderClient,
        peer: TransformersPeer,
        prompts: Prompts,
        questions: Questions | None,
        step: Step,
    ) -> None:
        self._options = options
        self._client = client
        self._peer = peer
        self._prompts = prompts
        self._questions = questions
        self._step = step

    async def run(self) -> BenchResult:
        options = self._options
        await self._warm_up()
        # Only the figures of many sessions are compared with it, and a round of it takes half a minute.
        rows = [await self._generate()] if _MANY in options.loads else []
        for num_sessions in options.loads:
            rows += await self._compare(num_sessions)
        batch, skipped = await self._batch()
        stall = await self._stall()
        config = {**machine(), **asdict(options), "next_choices": NEXT_CHOICES, "generate_batch": skipped or "measured"}
        return BenchResult("load", config, rows + batch, _figures(rows + batch) | _stall_figures(stall))

    async def _warm_up(self) -> None:
        self._step("warming up")
        for speculates in (False, True):
            template = RequestTemplate(
                min(16, self._options.num_tokens), speculates, self._options.temperature, _WAVE_S
            )
            await run_wave(self._client, self._draw([16] * 2), template)

    async def _generate(self) -> dict[str, Any]:
        """Measure transformers with one session at a time, over all prompt lengths."""
        self._step(GENERATE)
        prompts = self._draw(self._options.known_lengths)
        await self._peer.generate(prompts[0], 2)
        rates = []
        for _ in range(self._options.num_rounds):
            seconds = [await self._peer.generate(prompt, self._options.num_tokens) for prompt in prompts]
            rates.append(self._options.num_tokens * len(prompts) / sum(seconds))
        return _row(1, GENERATE, median(rates))

    async def _compare(self, num_sessions: int) -> list[dict[str, Any]]:
        """Measure a load without and with speculation, wave by wave in turn; each wave begins with the other."""
        rows: dict[str, list[dict[str, Any]]] = {PLAIN: [], SPECULATION: []}
        order = [PLAIN, SPECULATION]
        for _ in range(self._options.num_rounds):
            waves: dict[str, list[list[Trace]]] = {PLAIN: [], SPECULATION: []}
            for lengths in self._options.lengths(num_sessions):
                for mode in order:
                    self._step(f"{num_sessions} sessions, {mode}")
                    waves[mode].append(await self._wave(lengths, mode))
                order.reverse()
            for mode in rows:
                rows[mode].append(_round_row(num_sessions, mode, waves[mode]))
        medians = [_median_row(rows[mode]) for mode in rows]
        # Of the rounds, since the machine's speed changes from one to the next.
        rounds = zip(rows[SPECULATION], rows[PLAIN], strict=True)
        ratios = [speculation["tokens/s"] / plain["tokens/s"] for speculation, plain in rounds]
        medians[1] |= {"over_plain": median(ratios), "over_plain_se": _standard_error(ratios)}
        return medians

    async def _wave(self, lengths: Sequence[int], mode: str) -> list[Trace]:
        template = RequestTemplate(self._options.num_tokens, mode == SPECULATION, self._options.temperature, _WAVE_S)
        return await run_wave(self._client, self._draw(lengths), template, _APART_S)

    async def _batch(self) -> tuple[list[dict[str, Any]], str]:
        """Measure continuous batching; return its row, or the reason why it was skipped."""
        self._step(BATCH)
        if self._options.batch != "yes":
            return [], "not measured"
        num_sessions = _MANY if _MANY in self._options.loads else max(self._options.loads)
        prompts = self._draw(self._options.lengths(num_sessions)[0])
        try:
            rate = await self._peer.batch(prompts, self._options.num_tokens, _WAVE_S)
        except OutriderError as error:
            return [], f"skipped: {error.message}"
        return [_row(num_sessions, BATCH, rate)], ""

    async def _stall(self) -> Stall | None:
        self._step("long prompt during decoding")
        if not self._options.prefill_len:
            return None
        return await measure_stall(self._client, self._prompts, StallOptions(prefill_len=self._options.prefill_len))

    def _draw(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        if self._questions is not None:
            return [self._questions.draw() for _ in lengths]
        return [self._prompts.draw(length) for length in lengths]


def _round_row(num_sessions: int, mode: str, waves: Sequence[Sequence[Trace]]) -> dict[str, Any]:
    seconds = sum(max(trace.times_s[-1] for trace in wave) - wave[0].started_s for wave in waves)
    traces = [trace for wave in waves for trace in wave]
    return _row(num_sessions, mode, sum(trace.num_tokens for trace in traces) / seconds, traces)


def _row(num_sessions: int, mode: str, rate: float, traces: Sequence[Trace] = ()) -> dict[str, Any]:
    gaps = [later - earlier for trace in traces for earlier, later in trace.gaps]
    first = [trace.first_token_s for trace in traces]
    return {
        "sessions": num_sessions,
        "mode": mode,
        "tokens/s": rate,
        "ttft_p50_s": quantile(first, 0.5) if first else None,
        "itl_p50_s": quantile(gaps, 0.5) if gaps else None,
        "itl_p99_s": quantile(gaps, 0.99) if gaps else None,
        "acceptance": _acceptance(traces),
        "tokens/pass": _tokens_per_pass(traces),
        "over_plain": None,
        "over_plain_se": None,
    }


def _standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of their median, as of a normal distribution; None of one value."""
    return math.sqrt(math.pi / 2 / len(values)) * stdev(values) if len(values) > 1 else None


def _acceptance(traces: Sequence[Trace]) -> float | None:
    """Return the acceptance rate at the first position, which the options of the synthetic pair set; None for none."""
    num_drafts = sum(trace.statistics.num_drafts for trace in traces)
    kept = sum(sum(trace.statistics.num_accepted_tokens_per_pos[:1]) for trace in traces)
    return kept / num_drafts if num_drafts else None


def _tokens_per_pass(traces: Sequence[Trace]) -> float | None:
    num_passes = sum(trace.statistics.num_target_passes for trace in traces)
    return sum(trace.num_tokens for trace in traces) / num_passes if num_passes else None


def _median_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of the median rate."""
    rate = median(row["tokens/s"] for row in rows)
    return next(row for row in rows if row["tokens/s"] == rate)


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures that the rows allow."""
    rates = {(row["sessions"], row["mode"]): row["tokens/s"] for row in rows}
    many, figures = (_MANY, PLAIN), {}
    for name, other in (
        ("throughput_16_over_1", (1, PLAIN)),
        ("throughput_16_over_transformers", (1, GENERATE)),
        ("throughput_16_over_generate_batch", (_MANY, BATCH)),
    ):
        if many in rates and other in rates:
            figures[name] = rates[many] / rates[other]
    figures["speculation_over_plain_worst"] = min(row["over_plain"] for row in rows if row["over_plain"])
    return figures


def _stall_figures(stall: Stall | None) -> dict[str, float]:
    if stall is None or not stall.ratio:
        return {}
    return {
        "itl_p99_under_prefill_over_p50": stall.ratio,
        "itl_p50_quiet_s": quantile(stall.quiet, 0.5),
        "prefill_under_load_s": median(stall.prefill_s),
    }


def _num_steps(options: Options) -> int:
    num_waves = sum(len(options.lengths(num_sessions)) for num_sessions in options.loads)
    return 5 + 2 * options.num_rounds * num_waves


def plot(result: BenchResult, path: Path) -> None:
    """Plot tokens per second over the number of sessions, without and with speculation."""
    from bench.pictures import lines

    modes = list(dict.fromkeys(row["mode"] for row in result.rows))
    series = {
        mode: [(row["sessions"], row["tokens/s"]) for row in result.rows if row["mode"] == mode] for mode in modes
    }
    lines(path, series, "concurrent sessions", "tokens per second, all sessions together")
