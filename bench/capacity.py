"""The number of sessions that a target serves at a given rate, with a colocated draft and with separate drafts.

A target with a colocated draft runs K draft steps per pass; separate drafts take over these steps, as long as they keep
up. So one target should serve about 1 + K t_draft / t_verify times as many sessions. Four drafts and a target do not
fit on a small machine: model passes are simulated by waiting, everything else is real.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.models import synthetic_pair
from bench.number_lists import numbers
from bench.progress import Step, progress
from bench.result import BenchResult, machine, median
from bench.traffic import Prompts, RequestTemplate, Trace, run_wave
from outrider.client import DraftOptions, LocalStack, OutriderClient, StackOptions
from outrider.errors import InvalidArgument
from outrider.lm.markov import MarkovModel

_TIMEOUT_S: Final = 600.0
_PROMPT_LEN: Final = 16
_WARM_TOKENS: Final = 24
COLOCATED: Final = "colocated"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        rate: required output tokens per second of each session.
        sessions: numbers of concurrent sessions, comma-separated, ascending.
        drafts: numbers of draft processes, comma-separated.
        num_tokens: output tokens per session.
        num_repeats: measurements per load, of which the median is reported.
        num_speculative_tokens: K, drafted tokens per round along one path.
        lookahead: nodes that a draft may hold ahead of verdicts; with 0 it waits for each verdict.
        acceptance: probability that the target outputs the draft's first choice.
        model: Markov model whose pass times the target simulates.
        draft: Markov model whose pass times the draft simulates, with a vocabulary of the same size.
    """

    rate: float = 12.0
    sessions: str = "1,2,4,8,16,32,64"
    drafts: str = "1,2,4"
    num_tokens: int = 96
    num_repeats: int = 1
    num_speculative_tokens: int = 4
    lookahead: int = 64
    acceptance: float = 0.8
    model: str = "markov:vocabulary=512;order=1;step_s=0.08;row_s=0.001;padding=4"
    draft: str = "markov:vocabulary=512;order=1;step_s=0.012;row_s=0.0002"


async def measure(options: Options) -> BenchResult:
    """Increase the load of each deployment until sessions get less than the rate."""
    loads = numbers("sessions", options.sessions, int, 1)
    if list(loads) != sorted(set(loads)):
        raise InvalidArgument(f"sessions is {options.sessions!r}, must ascend", "sessions")
    deployments = (0, *numbers("drafts", options.drafts, int, 1))
    rows: list[dict[str, Any]] = []
    with progress(len(deployments) * len(loads)) as step:
        for num_drafts in deployments:
            async with LocalStack(_stack(options, num_drafts)) as stack, stack.client() as client:
                rows += await _raise_load(options, client, num_drafts, loads, step)
    expected = _expected_gain(options)
    return BenchResult("capacity", {**machine(), **asdict(options)}, rows, _figures(rows, options.rate, expected))


def _stack(options: Options, num_drafts: int) -> StackOptions:
    target, draft = synthetic_pair(options.model, options.draft, options.acceptance)
    own = {"OUTRIDER_COLOCATED_DRAFTER": "model", "OUTRIDER_COLOCATED_MODEL": draft}
    return StackOptions(
        model=target,
        drafts=(DraftOptions(drafter="model", model=draft, num_replicas=num_drafts),) if num_drafts else (),
        target_environment={} if num_drafts else own,
        orchestrator_environment={
            "OUTRIDER_NUM_SPECULATIVE_TOKENS": str(options.num_speculative_tokens),
            "OUTRIDER_LOOKAHEAD": str(options.lookahead),
        },
    )


async def _raise_load(
    options: Options, client: OutriderClient, num_drafts: int, loads: Sequence[int], step: Step
) -> list[dict[str, Any]]:
    prompts = Prompts(MarkovModel.from_name(options.model.replace(";", ",")).info.vocabulary_size, num_drafts)
    await run_wave(client, [prompts.draw(_PROMPT_LEN)], RequestTemplate(_WARM_TOKENS, speculates=True))
    rows: list[dict[str, Any]] = []
    for num_sessions in loads:
        step(f"{num_drafts or 'no'} drafts, {num_sessions} sessions")
        rates, traces = [], []
        for _ in range(options.num_repeats):
            template = RequestTemplate(options.num_tokens, speculates=True, timeout_s=_TIMEOUT_S)
            wave = await run_wave(client, [prompts.draw(_PROMPT_LEN) for _ in range(num_sessions)], template)
            rates.append(median(trace.statistics.tokens_per_second for trace in wave))
            traces += wave
        rows.append(_row(num_drafts, num_sessions, median(rates), traces))
        if rows[-1]["rate"] < options.rate:
            break
    return rows


def _row(num_drafts: int, num_sessions: int, rate: float, traces: list[Trace]) -> dict[str, Any]:
    found = [trace.statistics for trace in traces]
    num_passes = sum(item.num_target_passes for item in found)
    return {
        "deployment": f"{num_drafts} drafts" if num_drafts else COLOCATED,
        "drafts": num_drafts,
        "sessions": num_sessions,
        "rate": rate,
        "tokens_per_round": sum(trace.num_tokens for trace in traces) / num_passes,
        "hit_rate": sum(item.num_hits for item in found) / num_passes,
        "wait_share": sum(item.wait_time_s for item in found) / sum(item.duration_s for item in found),
    }


def _expected_gain(options: Options) -> float:
    """Return 1 + K t_draft / t_verify of one session."""
    target, draft = (MarkovModel.from_name(name.replace(";", ",")).options for name in (options.model, options.draft))
    verify_s = target.step_s + (1 + options.num_speculative_tokens) * target.row_s
    return 1 + options.num_speculative_tokens * (draft.step_s + draft.row_s) / verify_s


def _figures(rows: list[dict[str, Any]], rate: float, expected: float) -> dict[str, float]:
    capacities: dict[int, float] = {}
    for num_drafts in dict.fromkeys(row["drafts"] for row in rows):
        points = [(row["sessions"], row["rate"]) for row in rows if row["drafts"] == num_drafts]
        capacities[num_drafts] = capacity(points, rate)
    figures = {"sessions_colocated": capacities[0], "gain_expected": expected}
    for num_drafts, sessions in capacities.items():
        if num_drafts:
            figures[f"sessions_{num_drafts}_drafts"] = sessions
            figures[f"capacity_over_colocated_{num_drafts}_drafts"] = sessions / capacities[0] if capacities[0] else 0.0
    return figures


def capacity(points: list[tuple[int, float]], rate: float) -> float:
    """Return the number of sessions that get a rate, interpolated logarithmically; 0 if the first load does not.

    Args:
        points: (number of sessions, tokens per second of a session), by ascending number.
        rate: required tokens per second of a session.
    """
    found = 0.0
    for place, (sessions, got) in enumerate(points):
        if got >= rate:
            found = float(sessions)
            continue
        if place == 0:
            return 0.0
        before, got_before = points[place - 1]
        part = math.log(got_before / rate) / math.log(got_before / got)
        return math.exp(math.log(before) + part * math.log(sessions / before))
    return found


def plot(result: BenchResult, path: Path) -> None:
    """Plot the rate per session over the number of sessions, for each deployment."""
    from bench.pictures import lines

    kinds = list(dict.fromkeys(row["deployment"] for row in result.rows))
    series = {
        kind: [(row["sessions"], row["rate"]) for row in result.rows if row["deployment"] == kind] for kind in kinds
    }
    lines(path, series, "sessions", "tokens per second of a session")
