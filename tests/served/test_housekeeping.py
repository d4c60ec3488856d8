"""Sessions that have expired are gone from workers too, with real processes."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import grpc

from outrider.client import GenerationRequest, LocalStack
from outrider.parameters import SamplingParameters
from outrider.v1 import worker_pb2
from outrider.v1.worker_pb2_grpc import WorkerServiceStub
from tests.served.stacks import markov_stack, until_all_in_rotation

TTL_S = 10
ENVIRONMENT = {"OUTRIDER_SESSION_TTL_S": str(TTL_S), "OUTRIDER_HOUSEKEEPING_INTERVAL_S": "0.2"}


async def test_workers_forget_sessions_that_have_expired() -> None:
    options = markov_stack(num_orchestrators=2)
    environment = {**options.orchestrator_environment, **ENVIRONMENT}
    stack = LocalStack(replace(options, orchestrator_environment=environment))
    async with stack, stack.client() as client:
        await until_all_in_rotation(stack)
        parameters = SamplingParameters(seed=1, max_tokens=200, ignore_eos=True)
        requests = [GenerationRequest(token_ids=(1, 2, 3), parameters=parameters) for _ in range(3)]
        await asyncio.gather(*(client.complete(request) for request in requests))
        addresses = [process.address for process in (*stack.targets, *stack.drafts)]
        known = await until(addresses, lambda seen: all(len(sessions) == 3 for sessions in seen))
        assert known[0] == known[1], "by the same names"
        await until(addresses, lambda seen: not any(seen))


async def until(addresses: list[str], holds: Callable[[list[set[str]]], bool]) -> list[set[str]]:
    """Returns the idle sessions of all workers once something holds for them."""
    async with asyncio.timeout(30):
        while True:
            seen = await asyncio.gather(*map(idle_sessions, addresses))
            if holds(seen):
                return seen
            await asyncio.sleep(0.05)


async def idle_sessions(address: str) -> set[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        parts = WorkerServiceStub(channel).ListIdleSessions(worker_pb2.ListIdleSessionsRequest(), timeout=10)
        return {session_id async for part in parts for session_id in part.session_ids}
