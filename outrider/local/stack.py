"""A whole stack on this machine: Redis, targets, drafts and orchestrators, each a process of its own."""

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from outrider.client.client import OutriderClient
from outrider.errors import ModelUnsupported
from outrider.local.listening import check_free, reachable
from outrider.local.process import ProcessSpec, ServiceProcess
from outrider.local.stack_options import EMBEDDED, StackOptions
from outrider.local.workers import fitting_lookahead, out_of_rotation

_KEPT_RUNS = 20
_MAX_RUN_S = 86400.0
"""Age of a run's directory from which on it may go: a stack that runs writes few lines to its logs."""
_LOOKAHEAD = "OUTRIDER_LOOKAHEAD"

Progress = Callable[[str, str], None]
"""Called with the name of a process of the stack and one line about its progress."""


def _silent(name: str, line: str) -> None:
    """Show no progress."""


class LocalStack:
    """A stack on free loopback ports, drained at the end, also when this process is killed.

        async with LocalStack(StackOptions()) as stack, stack.client() as client:
            print((await client.complete(GenerationRequest(text="Once upon a time"))).text)

    It is a synchronous context manager too. Services come up in the order in which they need each other; one that ends
    early or is not ready in time raises `Unavailable` with the end of its log, after the others have been ended.

    Attributes:
        options: processes, models and settings of the stack.
        directory: logs of this run, below the user's cache directory; the latest runs are kept.
        targets: the target processes.
        drafts: the draft processes.
        orchestrators: the orchestrator processes.
        redis_url: Redis of the sessions, with the password where there is one.
    """

    def __init__(self, options: StackOptions | None = None, *, progress: Progress = _silent) -> None:
        self.options = options or StackOptions()
        self.directory = _run_directory()
        self.targets: list[ServiceProcess] = []
        self.drafts: list[ServiceProcess] = []
        self.orchestrators: list[ServiceProcess] = []
        self.redis_url = self.options.redis_url
        self._redis = ExitStack()
        self._progress = progress

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which this machine reaches the orchestrators; empty before the start."""
        return tuple(reachable(process.address) for process in self.orchestrators)

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """The same of their HTTP API; empty without one."""
        return tuple(reachable(address) for process in self.orchestrators if (address := process.http_address))

    @property
    def base_url(self) -> str:
        """URL of the first orchestrator's HTTP API, such as http://127.0.0.1:8000/v1; empty without one."""
        return f"http://{self.http_addresses[0]}/v1" if self.http_addresses else ""

    @property
    def processes(self) -> tuple[ServiceProcess, ...]:
        """All service processes, in the order in which they are stopped."""
        return (*self.orchestrators, *self.drafts, *self.targets)

    def client(self) -> OutriderClient:
        """Return a client of all its orchestrators; the caller closes it."""
        return OutriderClient(self.addresses)

    async def out_of_rotation(self, client: OutriderClient) -> Sequence[str]:
        """Return a line for each worker that gets no sessions, with the reason; a few seconds after the start at most.

        Raises:
            OutriderError: the orchestrator refuses to list them.
        """
        names = {process.address: process.spec.name for process in self.processes}
        statuses = await out_of_rotation(client, len(self.targets) + len(self.drafts))
        return [f"{names.get(status.address, status.address)}: {status.reason}" for status in statuses]

    async def start(self) -> None:
        """Start everything and return when requests can be served.

        Raises:
            Unavailable: a process ended early or took too long.
            ModelUnsupported: the embedded model cannot be made ready.
        """
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Drain everything within each process's budget; closing twice does nothing more."""
        for group in (self.orchestrators, self.drafts + self.targets):
            for process in group:
                process.terminate()
            for process in group:
                await process.wait_ended()
        self._redis.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __enter__(self) -> Self:
        asyncio.run(self.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run(self.close())

    async def _start(self) -> None:
        # Loading takes long: what the end of the start would trip over is better known now.
        for address in filter(None, (self.options.address, self.options.http_address)):
            check_free(address)
        if EMBEDDED in (self.options.model, *(draft.model for draft in self.options.drafts)):
            await prepare_embedded_model()
        redis, kv_blocks_url = self._start_redis(), self._start_block_store()
        # Orchestrators have nothing to load: they come last, when the addresses of their workers are known.
        self.targets = self._launch(self.options.target_specs(kv_blocks_url))
        self.drafts = self._launch(self.options.draft_specs())
        await self._wait_ready(self.targets + self.drafts)
        workers = {"OUTRIDER_TARGETS": _joined(self.targets), "OUTRIDER_DRAFTS": _joined(self.drafts)}
        self.orchestrators = self._launch(self.options.orchestrator_specs({**redis, **workers, **await self._pace()}))
        await self._wait_ready(self.orchestrators)

    async def _pace(self) -> Mapping[str, str]:
        """Return the setting by which drafts run ahead of verdicts or wait for them; none where it is given."""
        if _LOOKAHEAD in os.environ:
            return {}
        return await fitting_lookahead([process.address for process in self.targets], self.options.target_threads)

    def _start_redis(self) -> dict[str, str]:
        """Return the settings that name the Redis of sessions, after starting one where none is given."""
        if self.options.redis_url:
            return {"OUTRIDER_REDIS_URL": self.options.redis_url}
        # Only a stack with a Redis of its own needs the package of the extra `local`.
        from outrider.local.valkey import EmbeddedValkey

        self._progress("valkey", "starting")
        self.redis_url = self._redis.enter_context(EmbeddedValkey()).url
        self._progress("valkey", f"ready at {without_password(self.redis_url)}")
        return {"OUTRIDER_REDIS_URL": self.redis_url}

    def _start_block_store(self) -> str:
        """Return the URL of the KV blocks' Redis, after starting one where the stack has its own; empty for none."""
        if not self.options.has_own_block_store:
            return self.options.kv_blocks_url
        from outrider.local.valkey import EmbeddedValkey

        server = EmbeddedValkey(durable=False, max_memory_bytes=self.options.kv_blocks_bytes, evicts=True)
        url = self._redis.enter_context(server).url
        self._progress("kv-blocks", f"ready at {without_password(url)}")
        return url

    def _launch(self, specs: Iterable[ProcessSpec]) -> list[ServiceProcess]:
        processes = [ServiceProcess(spec, self.directory) for spec in specs]
        for process in processes:
            process.start()
        return processes

    async def _wait_ready(self, processes: Sequence[ServiceProcess]) -> None:
        """Return when all serve; the first one that fails ends the wait for the others."""
        tasks = [asyncio.create_task(self._wait_one(process)) for process in processes]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _wait_one(self, process: ServiceProcess) -> None:
        name = process.spec.name
        self._progress(name, "loading")
        address = await process.wait_ready(self.options.ready_timeout_s, lambda line: self._progress(name, line))
        self._progress(name, f"ready at {address}")


async def prepare_embedded_model() -> None:
    """Convert the embedded model unless that was done before; its progress bar goes to standard error.

    In a process of its own, so that this one never loads a model library.

    Raises:
        ModelUnsupported: it cannot be converted; the reason is on standard error.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider.lm.embedded", stdout=asyncio.subprocess.DEVNULL
    )
    if await process.wait() != 0:
        raise ModelUnsupported("the embedded model could not be prepared; the reason is printed above")


def without_password(url: str) -> str:
    """Return the URL with `***` in place of its password."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{parts.netloc.rpartition('@')[2]}"))


def _joined(processes: Sequence[ServiceProcess]) -> str:
    return ",".join(process.address for process in processes)


def _run_directory() -> Path:
    """Make the directory of this run and remove all but the latest ones; one that may still be in use stays."""
    runs = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    earlier = sorted(runs.iterdir(), key=_changed_s, reverse=True)
    for run in earlier[_KEPT_RUNS - 1 :]:
        if time.time() - _changed_s(run) > _MAX_RUN_S:
            shutil.rmtree(run, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=runs))


def _changed_s(run: Path) -> float:
    """Return when a run's directory last changed; 0 for one that another process has just removed."""
    try:
        return run.stat().st_mtime
    except OSError:
        return 0.0
