"""Channels to servers that are there, are not, and come back."""

import asyncio
import signal
import sys
import time
from contextlib import asynccontextmanager

import pytest

from outrider.errors import Unavailable
from outrider.serving.channel import open_channel, wait_connected
from outrider.serving.settings import ServingSettings
from outrider.serving.status import peer_errors
from outrider.v1 import worker_pb2, worker_pb2_grpc
from tests.serving.conftest import new_server, told_process


@asynccontextmanager
async def running(worker, draft, **settings):
    server = new_server(ServingSettings(**settings), worker, draft)
    try:
        yield await server.start()
    finally:
        await server.stop()


async def test_waits_until_connected(worker, draft):
    async with running(worker, draft) as address, open_channel(address) as channel:
        await wait_connected(channel, address, 5)


async def test_an_absent_server_is_unavailable_within_the_bound(worker, draft):
    async with running(worker, draft) as address:
        pass
    began = time.monotonic()
    async with open_channel(address) as channel:
        with pytest.raises(Unavailable, match=address):
            await wait_connected(channel, address, 0.3)
    assert time.monotonic() - began < 2


async def test_comes_back_to_a_restarted_server_within_seconds(worker, draft):
    async with running(worker, draft) as address:
        channel = open_channel(address)
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        await stub.GetInfo(worker_pb2.GetInfoRequest())
    with pytest.raises(Unavailable), peer_errors():
        await stub.GetInfo(worker_pb2.GetInfoRequest())
    await asyncio.sleep(0.5)
    async with running(worker, draft, address=address):
        began = time.monotonic()
        await stub.GetInfo(worker_pb2.GetInfoRequest(), wait_for_ready=True, timeout=10)
        assert time.monotonic() - began < 4
        await channel.close()


async def test_pings_do_not_end_a_long_silent_call(worker, draft):
    async def stay_silent():
        await asyncio.sleep(7)

    # gRPC's own limit, one ping in five minutes, ends this call with too_many_pings after some 4 to 6 s.
    worker.behaviour = stay_silent
    async with (
        running(worker, draft, keepalive_s=2) as address,
        open_channel(address, keepalive_s=1) as channel,
    ):
        response = await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest())
    assert response.replica == "told"


async def test_a_stopped_server_is_found_out_by_pings():
    async with (
        told_process("--call-s", "100", "--keepalive-s", "2") as (process, address),
        open_channel(address, keepalive_s=1) as channel,
    ):
        call = worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest())
        async with asyncio.timeout(20):
            while b"call begun" not in await process.stderr.readline():
                pass
        process.send_signal(signal.SIGSTOP)
        # Its kernel keeps the connection. gRPC gives a ping a minute where nothing else is said.
        async with asyncio.timeout(10):
            with pytest.raises(Unavailable), peer_errors():
                await call


CLIENT = """
import asyncio, sys
from outrider.serving.channel import open_channel
from outrider.v1 import worker_pb2, worker_pb2_grpc

async def main():
    async with open_channel(sys.argv[1]) as channel:
        await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest())

asyncio.run(main())
"""


async def test_a_stopped_client_is_found_out_by_pings(worker, draft):
    begun, ended = asyncio.Event(), asyncio.Event()

    async def stay_silent():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    worker.behaviour = stay_silent
    async with running(worker, draft, keepalive_s=1) as address:
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, address)
        try:
            await asyncio.wait_for(begun.wait(), 20)
            client.send_signal(signal.SIGSTOP)
            await asyncio.wait_for(ended.wait(), 10)
        finally:
            client.kill()
            await client.wait()


class _Names(asyncio.DatagramProtocol):
    """Answers each question for an IPv4 address with the loopback's, and any other with nothing."""

    num_asked = 0

    def connection_made(self, transport):
        self._transport = transport

    def datagram_received(self, data, address):
        end = data.index(b"\0", 12) + 5
        is_ipv4 = data[end - 4 : end - 2] == b"\0\1"
        self.num_asked += is_ipv4
        answer = b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4\x7f\0\0\1" if is_ipv4 else b""
        self._transport.sendto(
            data[:2] + b"\x81\x80\0\1\0" + bytes([is_ipv4]) + bytes(4) + data[12:end] + answer, address
        )


async def test_a_name_without_an_address_that_answers_is_looked_up_again_within_seconds():
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(_Names, local_addr=("127.0.0.1", 0))
    port = transport.get_extra_info("sockname")[1]
    try:
        # Nothing listens at port 1. gRPC's own bound of 30 s between two lookups would let one be made.
        async with open_channel(f"dns://127.0.0.1:{port}/orchestrator.test:1", balances=True) as channel:
            channel.get_state(try_to_connect=True)
            async with asyncio.timeout(20):
                while names.num_asked < 3:
                    await asyncio.sleep(0.05)
    finally:
        transport.close()
