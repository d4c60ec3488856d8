"""The cost of network latency between draft and target, and the gain of drafting ahead of verdicts.

Each node is one core of this machine: the target has one; the draft has the other, together with all processes without
a model (orchestrator, Redis, the delaying proxy, this benchmark). A synthetic pair runs models with random weights and
has a chosen acceptance rate (`outrider.lm.synthetic`). These modes are measured in turn, so that a slow machine affects
all of them: plain decoding; a colocated draft, on the target's core and with both cores; a remote draft at each
round-trip time, synchronous (it waits for each verdict) and streaming. A real pair can be measured the same way.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.distance_stacks import (
    BOTH_CORES,
    COLOCATED,
    LOCAL_MODES,
    PLAIN,
    REMOTE_MODES,
    STREAMING,
    SYNCHRONOUS,
    Case,
    Options,
    Stacks,
)
from bench.progress import progress
from bench.result import BenchResult, machine, median
from outrider.errors import InvalidArgument


async def measure(options: Options) -> BenchResult:
    """Measure all cases of all acceptance rates, one pair of models after another."""
    if (os.cpu_count() or 1) < 2:
        raise InvalidArgument("this benchmark needs two cores", "cores")
    rows: list[dict[str, Any]] = []
    cores = sorted(os.sched_getaffinity(0))[:2]
    with progress(_num_steps(options)) as step, _pinned({cores[1]}):
        for acceptance, rtts in options.grid.items():
            async with Stacks(options, acceptance, cores) as stacks:
                cases: defaultdict[tuple[str, float | None], Case] = defaultdict(Case)
                for _ in range(options.num_repeats):
                    for mode, rtt_ms in _cases(options, rtts):
                        pair = options.drafter if acceptance is None else f"acceptance {acceptance:g}"
                        step(f"{pair}, {mode}" + ("" if rtt_ms is None else f", {rtt_ms:g} ms"))
                        await stacks.measure(mode, rtt_ms, cases[mode, rtt_ms])
            rows += [_row(acceptance, mode, rtt_ms, case) for (mode, rtt_ms), case in cases.items()]
    return BenchResult("distance", {**machine(), **asdict(options)}, rows, _figures(rows))


def _cases(options: Options, rtts: tuple[float, ...]) -> Iterator[tuple[str, float | None]]:
    for mode in options.alone:
        yield mode, None
    for rtt_ms in rtts:
        for mode in REMOTE_MODES:
            yield mode, rtt_ms


def _num_steps(options: Options) -> int:
    return options.num_repeats * sum(len(list(_cases(options, rtts))) for rtts in options.grid.values())


@contextmanager
def _pinned(cores: set[int]) -> Iterator[None]:
    """Pin this thread, and the processes that it starts, to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _row(acceptance: float | None, mode: str, rtt_ms: float | None, case: Case) -> dict[str, Any]:
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
    """Return the ratios at the first acceptance rate, and the worst ratio and prediction errors over all rates."""
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
    """Plot tokens per second of each mode at each round-trip time, at the first acceptance rate."""
    from bench.pictures import bars

    first = result.rows[0]["acceptance"]
    rows = [row for row in result.rows if row["acceptance"] == first]
    rtts = sorted({row["rtt_ms"] for row in rows if row["rtt_ms"] is not None})
    series = {}
    for mode in (*LOCAL_MODES, *REMOTE_MODES):
        found = {row["rtt_ms"]: row["tokens_per_s"] for row in rows if row["mode"] == mode}
        if not found:
            continue
        series[mode] = [found[rtt_ms] if rtt_ms in found else found[None] for rtt_ms in rtts]
    pair = result.config["drafter"] if first is None else f"acceptance rate {first:g}"
    bars(path, [f"{rtt_ms:g} ms" for rtt_ms in rtts], series, f"tokens per second, {pair}")
