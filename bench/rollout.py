"""A rolling update under load: every process of a stack is replaced while clients stream, and nothing may be lost.

Workers are found as pods of a cluster are, by the EndpointSlices of an API server (`bench.api_server`). One after
another each target and each draft gets a successor, which is listed when it serves; the old one is then marked as
terminating, told to end, and taken from the list when it has. Orchestrators are ended and started again at their
addresses, as clients know no others. Meanwhile each client asks for the same text again and again, in a new session
each time, and holds what comes against what came before the update.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bench.api_server import NAMESPACE, ApiServer, pod
from bench.models import served_name
from bench.progress import progress
from bench.result import BenchResult, machine, median, quantile
from bench.traffic import Ask, Prompts
from bench.worker import Worker
from outrider.client import Delta, Finished, GenerationRequest, OutriderClient, StackOptions
from outrider.errors import OutriderError
from outrider.local.process import ProcessSpec, ServiceProcess
from outrider.local.stack_options import DraftOptions
from outrider.local.valkey import EmbeddedValkey

_READY_S: Final = 300.0
_REQUEST_S: Final = 300.0
_TAKES_S: Final = 60.0
_POLL_S: Final = 0.02
_STORE_BYTES: Final = 1 << 30
_VOCABULARY_SIZE: Final = 512


@dataclass(frozen=True, slots=True)
class Options:
    """What is replaced under which load.

    Attributes:
        num_clients: streams at once.
        num_tokens: output tokens of each request.
        prompt_len: tokens of each client's prompt.
        num_targets: targets.
        num_drafts: drafts.
        num_orchestrators: orchestrators.
        drain_budget_s: of each process; a target hands its sessions over after half of it.
        model: as a target loads it; its vocabulary has 512 tokens at least.
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
    """What one client got.

    Attributes:
        prompt: that it asks with.
        expected: what came before the update.
        num_requests: that ended since.
        num_failed: of these, with an error.
        num_lost: tokens that did not come, or were others.
        num_recomputed: output tokens that were computed again.
        gaps_s: longest time without a token, of each request.
        problems: the errors that there were.
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
    """Replaces every process once, targets first, then drafts, then orchestrators."""
    rows: list[dict[str, Any]] = []
    num_steps = 1 + options.num_targets + options.num_drafts + options.num_orchestrators
    with progress(num_steps) as step:
        async with _site(options) as site, OutriderClient(site.addresses) as client:
            step("what comes without an update")
            clients = await _before(client, options)
            async with _asking(client, clients, options):
                for service in (site.targets, site.drafts):
                    for old in list(service.processes):
                        step(old.spec.name)
                        rows.append(await service.replace(old))
                for old in list(site.orchestrators):
                    step(old.spec.name)
                    rows.append(await _restart(old))
                num_restored = sum([await _num_restored(target) for target in site.targets.processes])
    rows += [{"process": "a client", "problem": problem} for item in clients for problem in item.problems]
    return BenchResult("rollout", {**machine(), **asdict(options)}, rows, _figures(rows, clients, num_restored))


class _Service:
    """The processes of one service, as an API server lists them.

    Args:
        name: of the service.
        api: where they are listed.
        specs: how to start each of the first ones; their successors are started likewise.
        folder: for logs.
    """

    def __init__(self, name: str, api: ApiServer, specs: Iterator[ProcessSpec], folder: Path) -> None:
        self.processes = [ServiceProcess(spec, folder) for spec in specs]
        self._name = name
        self._api = api
        self._folder = folder
        self._num_made = len(self.processes)

    async def start(self) -> None:
        """Starts the first ones, and lists them."""
        for process in self.processes:
            process.start()
        for process in self.processes:
            await process.wait_ready(_READY_S)
            await self._list(process)

    async def replace(self, old: ServiceProcess) -> dict[str, Any]:
        """Starts a successor, lists it, waits until it has a session, ends the old one; returns how long it took."""
        began = time.perf_counter()
        spec = replace(old.spec, name=f"{self._name}-{self._num_made}")
        self._num_made += 1
        new = ServiceProcess(spec, self._folder)
        new.start()
        self.processes.append(new)
        await new.wait_ready(_READY_S)
        ready = time.perf_counter()
        await self._list(new)
        await _until_taken(new)
        taken = time.perf_counter()
        await self._list(old, terminating=True)
        old.terminate()
        await old.wait_ended()
        await self._api.remove(old.spec.name)
        self.processes.remove(old)
        return {
            "process": old.spec.name,
            "starts_s": ready - began,
            "takes_session_s": taken - ready,
            "drains_s": time.perf_counter() - taken,
            "exit_code": old.exit_code,
        }

    async def close(self) -> None:
        """Ends all."""
        for process in self.processes:
            process.kill()

    async def _list(self, process: ServiceProcess, *, terminating: bool = False) -> None:
        host, _, port = process.address.rpartition(":")
        name = process.spec.name
        endpoint = pod(name, host, ready=not terminating, terminating=terminating)
        await self._api.put(name, endpoint, service=self._name, port=int(port))


@dataclass(frozen=True, slots=True)
class _Site:
    """A stack whose workers are found by an API server."""

    targets: _Service
    drafts: _Service
    orchestrators: list[ServiceProcess]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where clients call."""
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
        targets = _Service("target", api, stack.target_specs(blocks.url), folder)
        open_ones.push_async_callback(targets.close)
        drafts = _Service("draft", api, stack.draft_specs(), folder)
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
            await process.wait_ready(_READY_S)
        yield _Site(targets, drafts, orchestrators)


