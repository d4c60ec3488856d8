"""Many sessions at once, through the whole stack: total tokens per second, time to first token, gaps between deltas.

The target and its draft are a planted pair (`outrider.lm.planted`): both do the work of real models, and the draft is
as good as the options say. Every load is measured without and with speculation, one after the other, and compared with
transformers in a process of its own: `generate` for one session, continuous batching (`generate_batch`) for many.
Rates count output tokens over the whole time from the first request to the last token, prompts included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.models import planted_pair, transformers_name
from bench.number_lists import numbers
from bench.peer import TransformersPeer
from bench.progress import Step, progress
from bench.result import BenchResult, machine, median, quantile
from bench.stall import Stall, StallOptions, measure_stall
from bench.traffic import Ask, Prompts, Trace, run_wave
from bench.worker import Worker
from outrider.client import DraftOptions, LocalStack, OutriderClient, StackOptions
from outrider.errors import OutriderError
from outrider.lm.planted import NEXT_CHOICES

PLAIN: Final = "plain"
SPECULATION: Final = "speculation"
GENERATE: Final = "generate"
BATCH: Final = "generate_batch"
_MANY: Final = 16
_WAVE_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Options:
    """How much to measure.

    Attributes:
        sessions: numbers of sessions at once, with commas between them; the figures are those of 1 and 16.
        prompt_lens: tokens of the prompts, given to the sessions in turn, with commas between them.
        num_tokens: output tokens of each session.
        num_rounds: measurements of each load, of which the median counts.
        model: whose passes the target runs: any model's name, or `shape:8b` and the like.
        draft: whose passes the draft runs; its vocabulary is as large.
        draft_layers: first layers of the draft that are run; 0 for all.
        acceptance: probability that the target outputs the draft's first choice.
        num_speculative_tokens: tokens drafted per round.
        prefill_len: tokens of the long prompt that must not hold others up; 0 leaves that out.
        batch: `yes` compares with transformers' continuous batching, `no` leaves that out.
        temperature: of the served sessions; 0 is greedy.
    """

    sessions: str = "1,2,4,8,16,32"
    prompt_lens: str = "16,64,128,256"
    num_tokens: int = 128
    num_rounds: int = 1
    model: str = "embedded"
    draft: str = "shape:13m"
    draft_layers: int = 0
    acceptance: float = 0.8
    num_speculative_tokens: int = 5
    prefill_len: int = 2000
    batch: str = "yes"
    temperature: float = 0.0

    @property
    def loads(self) -> tuple[int, ...]:
        """Numbers of sessions at once."""
        return numbers("sessions", self.sessions, int, 1)

    def lengths(self, num_sessions: int) -> list[list[int]]:
        """Returns the prompt lengths of each wave of so many sessions; waves follow until all lengths have been."""
        known = numbers("prompt_lens", self.prompt_lens, int, 1)
        num_waves = -(-len(known) // num_sessions)
        lengths = [known[index % len(known)] for index in range(num_waves * num_sessions)]
        return [lengths[start : start + num_sessions] for start in range(0, len(lengths), num_sessions)]


async def measure(options: Options) -> BenchResult:
    """Starts a stack with a planted pair, and transformers beside it, and runs every load."""
    target, draft = planted_pair(options.model, options.draft, options.acceptance, options.draft_layers)
    stack_options = StackOptions(
        model=target,
        drafts=(DraftOptions(drafter="model", model=draft),),
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
            prompts = Prompts((await worker.info()).vocabulary_size)
            return await _Load(options, client, peer, prompts, step).run()


class _Load:
    """All measurements over one stack."""

    def __init__(
        self, options: Options, client: OutriderClient, peer: TransformersPeer, prompts: Prompts, step: Step
    ) -> None:
        self._options = options
        self._client = client
        self._peer = peer
        self._prompts = prompts
        self._step = step

    async def run(self) -> BenchResult:
        options = self._options
        await self._warm_up()
        rows = [await self._generate()]
        for num_sessions in options.loads:
            rows += await self._compare(num_sessions)
        batch, skipped = await self._batch()
        stall = await self._stall()
        config = {**machine(), **asdict(options), "next_choices": NEXT_CHOICES, "generate_batch": skipped or "measured"}
        return BenchResult("load", config, rows + batch, _figures(rows + batch) | _stall_figures(stall))

    async def _warm_up(self) -> None:
        self._step("warming up")
        for speculates in (False, True):
            ask = Ask(min(16, self._options.num_tokens), speculates, self._options.temperature, _WAVE_S)
            await run_wave(self._client, self._draw([16] * 2), ask)

    async def _generate(self) -> dict[str, Any]:
        """Measures transformers with one session: all prompt lengths, one after another."""
        self._step(GENERATE)
        prompts = self._draw([length for wave in self._options.lengths(1) for length in wave])
        await self._peer.generate(prompts[0], 2)
        rates = []
        for _ in range(self._options.num_rounds):
            seconds = [await self._peer.generate(prompt, self._options.num_tokens) for prompt in prompts]
            rates.append(self._options.num_tokens * len(prompts) / sum(seconds))
        return _row(1, GENERATE, median(rates))

    async def _compare(self, num_sessions: int) -> list[dict[str, Any]]:
        """Measures a load without and with speculation, in turns."""
        measured: dict[str, list[dict[str, Any]]] = {PLAIN: [], SPECULATION: []}
        for _ in range(self._options.num_rounds):
            for mode in measured:
                self._step(f"{num_sessions} sessions, {mode}")
                measured[mode].append(await self._served(num_sessions, mode))
        rows = [_median_row(measured[mode]) for mode in measured]
        rows[1]["over_plain"] = rows[1]["tokens/s"] / rows[0]["tokens/s"]
        return rows

    async def _served(self, num_sessions: int, mode: str) -> dict[str, Any]:
        options = self._options
        ask = Ask(options.num_tokens, mode == SPECULATION, options.temperature, _WAVE_S)
        waves = [await run_wave(self._client, self._draw(lens), ask) for lens in options.lengths(num_sessions)]
        seconds = sum(max(trace.times_s[-1] for trace in wave) - wave[0].started_s for wave in waves)
        traces = [trace for wave in waves for trace in wave]
        return _row(num_sessions, mode, sum(trace.num_tokens for trace in traces) / seconds, traces)

    async def _batch(self) -> tuple[list[dict[str, Any]], str]:
        """Measures continuous batching with the most sessions of which there is a figure; or says why not."""
        self._step(BATCH)
        if self._options.batch != "yes":
            return [], "left out"
        num_sessions = _MANY if _MANY in self._options.loads else max(self._options.loads)
        prompts = self._draw(self._options.lengths(num_sessions)[0])
        try:
            rate = await self._peer.batch(prompts, self._options.num_tokens, _WAVE_S)
        except OutriderError as error:
            return [], f"skipped: {error.message}"
        return [_row(num_sessions, BATCH, rate)], ""

    async def _stall(self) -> Stall | None:
        self._step("a long prompt beside decoding sessions")
        if not self._options.prefill_len:
            return None
        return await measure_stall(self._client, self._prompts, StallOptions(prefill_len=self._options.prefill_len))

    def _draw(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        return [self._prompts.draw(length) for length in lengths]


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
    }


def _acceptance(traces: Sequence[Trace]) -> float | None:
    """Returns the share of proposals whose first token was kept, which is what a planted draft's options name."""
    num_drafts = sum(trace.statistics.num_drafts for trace in traces)
    kept = sum(sum(trace.statistics.num_accepted_tokens_per_pos[:1]) for trace in traces)
    return kept / num_drafts if num_drafts else None


def _tokens_per_pass(traces: Sequence[Trace]) -> float | None:
    num_passes = sum(trace.statistics.num_target_passes for trace in traces)
    return sum(trace.num_tokens for trace in traces) / num_passes if num_passes else None


def _median_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the row of the median rate."""
    rate = median(row["tokens/s"] for row in rows)
    return next(row for row in rows if row["tokens/s"] == rate)


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the figures whose rows there are."""
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
    return 5 + 2 * options.num_rounds * len(options.loads)


def plot(result: BenchResult, path: Path) -> None:
    """Draws tokens per second over the number of sessions, without and with speculation."""
    from bench.pictures import lines

    modes = list(dict.fromkeys(row["mode"] for row in result.rows))
    series = {
        mode: [(row["sessions"], row["tokens/s"]) for row in result.rows if row["mode"] == mode] for mode in modes
    }
    lines(path, series, "sessions at once", "tokens per second, all sessions together")
