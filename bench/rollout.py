"""A rolling update under load: every process of a stack is replaced while clients stream, and no token may be lost.

Workers are discovered like pods of a cluster, by the EndpointSlices of an API server (`bench.api_server`). One after
another, each target and each draft gets a successor, which is listed when it is ready; the old process is then marked
as terminating, receives SIGTERM, and is removed from the list when it has exited. Orchestrators are restarted at their
addresses, which clients keep. Meanwhile each client repeats the same request, in a new session each time, and compares
the text with that before the update.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.api_server import NAMESPACE, ApiServer
from bench.models import served_name
from bench.progress import progress
from bench.replaceable_service import READY_S, ReplaceableService
from bench.result import BenchResult, machine, median, quantile
from bench.traffic import Prompts, RequestTemplate
from bench.worker import Worker
from outrider.client import Delta, Finished, GenerationRequest, OutriderClient, StackOptions
from outrider.errors import OutriderError
from outrider.local.process import ServiceProcess
from outrider.local.stack_options import DraftOptions
from outrider.local.valkey import EmbeddedValkey

_REQUEST_S: Final = 300.0
_STORE_BYTES: Final = 1 << 30
_VOCABULARY_SIZE: Final = 512


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmark.

    Attributes:
        num_clients: number of concurrent streams.
        num_tokens: output tokens per request.
        prompt_len: prompt tokens per client.
        num_targets: number of targets.
        num_drafts: number of drafts.
        num_orchestrators: number of orchestrators.
        drain_budget_s: drain time of each process, in seconds; a target hands over its sessions after half of it.
        model: model name, as a target loads it, with at least 512 tokens in the vocabulary.
    """

    num_clients: int = 50
    num_tokens: int = 200
    prompt_len: int = 64
    num_targets: int = 2
    num_drafts: int = 2
    num_orchestrators: int = 2
    drain_budget_s: float = 6.0
    model: str = "shape:tiny"


@dataclass(slots=True)
class _Client:
    """The results of one client.

    Attributes:
        prompt: prompt of all its requests.
        expected: output token ids before the update.
        num_requests: number of requests during the update.
        num_failed: number of these that failed.
        num_lost: number of missing or different tokens.
        num_recomputed: number of output tokens that were recomputed.
        gaps_s: longest time between deltas of each request, in seconds.
        problems: errors of failed requests.
    """

    prompt: tuple[int, ...]
    expected: list[int] = field(default_factory=list)
    num_requests: int = 0
    num_failed: int = 0
    num_lost: int = 0
    num_recomputed: int = 0
    gaps_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


async def measure(options: Options) -> BenchResult:
    """Replace every process once: targets, then drafts, then orchestrators."""
    rows: list[dict[str, Any]] = []
    num_steps = 1 + options.num_targets + options.num_drafts + options.num_orchestrators
    with progress(num_steps) as step:
        async with _site(options) as site, OutriderClient(site.addresses) as client:
            step("before the update")
            clients = await _before(client, options)
            async with _repeated_requests(client, clients, options):
                for service in (site.targets, site.drafts):
                    for old in list(service.processes):
                        step(old.spec.name)
                        rows.append(await service.replace(old))
                for old in list(site.orchestrators):
                    step(old.spec.name)
                    rows.append(await _restart(old))
                num_restored = sum([await _num_restored(target) for target in site.targets.processes])
    rows += [{"process": "client", "problem": problem} for item in clients for problem in item.problems]
    return BenchResult("rollout", {**machine(), **asdict(options)}, rows, _figures(rows, clients, num_restored))


