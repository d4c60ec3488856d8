"""A stack of real processes with a proxy on every link between them, in which anything can be broken and healed."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.proxy import Link, Proxy, proxied
from outrider.client import DraftOptions, OutriderClient, StackOptions
from outrider.client.retry import RetryPolicy
from outrider.local.process import ProcessSpec, ServiceProcess
from outrider.local.valkey import EmbeddedValkey

TARGET = "markov:vocabulary=16,order=2,seed=5,step_s=0.004"
DRAFT = f"{TARGET},noise=0.2,step_s=0.0005"
_HEALED_S = 40.0
_BLOCK_STORE_BYTES = 256 << 20

# Everything is noticed within a second or two, so that a test takes no longer.
_SERVICE = {
    "OUTRIDER_KEEPALIVE_S": "1",
    "OUTRIDER_DRAIN_BUDGET_S": "6",
}
# Sixteen times as many are cached: fewer than a soak has, so that memory is held against the level of full caches.
_WORKER = {**_SERVICE, "OUTRIDER_MAX_SESSIONS": "48"}
_ORCHESTRATOR = {
    **_SERVICE,
    "OUTRIDER_LEASE_S": "2",
    "OUTRIDER_REDIS_TIMEOUT_S": "0.5",
    "OUTRIDER_FAILOVER_TIMEOUT_S": "8",
    "OUTRIDER_DRAFT_RETRY_S": "0.2",
    "OUTRIDER_DRAFT_MAX_WAIT_S": "0.1",
}


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """What a stack consists of.

    Attributes:
        num_targets: target processes.
        num_drafts: draft processes.
        num_orchestrators: orchestrator processes.
        target_environment: further settings of targets.
        draft_environment: further settings of drafts.
        orchestrator_environment: further settings of orchestrators.
        target: model of the targets.
        draft: model of the drafts.
        drafter: what runs it.
        keeps_kv_blocks: whether targets keep blocks of their KV cache in a Redis of their own.
        target_interpreter: Python that runs the targets; empty for that of this process.
        target_module: that the targets run; empty for the target service.
        ready_s: seconds in which each process must serve.
    """

    num_targets: int = 2
    num_drafts: int = 1
    num_orchestrators: int = 2
    target_environment: Mapping[str, str] = field(default_factory=dict)
    draft_environment: Mapping[str, str] = field(default_factory=dict)
    orchestrator_environment: Mapping[str, str] = field(default_factory=dict)
    target: str = TARGET
    draft: str = DRAFT
    drafter: str = "model"
    keeps_kv_blocks: bool = False
    target_interpreter: str = ""
    target_module: str = ""
    ready_s: float = 60.0


class FaultStack:
    """The running stack.

    Attributes:
        redis: the session store's server.
        targets: processes.
        drafts: processes.
        orchestrators: processes.
        to_redis: proxy of the orchestrators' connections to the store.
        to_targets: a proxy for each target.
        to_drafts: a proxy for each draft.
        to_orchestrators: a proxy for each orchestrator, for clients.
    """

    def __init__(self, options: FaultOptions, directory: Path) -> None:
        self.options = options
        self.redis = EmbeddedValkey(directory / "redis")
        self.targets: list[ServiceProcess] = []
        self.drafts: list[ServiceProcess] = []
        self.orchestrators: list[ServiceProcess] = []
        self.to_targets: list[Proxy] = []
        self.to_drafts: list[Proxy] = []
        self.to_orchestrators: list[Proxy] = []
        self._directory = directory
        self._exits = AsyncExitStack()

    @property
    def processes(self) -> list[ServiceProcess]:
        """All service processes."""
        return [*self.targets, *self.drafts, *self.orchestrators]

    @property
    def proxies(self) -> list[Proxy]:
        """All proxies."""
        return [self.to_redis, *self.to_targets, *self.to_drafts, *self.to_orchestrators]

    @property
    def redis_url(self) -> str:
        """The store, as orchestrators reach it."""
        return self.redis.url_by(self.to_redis.address)

    async def start(self) -> None:
        """Starts everything; returns when all serve and are in rotation."""
        (self._directory / "redis").mkdir()
        self._exits.enter_context(self.redis)
        self.to_redis = await self._exits.enter_async_context(proxied(self.redis.address))
        options, environment = self.options, {"OUTRIDER_ADAPTIVE_SPECULATION": "false"}
        draft = DraftOptions(
            options.drafter,
            options.draft,
            num_replicas=max(1, options.num_drafts),
            environment={**_WORKER, **options.draft_environment},
        )
        specs = StackOptions(
            model=options.target,
            drafts=(draft,) if options.num_drafts else (),
            num_targets=options.num_targets,
            num_orchestrators=options.num_orchestrators,
            target_threads=1,
            redis_url=self.redis.url,
            target_environment={**environment, **_WORKER, **options.target_environment},
        )
        self.targets = await self.launch(
            replace(spec, interpreter=options.target_interpreter, module=options.target_module or spec.module)
            for spec in specs.target_specs(self._start_block_store())
        )
        self.drafts = await self.launch(specs.draft_specs())
        self.to_targets = [await self.proxy(process) for process in self.targets]
        self.to_drafts = [await self.proxy(process) for process in self.drafts]
        self.orchestrators = await self.launch(
            self.orchestrator_spec(f"orchestrator-{number}") for number in range(options.num_orchestrators)
        )
        self.to_orchestrators = [await self.proxy(process) for process in self.orchestrators]
        await self.healed()

    def _start_block_store(self) -> str:
        if not self.options.keeps_kv_blocks:
            return ""
        server = EmbeddedValkey(durable=False, max_memory_bytes=_BLOCK_STORE_BYTES, evicts=True)
        return self._exits.enter_context(server).url

    async def close(self) -> None:
        """Ends everything."""
        for process in self.processes:
            if process.is_running:
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
        await self._exits.aclose()

    async def launch(self, specs: "Sequence[ProcessSpec] | object") -> list[ServiceProcess]:
        """Starts processes; returns them when they serve."""
        processes = [ServiceProcess(spec, self._directory) for spec in specs]  # type: ignore[attr-defined]
        for process in processes:
            process.start()
            self._exits.callback(process.kill)
        for process in processes:
            await process.wait_ready(self.options.ready_s)
        return processes

    async def proxy(self, process: ServiceProcess) -> Proxy:
        """Returns a new proxy in front of a process."""
        return await self._exits.enter_async_context(proxied(process.address))

    def orchestrator_spec(self, name: str, **environment: str) -> ProcessSpec:
        """Returns how to start an orchestrator of this stack; `environment` comes before its usual settings."""
        settings = {
            **_ORCHESTRATOR,
            "OUTRIDER_ADDRESS": "127.0.0.1:0",
            "OUTRIDER_REDIS_URL": self.redis_url,
            "OUTRIDER_TARGETS": ",".join(proxy.address for proxy in self.to_targets),
            "OUTRIDER_DRAFTS": ",".join(proxy.address for proxy in self.to_drafts),
            **self.options.orchestrator_environment,
            **environment,
        }
        return ProcessSpec(name, "orchestrator", settings, 6.0)

    @asynccontextmanager
    async def another(self, module: str = "orchestrator", **environment: str) -> AsyncIterator[ServiceProcess]:
        """Runs one more orchestrator, with other settings."""
        spec = replace(self.orchestrator_spec("another", **environment), module=module)
        (process,) = await self.launch([spec])
        try:
            yield process
        finally:
            process.kill()

    def client(self, *addresses: str, max_attempts: int = 40) -> OutriderClient:
        """Returns a client of these addresses, or of all orchestrators; it does not give up soon."""
        chosen = addresses or tuple(proxy.address for proxy in self.to_orchestrators)
        return OutriderClient(chosen, retry=RetryPolicy(max_attempts=max_attempts, max_backoff_s=0.5))

    async def heal(self) -> None:
        """Puts everything right again; returns when all are in rotation."""
        for process in self.processes:
            if process.is_running:
                os.kill(process.pid, signal.SIGCONT)
        if self.redis.pid:
            os.kill(self.redis.pid, signal.SIGCONT)
        else:
            self.redis.start()
        for proxy in self.proxies:
            proxy.is_refusing = False
            await proxy.set_blackhole(up=False, down=False)
            proxy.up, proxy.down = Link(), Link()
        ended = [process for process in self.processes if not process.is_running]
        for process in ended:
            process.restart()
        for process in ended:
            await process.wait_ready(self.options.ready_s)
        await self.healed()

    async def healed(self) -> None:
        """Returns when every orchestrator has every worker in rotation."""
        async with asyncio.timeout(_HEALED_S):
            for process in self.orchestrators:
                async with self.client(process.address) as client:
                    while not all(worker.in_rotation for worker in (await client.list_models()).workers):
                        await asyncio.sleep(0.05)


def stop(process: ServiceProcess | EmbeddedValkey) -> None:
    """Stops a process where it stands, without ending it."""
    os.kill(process.pid, signal.SIGSTOP)


def resume(process: ServiceProcess | EmbeddedValkey) -> None:
    """Lets a stopped process go on."""
    os.kill(process.pid, signal.SIGCONT)


@asynccontextmanager
async def fault_stack(directory: Path, options: FaultOptions | None = None) -> AsyncIterator[FaultStack]:
    """A `FaultStack` that runs as long as the context."""
    stack = FaultStack(options or FaultOptions(), directory)
    try:
        await stack.start()
        yield stack
    finally:
        await stack.close()
