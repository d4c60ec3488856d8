"""Health, readiness and drain, of servers in this process and of real ones that get signals."""

import asyncio
import os
import signal
import sys
import time
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.errors import Unavailable
from outrider.serving.channel import open_channel
from outrider.serving.server import Server
from outrider.serving.settings import ServingSettings
from outrider.v1 import worker_pb2, worker_pb2_grpc
from tests.serving.conftest import ROOT, new_server, told_process

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(channel: grpc.aio.Channel, name: str = "") -> int:
    return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))).status


def call(channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryCall:
    return worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=20)


async def test_health_knows_the_process_and_each_service(channel):
    for name in ("", "outrider.v1.WorkerService", "outrider.v1.DraftService"):
        assert await health_of(channel, name) == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_of(channel, "outrider.v1.TargetService")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@asynccontextmanager
async def watched(**settings):
    """Yields what a server's health goes by, and a channel to the server."""
    states = {"live": True, "ready": True}
    server = Server(
        ServingSettings(**settings), name="told", is_live=lambda: states["live"], is_ready=lambda: states["ready"]
    )
    address = await server.start()
    try:
        async with open_channel(server.health_address or address) as channel:
            yield states, channel
    finally:
        await server.stop()


async def until_health(channel, name, wanted):
    async with asyncio.timeout(10):
        while await health_of(channel, name) != wanted:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("settings", [{}, {"health_address": "127.0.0.1:0"}])
async def test_liveness_and_readiness_are_what_the_service_says(settings):
    async with watched(**settings) as (states, channel):
        assert await health_of(channel, "liveness") == await health_of(channel, "readiness") == SERVING
        states["ready"] = False
        await until_health(channel, "readiness", NOT_SERVING)
        assert await health_of(channel, "liveness") == await health_of(channel) == SERVING
        states["live"] = False
        states["ready"] = True
        await until_health(channel, "liveness", NOT_SERVING)
        await until_health(channel, "readiness", SERVING)


async def test_a_drain_ends_readiness_and_not_liveness():
    async with told_process("--drain-s", "4") as (process, address), open_channel(address) as channel:
        process.send_signal(signal.SIGTERM)
        await until_health(channel, "readiness", NOT_SERVING)
        await asyncio.sleep(0.8)  # longer than the service's own health is looked at
        assert await health_of(channel, "readiness") == NOT_SERVING
        assert await health_of(channel, "liveness") == SERVING


async def test_health_can_be_asked_from_the_shell():
    async with told_process("--drain-s", "1.5") as (process, address):

        async def asked(name):
            asking = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "outrider.serving", name), env={**os.environ, "OUTRIDER_ADDRESS": address}
            )
            return await asyncio.wait_for(asking.wait(), 20)

        assert await asked("readiness") == 0
        assert await asked("unknown") == 1
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), 10)
        assert await asked("readiness") == 1


async def test_reflection_lists_the_services(worker, draft):
    server = new_server(ServingSettings(reflection=True, drain_budget_s=1.0), worker, draft)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with open_channel(await server.start()) as channel:
        responses = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        names = [service.name async for response in responses for service in response.list_services_response.service]
    await server.stop()
    assert {"outrider.v1.WorkerService", "outrider.v1.DraftService", "grpc.health.v1.Health"} <= set(names)


async def test_an_address_in_use_is_named():
    first = Server(ServingSettings(), name="first")
    address = await first.start()
    with pytest.raises(Unavailable, match=address):
        await Server(ServingSettings(address=address), name="second").start()
    await first.stop()


async def test_ready_file_holds_the_address_while_serving(tmp_path):
    ready_file = tmp_path / "ready"
    server = Server(ServingSettings(ready_file=ready_file), name="told")
    address = await server.start()
    assert [path.read_text() for path in tmp_path.iterdir()] == [address]
    await server.stop()
    assert not ready_file.exists()


async def test_a_failing_drain_does_not_keep_the_server_up(caplog):
    async def fail():
        raise RuntimeError("cannot drain")

    server = Server(ServingSettings(), name="told", drain=fail)
    await server.start()
    await asyncio.wait_for(server.stop(), 5)
    assert "drain failed" in caplog.messages


async def test_a_server_has_stopped_when_the_calls_that_it_cut_have_ended(worker, draft):
    begun, ended = [], []

    async def hold():
        begun.append(1)
        try:
            await asyncio.Event().wait()
        finally:
            # As what gives back a lease takes a moment.
            await asyncio.sleep(0.02)
            ended.append(1)

    worker.behaviour = hold
    server = new_server(ServingSettings(drain_budget_s=0.3), worker, draft)
    async with open_channel(await server.start()) as channel:
        calls = [call(channel) for _ in range(3)]
        async with asyncio.timeout(10):
            while len(begun) < 3:
                await asyncio.sleep(0.01)
        await server.stop()
        assert len(ended) == 3
        for cut in calls:
            with pytest.raises(grpc.aio.AioRpcError):
                await cut


async def test_sigterm_serves_while_the_service_drains_then_ends_with_zero():
    async with told_process("--drain-s", "2.0", "--call-s", "0.1") as (process, address):
        async with open_channel(address) as channel:
            assert await health_of(channel) == SERVING
            process.send_signal(signal.SIGTERM)
            while await health_of(channel) == SERVING:
                await asyncio.sleep(0.01)
            assert await health_of(channel, "outrider.v1.WorkerService") == NOT_SERVING
            assert (await call(channel)).replica == "slow"
            _, stderr = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 0
        assert b"drain called" in stderr


async def test_a_running_call_is_finished_and_an_open_health_watch_does_not_hold_the_process():
    async with told_process("--call-s", "1.0") as (process, address), open_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        running = call(channel)
        async with asyncio.timeout(20):
            while b"call begun" not in await process.stderr.readline():
                pass
        process.send_signal(signal.SIGTERM)
        assert (await watch.read()).status == NOT_SERVING
        assert (await running).replica == "slow"
        await asyncio.wait_for(process.communicate(), 5)
        assert process.returncode == 0


async def test_the_budget_ends_a_drain_that_takes_too_long():
    async with told_process("--drain-budget-s", "1", "--drain-s", "60") as (process, _):
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, stderr = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 0
        assert time.monotonic() - began < 3
        assert b"drain budget exceeded" in stderr


async def test_a_second_signal_ends_the_process_at_once():
    async with told_process("--drain-s", "60") as (process, address), open_channel(address) as channel:
        process.send_signal(signal.SIGINT)
        while await health_of(channel) == SERVING:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.communicate(), 5)
        assert process.returncode == 128 + signal.SIGINT


async def test_a_process_that_cannot_listen_says_so_in_one_line():
    async with told_process() as (_, address):
        second = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.serving.told_process", "--address", address),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stdout, stderr = await asyncio.wait_for(second.communicate(), 20)
    assert (second.returncode, stdout) == (1, b"")
    assert stderr.splitlines()[-1] == f"UNAVAILABLE: cannot listen on {address}".encode()
    assert b"Traceback" not in stderr
