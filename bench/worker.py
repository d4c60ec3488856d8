"""A client of a worker process: identity, load, and resident memory."""

from pathlib import Path
from types import TracebackType
from typing import Self

from outrider.errors import Unavailable
from outrider.local.process import ServiceProcess
from outrider.serving.channel import open_channel
from outrider.v1 import worker_pb2 as pb
from outrider.v1.worker_pb2_grpc import WorkerServiceStub

_TIMEOUT_S = 10.0


class Worker:
    """A connection to the WorkerService of a stack's process.

    Args:
        process: a target or draft process that is ready.
    """

    def __init__(self, process: ServiceProcess) -> None:
        self._process = process
        self._channel = open_channel(process.address)
        self._stub = WorkerServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def info(self) -> pb.GetInfoResponse:
        """Return the worker's identity and limits."""
        return await self._stub.GetInfo(pb.GetInfoRequest(), timeout=_TIMEOUT_S)

    async def load(self) -> pb.GetLoadResponse:
        """Return the worker's current load."""
        return await self._stub.GetLoad(pb.GetLoadRequest(), timeout=_TIMEOUT_S)

    def resident_bytes(self) -> int:
        """Return the resident memory of the process, in bytes.

        Raises:
            Unavailable: the process has ended, or this system has no /proc.
        """
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError as error:
            raise Unavailable(f"cannot read the resident memory of {self._process.spec.name}: {error}") from error
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024
