"""vLLM with remote drafts against vLLM alone, with a draft in its process, and with drafts that fail.

Each node is one core of this machine: vLLM has one; the draft service, the delaying proxy and this benchmark have the
other. Three parts, each with runs that alternate:

- speed: a target whose steps take `step_ms` and a draft of `draft_step_ms` a token, both Markov models, so that the
  draft's quality is known (`bench.markov_llama`). Modes: plain decoding; remote drafts that run ahead, or wait for
  vLLM's tokens, at each round-trip time; a draft in vLLM's process that proposes the same tokens and takes as long.
- overhead: seconds that the plug-in adds to a step of these, its waits for proposals not counted.
- lost drafts (`bench.vllm_lost_drafts`): the embedded model, with a draft that fails. The texts are compared too.
"""

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.markov_llama import save
from bench.number_lists import numbers
from bench.progress import Step, progress
from bench.proxy import Proxy, proxied
from bench.remote_draft import remote_draft
from bench.result import BenchResult, machine, median, quantile
from bench.vllm_engine import PYTHON, VllmEngine, over_plain, rate
from bench.vllm_lost_drafts import FAULTS, LostDraft, measure_lost
from bench.vllm_own_draft import TABLE_VARIABLE
from outrider.errors import InvalidArgument

PLAIN: Final = "plain"
OWN: Final = "own draft"
SYNCHRONOUS: Final = "synchronous"
STREAMING: Final = "streaming"
_REMOTE: Final = {SYNCHRONOUS: "0", STREAMING: "64"}
_ENGINE: Final = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "enable_prefix_caching": False,
}
_PROMPT: Final = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        step_ms: least milliseconds of a step of vLLM, in the speed part.
        draft_step_ms: milliseconds of a step of its draft.
        rtts_ms: round-trip times between them, in milliseconds, comma-separated.
        num_speculative_tokens: tokens that a step verifies of a request, at most.
        scale: of the Markov models' logits: 8 gives a draft whose first choice is accepted in four of five cases.
        num_tokens: output tokens of a measurement.
        num_repeats: measurements of each case, of which the median is reported.
        num_requests: requests at once, in the second measurement of the overhead.
        num_pairs: pairs of measurements, with and without a failing draft.
        lost_runs: runs of each measurement; those of a pair alternate.
        lost_tokens: output tokens of such a run.
        faults: failures of the draft, comma-separated; empty for none.
        python: of vLLM's environment.
    """

    step_ms: float = 40.0
    draft_step_ms: float = 4.0
    rtts_ms: str = "0,5,20"
    num_speculative_tokens: int = 5
    scale: float = 8.0
    num_tokens: int = 200
    num_repeats: int = 5
    num_requests: int = 16
    num_pairs: int = 5
    lost_runs: int = 5
    lost_tokens: int = 64
    faults: str = ",".join(FAULTS)
    python: str = PYTHON

    @property
    def rtts(self) -> tuple[float, ...]:
        """Round-trip times, in milliseconds."""
        return numbers("rtts_ms", self.rtts_ms, float, 0.0)

    @property
    def fault_names(self) -> tuple[str, ...]:
        """Failures of the draft."""
        found = tuple(filter(None, self.faults.split(",")))
        if unknown := set(found) - set(FAULTS):
            raise InvalidArgument(f"{sorted(unknown)[0]!r} is none of {', '.join(FAULTS)}", "faults")
        return found


async def measure(options: Options) -> BenchResult:
    """Measure all parts."""
    if (os.cpu_count() or 1) < 2:
        raise InvalidArgument("this benchmark needs two cores", "cores")
    cores = sorted(os.sched_getaffinity(0))[:2]
    num_cases = 2 + 2 * len(options.rtts)
    with (
        tempfile.TemporaryDirectory() as name,
        progress(options.num_repeats * num_cases + 1 + len(options.fault_names) * options.num_pairs) as step,
    ):
        os.sched_setaffinity(0, {cores[1]})
        try:
            folder = Path(name)
            rows, figures = await _speed(options, folder, cores[0], step)
            for fault in options.fault_names:
                lost = LostDraft(
                    fault,
                    options.num_speculative_tokens,
                    options.num_pairs,
                    options.lost_runs,
                    options.lost_tokens,
                    options.python,
                )
                rows.append(await measure_lost(lost, folder, cores[0], step))
        finally:
            os.sched_setaffinity(0, set(cores))
    if lost_rows := [row for row in rows if row["mode"] in FAULTS]:
        figures["vllm_draft_lost_over_plain_worst"] = min(row["rate_over_plain"] for row in lost_rows)
        figures["vllm_draft_lost_same_text"] = float(all(row["same_text"] for row in lost_rows))
    return BenchResult("vllm", {**machine(), **asdict(options)}, rows, figures)


async def _speed(
    options: Options, folder: Path, core: int, step: Step
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    model = f"markov:vocabulary=64,seed=3,scale={options.scale}"
    markov = save(model, folder / "target")
    table = folder / "table.json"
    likeliest = markov.transitions.argmax(-1).tolist()
    table.write_text(json.dumps({"next_token": likeliest, "step_s": options.draft_step_ms / 1e3}))
    async with AsyncExitStack() as stack:
        draft = await stack.enter_async_context(remote_draft(f"{model},step_s={options.draft_step_ms / 1e3}"))
        proxy = await stack.enter_async_context(proxied(draft.address))
        engines = {}
        for mode in (PLAIN, OWN, SYNCHRONOUS, STREAMING):
            engine = _engine(options, mode, folder, core, proxy, table)
            engines[mode] = await stack.enter_async_context(engine)
        for mode in _REMOTE:
            await engines[mode].wait_for_drafts(1)
        found: defaultdict[tuple[str, float | None], list[dict[str, Any]]] = defaultdict(list)
        for engine in engines.values():
            await engine.run([_PROMPT], {"temperature": 1.0, "max_tokens": 32, "seed": 0})
        for repeat in range(options.num_repeats):
            sampling = {"temperature": 1.0, "max_tokens": options.num_tokens, "seed": 1 + repeat}
            for mode in (PLAIN, OWN):
                step(mode)
                found[mode, None].append(await engines[mode].run([_PROMPT], dict(sampling)))
            for rtt_ms in options.rtts:
                proxy.up.latency_s = proxy.down.latency_s = rtt_ms / 2e3
                for mode in _REMOTE:
                    step(f"{mode}, {rtt_ms:g} ms")
                    found[mode, rtt_ms].append(await engines[mode].run([_PROMPT], dict(sampling)))
        step(f"{options.num_requests} requests")
        proxy.up.latency_s = proxy.down.latency_s = 0.0
        prompts = [(*_PROMPT, number) for number in range(options.num_requests)]
        many = await engines[STREAMING].run(
            prompts, {"temperature": 1.0, "max_tokens": options.num_tokens}, together=True
        )
    rows = [_speed_row(mode, rtt_ms, results, found[PLAIN, None]) for (mode, rtt_ms), results in found.items()]
    return rows, _speed_figures(found, many)


def _engine(options: Options, mode: str, folder: Path, core: int, proxy: Proxy, table: Path) -> VllmEngine:
    drafts = {PLAIN: "none", OWN: "own"}.get(mode, "remote")
    variables = {TABLE_VARIABLE: str(table)} if mode == OWN else {}
    if mode in _REMOTE:
        variables = {"OUTRIDER_DRAFTS": proxy.address, "OUTRIDER_LOOKAHEAD": _REMOTE[mode]}
    settings = {
        "model": str(folder / "target"),
        "drafts": drafts,
        "num_speculative_tokens": options.num_speculative_tokens,
        "step_s": options.step_ms / 1e3,
        "engine": _ENGINE,
    }
    log = folder / f"{mode}.log"
    return VllmEngine(settings, python=options.python, variables=variables, cores=[core], log=log)


def _speed_row(
    mode: str, rtt_ms: float | None, results: list[dict[str, Any]], plain: list[dict[str, Any]]
) -> dict[str, Any]:
    num_tokens = sum(len(tokens) for result in results for tokens in result["token_ids"])
    num_steps = sum(len(result["steps_s"]) for result in results)
    verified = sum(result["counts"].get("num_verified", 0) for result in results)
    accepted = sum(result["counts"].get("num_accepted", 0) for result in results)
    return {
        "mode": mode,
        "rtt_ms": rtt_ms,
        "tokens_per_s": median(rate(result) for result in results),
        "tokens_per_step": num_tokens / num_steps,
        "acceptance_rate": accepted / verified if verified else None,
        "wait_per_step_ms": 1e3 * sum(result["counts"].get("wait_s", 0.0) for result in results) / num_steps,
        **over_plain([rate(one) / rate(other) for one, other in zip(results, plain, strict=True)]),
        "same_text": None,
    }


def _speed_figures(
    found: Mapping[tuple[str, float | None], list[dict[str, Any]]], many: dict[str, Any]
) -> dict[str, float]:
    """Return the figures; ratios are medians over repeats, of runs that followed each other."""

    def ratio(one: tuple[str, float | None], other: tuple[str, float | None]) -> float:
        pairs = zip(found[one], found[other], strict=True)
        return median(rate(first) / rate(second) for first, second in pairs)

    rtts = sorted(rtt for mode, rtt in found if mode == STREAMING and rtt is not None)
    figures = {
        "vllm_remote_over_plain": ratio((STREAMING, rtts[0]), (PLAIN, None)),
        "vllm_remote_over_own_draft": ratio((STREAMING, rtts[0]), (OWN, None)),
        "vllm_own_draft_over_plain": ratio((OWN, None), (PLAIN, None)),
    }
    for rtt in rtts:
        name = f"vllm_streaming_over_synchronous_rtt_{rtt:g}ms"
        figures[name] = ratio((STREAMING, rtt), (SYNCHRONOUS, rtt))
    one = [value for result in found[STREAMING, rtts[0]] for value in result["overheads_s"]]
    figures |= {
        "step_overhead_p50_s": quantile(one, 0.5),
        "step_overhead_p99_s": quantile(one, 0.99),
        "step_overhead_many_p50_s": quantile(many["overheads_s"], 0.5),
        "step_overhead_many_p99_s": quantile(many["overheads_s"], 0.99),
    }
    return figures