def _stack(options: Options, redis_url: str) -> StackOptions:
    return StackOptions(
        model=served_name(options.model),
        drafts=(DraftOptions(drafter="ngram", num_replicas=options.num_drafts),),
        redis_url=redis_url,
        num_targets=options.num_targets,
        num_orchestrators=options.num_orchestrators,
        target_threads=1,
        # Blocks are small here, and would be computed as fast; in a cluster they are gigabytes.
        target_environment={"OUTRIDER_KV_BLOCKS": "always", "OUTRIDER_COMPILE": "false"},
        drain_budget_s=options.drain_budget_s,
    )


async def _before(client: OutriderClient, options: Options) -> list[_Client]:
    """Returns the clients, with what each gets while nothing is replaced."""
    prompts = Prompts(_VOCABULARY_SIZE)
    clients = [_Client(prompts.draw(options.prompt_len)) for _ in range(options.num_clients)]
    results = await asyncio.gather(*(client.complete(_request(item, options)) for item in clients))
    for item, result in zip(clients, results, strict=True):
        item.expected = list(result.token_ids)
    return clients


@asynccontextmanager
async def _asking(client: OutriderClient, clients: list[_Client], options: Options) -> AsyncIterator[None]:
    """Has all clients ask again and again; in the end each finishes the request that it is at."""
    is_over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for item in clients:
            group.create_task(_ask_until(is_over.is_set, client, item, options))
        try:
            yield
        finally:
            is_over.set()


async def _ask_until(is_over: Callable[[], bool], client: OutriderClient, item: _Client, options: Options) -> None:
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
    return Ask(options.num_tokens, speculates=True).request(item.prompt)


def _num_lost(token_ids: list[int], expected: list[int]) -> int:
    same = sum(token_id == other for token_id, other in zip(token_ids, expected, strict=False))
    return max(len(expected), len(token_ids)) - same


async def _until_taken(process: ServiceProcess) -> None:
    """Returns when a worker has a session."""
    async with Worker(process) as worker, asyncio.timeout(_TAKES_S):
        while not (await worker.load()).num_active_sessions:
            await asyncio.sleep(_POLL_S)


async def _restart(process: ServiceProcess) -> dict[str, Any]:
    """Ends an orchestrator and starts it again at its address; returns how long that took."""
    began = time.perf_counter()
    process.terminate()
    await process.wait_ended()
    ended, exit_code = time.perf_counter(), process.exit_code
    process.restart()
    await process.wait_ready(_READY_S)
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