@dataclass(frozen=True, slots=True)
class _Site:
    """A stack whose workers are discovered through an API server."""

    targets: ReplaceableService
    drafts: ReplaceableService
    orchestrators: list[ServiceProcess]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the orchestrators."""
        return tuple(process.address for process in self.orchestrators)


@asynccontextmanager
async def _site(options: Options) -> AsyncIterator[_Site]:
    async with AsyncExitStack() as open_ones:
        folder = Path(open_ones.enter_context(tempfile.TemporaryDirectory()))
        sessions = open_ones.enter_context(EmbeddedValkey())
        blocks = open_ones.enter_context(EmbeddedValkey(durable=False, max_memory_bytes=_STORE_BYTES, evicts=True))
        api = ApiServer()
        await api.start()
        open_ones.push_async_callback(api.stop)
        stack = _stack(options, sessions.url)
        targets = ReplaceableService("target", api, stack.target_specs(blocks.url), folder)
        open_ones.push_async_callback(targets.close)
        drafts = ReplaceableService("draft", api, stack.draft_specs(), folder)
        open_ones.push_async_callback(drafts.close)
        await asyncio.gather(targets.start(), drafts.start())
        places = {
            "OUTRIDER_TARGETS": f"kubernetes://{NAMESPACE}/target:grpc",
            "OUTRIDER_DRAFTS": f"kubernetes://{NAMESPACE}/draft:grpc",
            "OUTRIDER_KUBECONFIG": str(api.kubeconfig(folder)),
            "OUTRIDER_REDIS_URL": sessions.url,
        }
        orchestrators = [ServiceProcess(spec, folder) for spec in stack.orchestrator_specs(places)]
        for process in orchestrators:
            open_ones.callback(process.kill)
            process.start()
        for process in orchestrators:
            await process.wait_ready(READY_S)
        yield _Site(targets, drafts, orchestrators)


def _stack(options: Options, redis_url: str) -> StackOptions:
    return StackOptions(
        model=served_name(options.model),
        drafts=(DraftOptions(drafter="ngram", num_replicas=options.num_drafts),),
        redis_url=redis_url,
        num_targets=options.num_targets,
        num_orchestrators=options.num_orchestrators,
        target_threads=1,
        # Blocks are small here, so that recomputing would be as fast; in a cluster they are gigabytes.
        target_environment={"OUTRIDER_KV_BLOCKS": "always", "OUTRIDER_COMPILE": "false"},
        drain_budget_s=options.drain_budget_s,
    )


async def _before(client: OutriderClient, options: Options) -> list[_Client]:
    """Return the clients with their output before the update."""
    prompts = Prompts(_VOCABULARY_SIZE)
    clients = [_Client(prompts.draw(options.prompt_len)) for _ in range(options.num_clients)]
    results = await asyncio.gather(*(client.complete(_request(item, options)) for item in clients))
    for item, result in zip(clients, results, strict=True):
        item.expected = list(result.token_ids)
    return clients


@asynccontextmanager
async def _repeated_requests(client: OutriderClient, clients: list[_Client], options: Options) -> AsyncIterator[None]:
    """Repeat the requests of all clients; at the end of the context, wait for the running ones."""
    is_over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for item in clients:
            group.create_task(_request_until(is_over.is_set, client, item, options))
        try:
            yield
        finally:
            is_over.set()


async def _request_until(is_over: Callable[[], bool], client: OutriderClient, item: _Client, options: Options) -> None:
    while not is_over():
        token_ids: list[int] = []
        times = [time.perf_counter()]
        item.num_requests += 1
        try:
            async with aclosing(client.generate(_request(item, options), timeout_s=_REQUEST_S)) as events:
                async for event in events:
                    match event:
                        case Delta():
                            token_ids += event.token_ids
                            times.append(time.perf_counter())
                        case Finished():
                            item.num_recomputed += event.statistics.num_recomputed_tokens
        except OutriderError as error:
            item.num_failed += 1
            item.problems.append(f"{error.reason}: {error.message}")
        item.num_lost += _num_lost(token_ids, item.expected)
        item.gaps_s.append(max((after - before for before, after in itertools.pairwise(times)), default=0.0))


def _request(item: _Client, options: Options) -> GenerationRequest:
    return RequestTemplate(options.num_tokens, speculates=True).request(item.prompt)


def _num_lost(token_ids: list[int], expected: list[int]) -> int:
    same = sum(token_id == other for token_id, other in zip(token_ids, expected, strict=False))
    return max(len(expected), len(token_ids)) - same


async def _restart(process: ServiceProcess) -> dict[str, Any]:
    """Restart an orchestrator at its address; return the times."""
    began = time.perf_counter()
    process.terminate()
    await process.wait_ended()
    ended, exit_code = time.perf_counter(), process.exit_code
    process.restart()
    await process.wait_ready(READY_S)
    return {
        "process": process.spec.name,
        "starts_s": time.perf_counter() - ended,
        "takes_session_s": None,
        "drains_s": ended - began,
        "exit_code": exit_code,
    }


async def _num_restored(process: ServiceProcess) -> int:
    async with Worker(process) as worker:
        return (await worker.load()).kv_blocks.num_restored


def _figures(rows: list[dict[str, Any]], clients: list[_Client], num_restored: int) -> dict[str, float]:
    taken = [row["takes_session_s"] for row in rows if row.get("takes_session_s") is not None]
    gaps = [gap for item in clients for gap in item.gaps_s]
    return {
        "num_requests": sum(item.num_requests for item in clients),
        "failed_requests": sum(item.num_failed for item in clients),
        "lost_tokens": sum(item.num_lost for item in clients),
        "new_replica_takes_session_s": max(taken),
        "restored_kv_blocks": num_restored,
        "recomputed_tokens": sum(item.num_recomputed for item in clients),
        "longest_gap_median_s": median(gaps),
        "longest_gap_p99_s": quantile(gaps, 0.99),
        "unclean_exits": sum(row.get("exit_code", 0) != 0 for row in rows),
    }
