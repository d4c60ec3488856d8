"""The speculation controller under load: tokens per second of a target from one session to many.

Speculation increases throughput while a pass has room for more rows, and decreases it when passes are full. Each load
is measured with the controller, with speculation always on (every round waits for its whole proposal and verifies all
of it), and always off, in turn, so that a slow machine affects all three. Model passes are simulated by waiting;
everything else is real.
"""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.models import synthetic_pair
from bench.number_lists import numbers
from bench.progress import progress
from bench.result import BenchResult, machine, median
from bench.traffic import Prompts, RequestTemplate, Trace, run_wave
from outrider.client import DraftOptions, LocalStack, OutriderClient, StackOptions
from outrider.lm.markov import MarkovModel

CONTROLLER: Final = "controller"
ALWAYS: Final = "always on"
NEVER: Final = "always off"
_TIMEOUT_S: Final = 600.0
_PROMPT_LEN: Final = 16
_WARM_TOKENS: Final = 48


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        sessions: numbers of concurrent sessions, comma-separated.
        num_tokens: output tokens per session.
        num_repeats: measurements per load, of which the median is reported.
        num_speculative_tokens: drafted tokens per round along one path.
        lookahead: nodes that a draft may hold ahead of verdicts; with 0 it waits for each verdict.
        acceptance: probability that the target outputs the draft's first choice.
        model: Markov model whose pass times the target simulates.
        draft: Markov model whose pass times the draft simulates, with a vocabulary of the same size.
    """

    sessions: str = "1,2,4,8,16,32,64"
    num_tokens: int = 96
    num_repeats: int = 5
    num_speculative_tokens: int = 4
    lookahead: int = 64
    acceptance: float = 0.8
    model: str = "markov:vocabulary=512;order=1;step_s=0.04;row_s=0.002;padding=4"
    draft: str = "markov:vocabulary=512;order=1;step_s=0.006;row_s=0.0001"


async def measure(options: Options) -> BenchResult:
    """Measure each load in each mode in turn, `num_repeats` times."""
    loads = numbers("sessions", options.sessions, int, 1)
    vocabulary_size = MarkovModel.from_name(options.model.replace(";", ",")).info.vocabulary_size
    prompts = Prompts(vocabulary_size)
    traces: defaultdict[tuple[int, str], list[list[Trace]]] = defaultdict(list)
    async with AsyncExitStack() as stacks:
        clients = {
            CONTROLLER: await _client(stacks, options, {}),
            ALWAYS: await _client(stacks, options, {"OUTRIDER_ADAPTIVE_SPECULATION": "false"}),
        }
        clients[NEVER] = clients[CONTROLLER]
        for mode, client in clients.items():
            await run_wave(client, [prompts.draw(_PROMPT_LEN)], RequestTemplate(_WARM_TOKENS, speculates=mode != NEVER))
        with progress(options.num_repeats * len(loads) * len(clients)) as step:
            for _ in range(options.num_repeats):
                for num_sessions in loads:
                    for mode, client in clients.items():
                        step(f"{num_sessions} sessions, {mode}")
                        template = RequestTemplate(options.num_tokens, speculates=mode != NEVER, timeout_s=_TIMEOUT_S)
                        wave = await run_wave(
                            client, [prompts.draw(_PROMPT_LEN) for _ in range(num_sessions)], template
                        )
                        traces[num_sessions, mode].append(wave)
    rows = [_row(num_sessions, mode, waves) for (num_sessions, mode), waves in traces.items()]
    return BenchResult("sweep", {**machine(), **asdict(options)}, rows, _figures(rows))


async def _client(stacks: AsyncExitStack, options: Options, settings: Mapping[str, str]) -> OutriderClient:
    target, draft = synthetic_pair(options.model, options.draft, options.acceptance)
    stack_options = StackOptions(
        model=target,
        drafts=(DraftOptions(drafter="model", model=draft),),
        target_environment=settings,
        orchestrator_environment={
            "OUTRIDER_NUM_SPECULATIVE_TOKENS": str(options.num_speculative_tokens),
            "OUTRIDER_LOOKAHEAD": str(options.lookahead),
        },
    )
    stack = await stacks.enter_async_context(LocalStack(stack_options))
    return await stacks.enter_async_context(stack.client())


def _row(num_sessions: int, mode: str, waves: list[list[Trace]]) -> dict[str, Any]:
    rates = [sum(trace.statistics.tokens_per_second for trace in wave) for wave in waves]
    found = [trace.statistics for wave in waves for trace in wave]
    num_passes = sum(item.num_target_passes for item in found)
    duration_s = sum(item.duration_s for item in found)
    return {
        "sessions": num_sessions,
        "mode": mode,
        "tokens_per_s": median(rates),
        "least": min(rates),
        "most": max(rates),
        "tokens_per_round": sum(trace.num_tokens for wave in waves for trace in wave) / num_passes,
        "main_line": sum(item.num_draft_tokens for item in found) / num_passes,
        "hit_rate": sum(item.num_hits for item in found) / num_passes,
        "wait_share": sum(item.wait_time_s for item in found) / duration_s,
        "queue_share": sum(item.queue_time_s for item in found) / duration_s,
    }


def _figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    rates = {(row["sessions"], row["mode"]): row["tokens_per_s"] for row in rows}
    figures = {
        f"controller_over_better_{sessions}": rates[sessions, CONTROLLER]
        / max(rates[sessions, ALWAYS], rates[sessions, NEVER])
        for sessions in dict.fromkeys(row["sessions"] for row in rows)
    }
    return figures | {"controller_over_better_worst": min(figures.values())}


def plot(result: BenchResult, path: Path) -> None:
    """Plot tokens per second over the number of sessions, for each mode."""
    from bench.pictures import lines

    series = {
        mode: [(row["sessions"], row["tokens_per_s"]) for row in result.rows if row["mode"] == mode]
        for mode in (CONTROLLER, ALWAYS, NEVER)
    }
    lines(path, series, "sessions", "tokens per second of the target")
