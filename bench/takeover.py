"""The pause of a stream when its target is killed, until another target has the session's KV cache.

The other target recomputes the KV cache from the session's tokens, or restores it from KV blocks in Redis, over a link
of limited bandwidth. Both are forced in turn; `auto` chooses by its measurements. The texts must be equal, which is
checked.
"""

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from bench.models import served_name
from bench.progress import progress
from bench.proxy import Link, proxied
from bench.result import BenchResult, machine, median
from bench.traffic import Prompts, RequestTemplate
from bench.worker import Worker
from outrider.client import Delta, LocalStack, OutriderClient, StackOptions
from outrider.errors import InvalidArgument, OutriderError
from outrider.local.process import ServiceProcess
from outrider.local.valkey import EmbeddedValkey

_MODES: Final = ("never", "always", "auto")
_NUM_TOKENS: Final = 6000
_NUM_BEFORE: Final = 24
_NUM_AFTER: Final = 8
_READY_S: Final = 300.0
_STREAM_S: Final = 120.0
_SETTLE_S: Final = 0.5
_POLL_S: Final = 0.05
_STORE_BYTES: Final = 2 << 30


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        context_len: prompt tokens of the session.
        num_rounds: kills per mode and link.
        links: bandwidths between targets and Redis, in MB per second, comma-separated; 0 for unlimited.
        model: model name, as a target loads it.
    """

    context_len: int = 1000
    num_rounds: int = 5
    links: str = "0,25"
    model: str = "embedded"

    @property
    def bandwidths(self) -> list[float]:
        """The bandwidths of `links`; raises `InvalidArgument` if they are invalid."""
        try:
            return [float(part) for part in self.links.split(",")]
        except ValueError as error:
            raise InvalidArgument(f"links is {self.links!r}, must be comma-separated numbers", "links") from error


async def measure(options: Options) -> BenchResult:
    """Kill and restart the target of a stream, for each mode over each link."""
    combinations = list(_combinations(options))
    rows = []
    texts: dict[int, list[int]] = {}
    with progress(len(combinations) * options.num_rounds) as step:
        for mode, bandwidth in combinations:
            async with _stack(options, mode, bandwidth) as stack:
                begin = functools.partial(step, f"{mode}, {bandwidth:g} MB/s")
                gaps = await _rounds(stack, options, texts, begin)
            rows.append(
                {
                    "link MB/s": bandwidth or "any",
                    "blocks": mode,
                    "next token s": median(gaps),
                    "fastest s": min(gaps),
                    "slowest s": max(gaps),
                }
            )
    return BenchResult("takeover", {**machine(), **asdict(options)}, rows, _figures(rows))


def plot(result: BenchResult, path: Path) -> None:
    """Plot the median pause of each mode over each link."""
    from bench.pictures import bars

    links = list(dict.fromkeys(row["link MB/s"] for row in result.rows))
    times = {(row["link MB/s"], row["blocks"]): row["next token s"] for row in result.rows}
    computed = next(seconds for (_, mode), seconds in times.items() if mode == "never")
    series = {mode: [times.get((link, mode), computed) for link in links] for mode in _MODES}
    title = f"seconds from kill -9 to the next token, {result.config['context_len']} tokens of context"
    bars(path, [f"{link} MB/s" for link in links], series, title)


def _combinations(options: Options) -> Iterator[tuple[str, float]]:
    for number, bandwidth in enumerate(options.bandwidths):
        for mode in _MODES:
            # Recomputing does not depend on the link.
            if mode != "never" or number == 0:
                yield mode, bandwidth


def _figures(rows: list[dict[str, float | str]]) -> dict[str, float]:
    times = {(row["link MB/s"], row["blocks"]): float(row["next token s"]) for row in rows}
    links = list(dict.fromkeys(row["link MB/s"] for row in rows))
    computed = times[links[0], "never"]
    return {
        "prefill_over_restore": computed / times[links[0], "always"],
        "next_token_after_kill_s": times[links[0], "auto"],
        "auto_over_best": max(times[link, "auto"] / min(computed, times[link, "always"]) for link in links),
    }


@asynccontextmanager
async def _stack(options: Options, mode: str, bandwidth: float) -> AsyncIterator[LocalStack]:
    """Run a stack of two targets with KV blocks behind a limited link."""
    async with AsyncExitStack() as exits:
        server = exits.enter_context(EmbeddedValkey(durable=False, max_memory_bytes=_STORE_BYTES, evicts=True))
        proxy = await exits.enter_async_context(proxied(server.address))
        proxy.up, proxy.down = Link(bytes_per_s=1e6 * bandwidth), Link(bytes_per_s=1e6 * bandwidth)
        url = server.url_by(proxy.address) if bandwidth else server.url
        chosen = StackOptions(
            model=served_name(options.model),
            drafts=(),
            num_targets=2,
            kv_blocks_url=url,
            target_environment={"OUTRIDER_KV_BLOCKS": mode, "OUTRIDER_KV_BLOCKS_TIMEOUT_S": "5"},
        )
        yield await exits.enter_async_context(LocalStack(chosen))


@dataclass(slots=True)
class _Stream:
    """The arrival times of a stream's deltas, and its tokens."""

    times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


