"""A service whose processes are listed by an API server, and can be replaced one by one."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.api_server import ApiServer, pod
from bench.worker import Worker
from outrider.local.process import ProcessSpec, ServiceProcess

READY_S: Final = 300.0
"""Timeout of the start of a process, in seconds."""
_TAKES_S: Final = 60.0
_POLL_S: Final = 0.02


class ReplaceableService:
    """The processes of one service, listed by an API server.

    Args:
        name: name of the service.
        api: API server that lists them.
        specs: specifications of the first processes, which are also used for their successors.
        folder: folder of the log files.
    """

    def __init__(self, name: str, api: ApiServer, specs: Iterator[ProcessSpec], folder: Path) -> None:
        self.processes = [ServiceProcess(spec, folder) for spec in specs]
        self._name = name
        self._api = api
        self._folder = folder
        self._num_made = len(self.processes)

    async def start(self) -> None:
        """Start the first processes and list them."""
        for process in self.processes:
            process.start()
        for process in self.processes:
            await process.wait_ready(READY_S)
            await self._list(process)

    async def replace(self, old: ServiceProcess) -> dict[str, Any]:
        """Start and list a successor, wait until it has a session, terminate the old process; return the times."""
        began = time.perf_counter()
        spec = replace(old.spec, name=f"{self._name}-{self._num_made}")
        self._num_made += 1
        new = ServiceProcess(spec, self._folder)
        new.start()
        self.processes.append(new)
        await new.wait_ready(READY_S)
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
        """Kill all processes."""
        for process in self.processes:
            process.kill()

    async def _list(self, process: ServiceProcess, *, terminating: bool = False) -> None:
        host, _, port = process.address.rpartition(":")
        name = process.spec.name
        endpoint = pod(name, host, ready=not terminating, terminating=terminating)
        await self._api.put(name, endpoint, service=self._name, port=int(port))


async def _until_taken(process: ServiceProcess) -> None:
    """Wait until a worker has an active session."""
    async with Worker(process) as worker, asyncio.timeout(_TAKES_S):
        while not (await worker.load()).num_active_sessions:
            await asyncio.sleep(_POLL_S)
