"""Channels to servers that are there, are not, and come back."""

import asyncio
import time

import pytest

from outrider.errors import Unavailable
from outrider.serving.channel import open_channel, wait_connected
from outrider.serving.server import Server
from outrider.serving.settings import ServingSettings
from outrider.serving.status import peer_errors
from outrider.v1 import worker_pb2, worker_pb2_grpc
from tests.serving.conftest import new_server


async def started(worker, draft, address: str = "127.0.0.1:0") -> Server:
    server = new_server(ServingSettings(address=address), worker, draft)
    await server.start()
    return server


async def test_waits_until_connected(worker, draft):
    server = await started(worker, draft)
    async with open_channel(server.address) as channel:
        await wait_connected(channel, server.address, 5)
    await server.stop()


async def test_an_absent_server_is_unavailable_within_the_bound(worker, draft):
    server = await started(worker, draft)
    await server.stop()
    began = time.monotonic()
    async with open_channel(server.address) as channel:
        with pytest.raises(Unavailable, match=server.address):
            await wait_connected(channel, server.address, 0.3)
    assert time.monotonic() - began < 2


async def test_comes_back_to_a_restarted_server_within_seconds(worker, draft):
    server = await started(worker, draft)
    async with open_channel(server.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        await stub.GetInfo(worker_pb2.GetInfoRequest())
        await server.stop()
        with pytest.raises(Unavailable), peer_errors():
            await stub.GetInfo(worker_pb2.GetInfoRequest())
        await asyncio.sleep(0.5)
        again = await started(worker, draft, server.address)
        began = time.monotonic()
        await stub.GetInfo(worker_pb2.GetInfoRequest(), wait_for_ready=True, timeout=10)
        assert time.monotonic() - began < 4
        await again.stop()


async def test_pings_do_not_end_a_long_silent_call(worker, draft):
    async def stay_silent():
        await asyncio.sleep(7)

    # gRPC's own limit, one ping in five minutes, ends this call with too_many_pings after some 6 s.
    worker.behaviour = stay_silent
    server = new_server(ServingSettings(min_ping_interval_s=0.5), worker, draft)
    async with open_channel(await server.start(), keepalive_s=1) as channel:
        response = await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest())
    assert response.replica == "told"
    await server.stop()
