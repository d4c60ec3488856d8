"""The effect of a draft that is killed, stopped or suddenly slow on a stream: no more than the loss of speculation.

A fault of the draft is injected in the middle of a stream whose draft runs ahead. The text must equal that of plain
decoding, and after the fault the rate must be at least about that of plain decoding. Model passes are simulated by
waiting.
"""

import itertools
import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.models import synthetic_pair
from bench.progress import progress
from bench.proxy import Proxy
from bench.remote_draft import remote_draft
from bench.result import BenchResult, machine, median
from outrider.client import Delta, GenerationRequest, LocalStack, OutriderClient, Speculation, StackOptions
from outrider.local.process import ServiceProcess
from outrider.parameters import SamplingParameters

NOTHING: Final = "nothing"
_TIMEOUT_S: Final = 600.0
_SLOW_S: Final = 0.5
_PROMPT: Final = tuple(range(200, 232))


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        num_tokens: output tokens per stream.
        num_before: output tokens before the fault.
        num_repeats: measurements per case, of which the median is reported.
        num_speculative_tokens: drafted tokens per round along one path.
        lookahead: nodes that the draft may hold ahead of verdicts.
        acceptance: probability that the target outputs the draft's first choice.
        model: Markov model whose pass times the target simulates.
        draft: Markov model whose pass times the draft simulates, with a vocabulary of the same size.
    """

    num_tokens: int = 240
    num_before: int = 80
    num_repeats: int = 3
    num_speculative_tokens: int = 5
    lookahead: int = 64
    acceptance: float = 0.8
    model: str = "markov:vocabulary=512;order=1;step_s=0.04;row_s=0.001;padding=4"
    draft: str = "markov:vocabulary=512;order=1;step_s=0.004;row_s=0.0001"


@dataclass(slots=True)
class _Stream:
    """One stream, as received by its client.

    Attributes:
        token_ids: output token ids.
        fault_s: time of the fault.
        deltas: (arrival time, number of tokens) of each delta after the fault.
    """

    token_ids: list[int] = field(default_factory=list)
    fault_s: float = 0.0
    deltas: list[tuple[float, int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second after the fault."""
        return sum(num for _, num in self.deltas) / (self.deltas[-1][0] - self.fault_s)

    @property
    def longest_gap_s(self) -> float:
        """Longest time between deltas after the fault, in seconds."""
        times = [self.fault_s, *(time_s for time_s, _ in self.deltas)]
        return max(after - before for before, after in itertools.pairwise(times))


async def measure(options: Options) -> BenchResult:
    """Inject each fault into a new draft, `num_repeats` times, and measure plain decoding for comparison."""
    streams: defaultdict[str, list[tuple[_Stream, _Stream]]] = defaultdict(list)
    with progress(options.num_repeats * len(_FAULTS)) as step:
        for _ in range(options.num_repeats):
            for name, inject in _FAULTS.items():
                step(name)
                async with _site(options) as (client, draft, proxy):
                    plain = await _follow(client, _request(options, speculates=False), options, lambda: None)
                    faulty = await _follow(
                        client, _request(options, speculates=True), options, partial(inject, draft, proxy)
                    )
                streams[name].append((faulty, plain))
    rows = [_row(name, pairs) for name, pairs in streams.items()]
    return BenchResult("outage", {**machine(), **asdict(options)}, rows, _figures(rows))


def _kill(draft: ServiceProcess, _: Proxy) -> None:
    draft.kill()


def _stop(draft: ServiceProcess, _: Proxy) -> None:
    os.kill(draft.pid, signal.SIGSTOP)


def _slow_down(_: ServiceProcess, proxy: Proxy) -> None:
    proxy.down.latency_s = _SLOW_S


_FAULTS: Final[dict[str, Callable[[ServiceProcess, Proxy], None]]] = {
    NOTHING: lambda draft, proxy: None,
    "killed": _kill,
    "stopped": _stop,
    "slow": _slow_down,
}


@asynccontextmanager
async def _site(options: Options) -> AsyncIterator[tuple[OutriderClient, ServiceProcess, Proxy]]:
    target, draft_model = synthetic_pair(options.model, options.draft, options.acceptance)
    async with remote_draft(draft_model) as draft:
        proxy = Proxy(draft.address)
        try:
            settings = {
                "OUTRIDER_DRAFTS": await proxy.start(),
                "OUTRIDER_NUM_SPECULATIVE_TOKENS": str(options.num_speculative_tokens),
                "OUTRIDER_LOOKAHEAD": str(options.lookahead),
            }
            stack_options = StackOptions(model=target, drafts=(), orchestrator_environment=settings)
            async with LocalStack(stack_options) as stack, stack.client() as client:
                yield client, draft, proxy
        finally:
            await proxy.close()


def _request(options: Options, *, speculates: bool) -> GenerationRequest:
    parameters = SamplingParameters(temperature=0.0, max_tokens=options.num_tokens, ignore_eos=True, seed=1)
    request = GenerationRequest(token_ids=_PROMPT, parameters=parameters)
    return request if speculates else replace(request, speculation=Speculation(disabled=True))


async def _follow(
    client: OutriderClient, request: GenerationRequest, options: Options, inject: Callable[[], None]
) -> _Stream:
    stream = _Stream()
    async with aclosing(client.generate(request, timeout_s=_TIMEOUT_S)) as events:
        async for event in events:
            if not isinstance(event, Delta):
                continue
            stream.token_ids += event.token_ids
            if stream.fault_s:
                stream.deltas.append((time.perf_counter(), len(event.token_ids)))
            elif len(stream.token_ids) >= options.num_before:
                inject()
                stream.fault_s = time.perf_counter()
    return stream


def _row(name: str, pairs: list[tuple[_Stream, _Stream]]) -> dict[str, Any]:
    return {
        "draft": name,
        "tokens_per_s": median(faulty.rate for faulty, _ in pairs),
        "plain_tokens_per_s": median(plain.rate for _, plain in pairs),
        "over_plain": median(faulty.rate / plain.rate for faulty, plain in pairs),
        "longest_gap_s": max(faulty.longest_gap_s for faulty, _ in pairs),
        "same_text": all(faulty.token_ids == plain.token_ids for faulty, plain in pairs),
    }


def _figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    figures = {f"{row['draft']}_over_plain": row["over_plain"] for row in rows if row["draft"] != NOTHING}
    return figures | {"same_texts": sum(row["same_text"] for row in rows) / len(rows)}


def plot(result: BenchResult, path: Path) -> None:
    """Plot the rate after each fault, and that of plain decoding."""
    from bench.pictures import bars

    series = {
        "with the draft": [row["tokens_per_s"] for row in result.rows],
        "plain": [row["plain_tokens_per_s"] for row in result.rows],
    }
    bars(path, [row["draft"] for row in result.rows], series, "tokens per second after the fault")
