"""A real server on a real socket, and a servicer that does what a test tells it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from outrider.serving.channel import open_channel
from outrider.serving.server import Server
from outrider.serving.settings import ServingSettings
from outrider.v1 import draft_pb2, draft_pb2_grpc, worker_pb2, worker_pb2_grpc

ROOT = Path(__file__).parents[2]
Behaviour = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    """Succeeds."""


class ToldWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Runs `behaviour` in each call, in streams after the first response."""

    def __init__(self) -> None:
        self.behaviour: Behaviour = _nothing

    async def GetInfo(self, request, context):
        await self.behaviour()
        return worker_pb2.GetInfoResponse(replica="told")

    async def GetLoad(self, request, context):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "aborted by the servicer")

    async def GetTokenizer(self, request, context):
        yield worker_pb2.GetTokenizerResponse(name="first")
        await self.behaviour()
        yield worker_pb2.GetTokenizerResponse(name="second")


class ToldDraft(draft_pb2_grpc.DraftServiceServicer):
    """Echoes the handles of frames; runs `behaviour` after each message."""

    def __init__(self) -> None:
        self.behaviour: Behaviour = _nothing

    async def Draft(self, request_iterator, context):
        async for request in request_iterator:
            handles = [frame.handle for frame in request.frames]
            yield draft_pb2.DraftResponse(frames=[draft_pb2.DraftResponseFrame(handle=handle) for handle in handles])
            await self.behaviour()


def new_server(settings: ServingSettings, worker: ToldWorker, draft: ToldDraft, **options: object) -> Server:
    server = Server(settings, name="told", **options)
    server.register(worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker, "outrider.v1.WorkerService")
    server.register(draft_pb2_grpc.add_DraftServiceServicer_to_server, draft, "outrider.v1.DraftService")
    return server


@pytest.fixture
def worker() -> ToldWorker:
    return ToldWorker()


@pytest.fixture
def draft() -> ToldDraft:
    return ToldDraft()


@pytest.fixture
async def channel(worker: ToldWorker, draft: ToldDraft) -> AsyncIterator[grpc.aio.Channel]:
    server = new_server(ServingSettings(drain_budget_s=1.0), worker, draft)
    address = await server.start()
    async with open_channel(address) as opened:
        yield opened
    await server.stop()


@asynccontextmanager
async def told_process(*arguments: str):
    """Yields a running process and its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.serving.told_process", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 20))
        yield process, ready["address"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
