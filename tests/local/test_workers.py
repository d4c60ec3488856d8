from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from outrider.client import OutriderClient, RetryPolicy
from outrider.local import workers
from outrider.local.workers import fitting_lookahead, out_of_rotation
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import worker_pb2, worker_pb2_grpc
from tests.client.scripted import ScriptedService, serving

NOWHERE = "127.0.0.1:1"


class NumericsService(worker_pb2_grpc.WorkerServiceServicer):
    """Answers GetInfo with these numerics."""

    def __init__(self, numerics: str) -> None:
        self.numerics = numerics

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetInfoResponse:
        return worker_pb2.GetInfoResponse(numerics=self.numerics)


@asynccontextmanager
async def target(numerics: str) -> AsyncIterator[str]:
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(NumericsService(numerics), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


class ConnectingService(ScriptedService):
    """Lists a draft that it connects to only when it is asked for the third time."""

    num_asked = 0

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        self.num_asked += 1
        target = pb.WorkerStatus(address="127.0.0.1:1", info=worker_pb2.GetInfoResponse(), in_rotation=True)
        draft = pb.WorkerStatus(address="127.0.0.1:2", reason="not connected yet")
        if self.num_asked > 2:
            draft.info.SetInParent()
            draft.reason = "its tokenizer is another"
        return pb.ListModelsResponse(workers=[target, draft])


async def test_drafts_run_ahead_of_targets_on_a_gpu() -> None:
    async with target("cuda bfloat16 torch-2.13 threads-8") as first, target("cuda bfloat16") as second:
        assert await fitting_lookahead([first, second], 0) == {}


async def test_drafts_wait_beside_a_target_on_all_cores() -> None:
    waits = {"OUTRIDER_LOOKAHEAD": "0"}
    async with target("cpu bfloat16 torch-2.13 threads-2") as cpu, target("cuda bfloat16") as gpu:
        assert await fitting_lookahead([gpu, cpu], 0) == waits
        assert await fitting_lookahead([cpu], 1) == {}
    assert await fitting_lookahead([NOWHERE], 0) == waits


async def test_a_worker_is_judged_once_it_is_connected() -> None:
    service = ConnectingService()
    async with serving(service) as addresses, OutriderClient(addresses) as client:
        (draft,) = await out_of_rotation(client, 2)
    assert (draft.address, draft.reason, service.num_asked) == ("127.0.0.1:2", "its tokenizer is another", 3)


async def test_the_wait_for_workers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SEEN_TIMEOUT_S", 0.2)
    async with serving(ScriptedService()) as addresses, OutriderClient(addresses, retry=RetryPolicy(1)) as client:
        # The scripted service never reaches its draft.
        (draft,) = await out_of_rotation(client, 2)
    assert draft.reason == "TOKENIZER_MISMATCH: aa and bb"
