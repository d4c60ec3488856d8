"""A process as services run it; the test sends it signals. Its worker's GetInfo takes OUTRIDER_CALL_S seconds."""

import asyncio
import sys

from pydantic import Field

from outrider.serving.server import Server, run_process
from outrider.serving.settings import ServingSettings, load_settings
from outrider.serving.telemetry import configure_logging
from outrider.v1 import worker_pb2, worker_pb2_grpc


class ToldSettings(ServingSettings):
    """Settings of a process for tests."""

    call_s: float = Field(0.0, ge=0, description="Seconds that a call takes.")
    drain_s: float = Field(0.0, ge=0, description="Seconds that the service takes to drain.")


class SlowWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Answers late."""

    def __init__(self, settings: ToldSettings) -> None:
        self._settings = settings

    async def GetInfo(self, request, context):
        print("call begun", file=sys.stderr, flush=True)
        await asyncio.sleep(self._settings.call_s)
        return worker_pb2.GetInfoResponse(replica="slow")

    async def drain(self) -> None:
        print("drain called", file=sys.stderr, flush=True)
        await asyncio.sleep(self._settings.drain_s)


async def serve(settings: ToldSettings) -> None:
    worker = SlowWorker(settings)
    server = Server(settings, name="told", drain=worker.drain)
    server.register(worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker, "outrider.v1.WorkerService")
    await server.run()


if __name__ == "__main__":
    told = load_settings(ToldSettings, program="told")
    configure_logging(service="told", level=told.log_level, form=told.log_format)
    run_process(serve(told))
