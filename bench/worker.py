"""What a worker process tells about itself, and what the system tells about it."""

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
        process: a target or a draft that is ready.
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
        """Returns identity and limits."""
        return await self._stub.GetInfo(pb.GetInfoRequest(), timeout=_TIMEOUT_S)

    async def load(self) -> pb.GetLoadResponse:
        """Returns how busy it is now."""
        return await self._stub.GetLoad(pb.GetLoadRequest(), timeout=_TIMEOUT_S)

    def resident_bytes(self) -> int:
        """Returns the memory that the process has resident.

        Raises:
            Unavailable: it has ended, or this system has no /proc.
        """
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError as error:
            raise Unavailable(f"no resident memory of {self._process.spec.name} is to be had: {error}") from error
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024
