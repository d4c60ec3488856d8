"""Time per token and KV cache per token over the context length, of the model alone, without services.

One session grows to each length in turn; there, tokens are decoded one at a time, and the median pass is reported.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.models import served_name
from bench.progress import Step, progress
from bench.result import BenchResult, machine, median
from bench.traffic import Prompts
from outrider.errors import InvalidArgument
from outrider.lm.load_options import LoadOptions
from outrider.lm.loading import load_model
from outrider.lm.model import KVCache, LanguageModel, SessionStep
from outrider.tokens import TokenSpan

_KV_BUDGET_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        lengths: context lengths, in tokens, comma-separated, ascending.
        num_steps: decoded tokens at each length.
        chunk_len: prompt tokens per pass (chunked prefill).
        model: model name, or a shape such as `shape:8b`.
        device: auto, cpu, cuda, ...
        compiles: `yes` to compile the model's layers, as the target does; `no` not to.
    """

    lengths: str = "128,256,512,1024,2048,4096,8000"
    num_steps: int = 15
    chunk_len: int = 512
    model: str = "embedded"
    device: str = "auto"
    compiles: str = "yes"

    @property
    def points(self) -> list[int]:
        """The lengths; raises `InvalidArgument` if they are invalid."""
        try:
            points = [int(part) for part in self.lengths.split(",")]
        except ValueError as error:
            raise InvalidArgument(f"lengths is {self.lengths!r}, must be comma-separated numbers", "lengths") from error
        if points != sorted(set(points)) or points[0] < 1:
            raise InvalidArgument("lengths must be positive and ascend", "lengths")
        return points


async def measure(options: Options) -> BenchResult:
    """Load the model into this process and grow one session."""
    points = options.points
    with progress(len(points) + 1) as step:
        step("loading")
        load = LoadOptions(device=options.device, kv_budget_bytes=_KV_BUDGET_BYTES, compiles=options.compiles == "yes")
        model = load_model(served_name(options.model), load).model
        rows = _grow(model, points, options, step)
    config = {**machine(), **asdict(options), "numerics": model.info.numerics}
    return BenchResult("context", config, rows, _figures(rows))


def _grow(model: LanguageModel, points: Sequence[int], options: Options, step: Step) -> list[dict[str, Any]]:
    if points[-1] + options.num_steps > model.info.max_session_len:
        raise InvalidArgument(f"the model's longest session is {model.info.max_session_len} tokens", "lengths")
    token_ids = Prompts(model.info.vocabulary_size).draw(points[-1] + options.num_steps)
    # A warm-up session, so that the measured one does not include one-time work.
    _run(model, model.new_cache(), token_ids[:: options.num_steps], len(token_ids[:: options.num_steps]), options)
    cache = model.new_cache()
    rows = []
    for length in points:
        step(f"{length} tokens")
        started = time.perf_counter()
        num_new = length - cache.cached_len
        _run(model, cache, token_ids, length, options)
        prefill_s = time.perf_counter() - started
        rows.append(_row(length, _decode(model, cache, token_ids, options), cache, model, num_new / prefill_s))
    return rows


def _run(model: LanguageModel, cache: KVCache, token_ids: Sequence[int], end: int, options: Options) -> None:
    """Run the tokens up to a position, in chunks."""
    while cache.cached_len < end:
        start = cache.cached_len
        span = TokenSpan(start, tuple(token_ids[start : min(end, start + options.chunk_len)]))
        model.forward([SessionStep(cache, span, wants_logits=span.end == end)])[0].cpu()


def _decode(model: LanguageModel, cache: KVCache, token_ids: Sequence[int], options: Options) -> float:
    """Return the median seconds of a pass over one token, synchronised; truncate the cache to its length before."""
    length = cache.cached_len
    seconds = []
    for position in range(length, length + options.num_steps):
        started = time.perf_counter()
        logits = model.forward([SessionStep(cache, TokenSpan(position, (token_ids[position],)))])[0]
        logits.argmax().item()
        seconds.append(time.perf_counter() - started)
    cache.truncate(length)
    return median(seconds)


def _row(length: int, token_s: float, cache: KVCache, model: LanguageModel, rate: float) -> dict[str, Any]:
    return {
        "context": length,
        "time_per_token_s": token_s,
        "prefill_tokens/s": rate,
        "kv_bytes": cache.num_bytes,
        "kv_bytes_per_token": cache.num_bytes / cache.cached_len,
        "kv_over_formula": cache.num_bytes / (cache.cached_len * model.info.kv_token_bytes),
    }


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return ratios of the longest context to the shortest, named after their lengths."""
    first, last = rows[0], rows[-1]
    return {
        "kv_bytes_over_formula": last["kv_over_formula"],
        f"time_{last['context']}_over_{first['context']}": last["time_per_token_s"] / first["time_per_token_s"],
    }


def plot(result: BenchResult, path: Path) -> None:
    """Plot milliseconds per token over the context length."""
    from bench.pictures import lines

    points = [(row["context"], row["time_per_token_s"] * 1e3) for row in result.rows]
    lines(path, {"decoding": points}, "tokens in the context", "ms per token, one session")