async def _rounds(
    stack: LocalStack, options: Options, texts: dict[int, list[int]], begin: Callable[[], None]
) -> list[float]:
    """Return the seconds from each kill to the next token."""
    gaps = []
    async with stack.client() as client, Worker(stack.targets[0]) as worker:
        prompts = Prompts((await worker.info()).vocabulary_size)
        for number in range(options.num_rounds):
            begin()
            gap, token_ids = await _kill_once(stack, client, prompts.draw(options.context_len))
            num = min(len(token_ids), len(texts.setdefault(number, token_ids)))
            if texts[number][:num] != token_ids[:num]:
                raise OutriderError(f"the text of round {number} depends on where the KV cache came from")
            gaps.append(gap)
    return gaps


async def _kill_once(stack: LocalStack, client: OutriderClient, prompt: tuple[int, ...]) -> tuple[float, list[int]]:
    """Kill and restart the target of a stream; return the seconds to the next token, and the text."""
    stream = _Stream()
    task = asyncio.create_task(_watch(client, prompt, stream))
    try:
        await _until(task, lambda: len(stream.times_s) >= _NUM_BEFORE)
        victim = await _serving(stack)
        await _until_written(victim, len(prompt))
        num_before, killed_s = len(stream.times_s), time.perf_counter()
        victim.kill()
        await _until(task, lambda: len(stream.times_s) >= num_before + _NUM_AFTER)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    # Deltas in flight still arrive; the largest gap ends with the first token of the other target.
    _, next_s = max(itertools.pairwise(stream.times_s[num_before - 1 :]), key=lambda gap: gap[1] - gap[0])
    victim.restart()
    await victim.wait_ready(_READY_S)
    await _until_all_serve(client)
    return next_s - killed_s, stream.token_ids


async def _watch(client: OutriderClient, prompt: tuple[int, ...], stream: _Stream) -> None:
    async with aclosing(client.generate(RequestTemplate(_NUM_TOKENS).request(prompt), timeout_s=_STREAM_S)) as events:
        async for event in events:
            if isinstance(event, Delta):
                stream.times_s.append(time.perf_counter())
                stream.token_ids += event.token_ids


async def _until(task: asyncio.Task[None], is_true: Callable[[], bool]) -> None:
    """Wait until a condition on a stream is true; raise an error if the stream ends before."""
    async with asyncio.timeout(_STREAM_S):
        while not is_true():
            if task.done():
                task.result()
                raise OutriderError("the stream ended before its target was killed")
            await asyncio.sleep(_POLL_S)


async def _serving(stack: LocalStack) -> ServiceProcess:
    """Return the target with the session."""
    for process in stack.targets:
        async with Worker(process) as worker:
            if (await worker.load()).num_active_sessions:
                return process
    raise OutriderError("no target has the session")


async def _until_written(process: ServiceProcess, length: int) -> None:
    """Wait until the target has written the blocks of so many tokens, or writes no more."""
    async with Worker(process) as worker, asyncio.timeout(_STREAM_S):
        known, num_written, num_wanted = -1, 0, 1
        while num_written != known and num_written < num_wanted:
            await asyncio.sleep(_SETTLE_S)
            blocks = (await worker.load()).kv_blocks
            known, num_written, num_wanted = num_written, blocks.num_written, length // (blocks.block_len or 1)


async def _until_all_serve(client: OutriderClient) -> None:
    async with asyncio.timeout(_READY_S):
        while not all(worker.in_rotation for worker in (await client.list_models()).workers):
            await asyncio.sleep(_POLL_S)
