"""Kill -9 under HTTP streams, clients that leave, and requests without a session: over real processes."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from tests.faults.scene import load_of
from tests.faults.stack import FaultOptions, FaultStack

NUM_STREAMS, NUM_TOKENS = 50, 250
TARGET = "markov:text=1,seed=5,step_s=0.004"
KEY = {"authorization": "Bearer key-of-a-tenant"}
_BOUND_S = 90.0


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator["HttpStack"]:
    """Two orchestrators with HTTP and one tenant, who may have five sessions; two targets and a draft."""
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"tenant": {"tokens": ["key-of-a-tenant"], "max_sessions": 5}}))
    options = FaultOptions(
        target=TARGET,
        draft=f"{TARGET},noise=0.2,step_s=0.0005",
        orchestrator_environment={"OUTRIDER_HTTP_ADDRESS": "127.0.0.1:0", "OUTRIDER_TENANTS_FILE": str(tenants)},
    )
    running = HttpStack(options, tmp_path)
    try:
        await running.start()
        yield running
    finally:
        await running.close()


class HttpStack(FaultStack):
    """A stack whose tenants are known by their keys; its workers' rotation is seen by their loads."""

    async def healed(self) -> None:
        """Return when every orchestrator completes a request."""
        async with asyncio.timeout(40), httpx.AsyncClient() as client:
            for process in self.orchestrators:
                url = f"http://{process.http_address}/v1/completions"
                body = {"prompt": "a", "max_tokens": 1}
                while (await client.post(url, json=body, headers=KEY)).status_code != 200:
                    await asyncio.sleep(0.05)


@dataclass(slots=True)
class Stream:
    """A streamed chat, as its client has it so far.

    Attributes:
        seed: of the request; its text depends on it.
        text: what came.
        position: the last `id:` line.
        heads: the id and `created` of every chunk.
        is_done: whether [DONE] came.
        num_resumed: how often it was resumed.
        num_counted: output tokens by the usage at its end.
    """

    seed: int
    num_tokens: int = NUM_TOKENS
    text: str = ""
    position: str = ""
    heads: set[tuple[str, int]] = field(default_factory=set)
    is_done: bool = False
    num_resumed: int = 0
    num_counted: int = 0

    @property
    def body(self) -> dict[str, Any]:
        """The request, which is the same whenever it is resumed."""
        messages = [{"role": "user", "content": f"hello {self.seed}"}]
        asked: dict[str, Any] = {"messages": messages, "seed": self.seed, "stream": True, "ignore_eos": True}
        return {**asked, "max_tokens": self.num_tokens, "stream_options": {"include_usage": True}}

    async def read(self, client: httpx.AsyncClient, address: str) -> None:
        """Read on until the end, or until the connection or the server ends it."""
        headers = {**KEY, **({"last-event-id": self.position} if self.position else {})}
        url = f"http://{address}/v1/chat/completions"
        async with client.stream("POST", url, json=self.body, headers=headers) as response:
            if response.status_code != 200:
                raise httpx.HTTPError(f"{response.status_code}: {(await response.aread()).decode()}")
            position = ""
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    position = line[4:]
                elif line == "data: [DONE]":
                    self.is_done = True
                    return
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise httpx.HTTPError(str(chunk["error"]))
                    self.heads.add((chunk["id"], chunk["created"]))
                    self.text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                    self.position = position
                    self.num_counted = chunk.get("usage", {}).get("completion_tokens", self.num_counted)
        raise httpx.HTTPError("the stream ended without [DONE]")

    async def read_all(self, client: httpx.AsyncClient, addresses: list[str], first: int) -> None:
        """Read it whole, resumed at the next address whenever it breaks."""
        async with asyncio.timeout(_BOUND_S):
            while not self.is_done:
                try:
                    await self.read(client, addresses[(first + self.num_resumed) % len(addresses)])
                except httpx.HTTPError:
                    self.num_resumed += 1
                    await asyncio.sleep(0.1)


def browser() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=30, limits=limits)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["orchestrator", "target"])
async def test_streams_over_http_outlive_a_killed(stack: FaultStack, victim: str) -> None:
    addresses = [process.http_address for process in stack.orchestrators]
    async with browser() as client:
        # One by one another order and another batch: the texts depend on the seeds alone.
        plain = [Stream(seed) for seed in range(NUM_STREAMS)]
        await asyncio.gather(*(stream.read_all(client, addresses, 0) for stream in plain))
        streams = [Stream(seed) for seed in range(NUM_STREAMS)]
        tasks = [
            asyncio.create_task(stream.read_all(client, addresses, number)) for number, stream in enumerate(streams)
        ]
        async with asyncio.timeout(30):
            while not all(len(stream.text) > 10 for stream in streams):
                await asyncio.sleep(0.01)
        assert not any(stream.is_done for stream in streams)
        processes = stack.orchestrators if victim == "orchestrator" else stack.targets
        os.kill(processes[0].pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
    assert [stream.text for stream in streams] == [stream.text for stream in plain]
    assert all(stream.num_counted == NUM_TOKENS for stream in streams)
    assert all(len(stream.heads) == 1 for stream in streams)
    assert len({stream.heads.copy().pop()[0] for stream in streams}) == NUM_STREAMS
    if victim == "orchestrator":
        assert sum(bool(stream.num_resumed) for stream in streams) >= NUM_STREAMS // 2


async def _idle(stack: FaultStack) -> None:
    """Return once no target has a session."""
    async with asyncio.timeout(5):
        while any([(await load_of(process)).num_active_sessions for process in stack.targets]):
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_who_leaves_an_http_stream_ends_it_and_can_resume_it(stack: FaultStack) -> None:
    one, other = (process.http_address for process in stack.orchestrators)
    async with browser() as client:
        plain, left = Stream(3, 600), Stream(3, 600)
        await plain.read(client, one)
        task = asyncio.create_task(left.read(client, one))
        async with asyncio.timeout(10):
            while len(left.text) < 20:
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await _idle(stack)
        assert len(left.text) < 300
        await left.read(client, other)
        assert left.text == plain.text
        assert len(left.heads) == 1


@pytest.mark.slow
async def test_a_thousand_requests_without_a_session_leave_none(stack: FaultStack) -> None:
    url = f"http://{stack.orchestrators[0].http_address}/v1/completions"
    async with browser() as client, Redis.from_url(stack.redis.url) as redis:
        for _ in range(50):
            body = {"prompt": "a", "max_tokens": 1}
            responses = await asyncio.gather(*(client.post(url, json=body, headers=KEY) for _ in range(20)))
            assert [response.status_code for response in responses] == [200] * 20
        async with asyncio.timeout(10):
            while any([b"lease" in key async for key in redis.scan_iter()]):
                await asyncio.sleep(0.05)
        lifetimes = {key: await redis.ttl(key) async for key in redis.scan_iter()}
        counted = [key for key in lifetimes if await redis.type(key) == b"zset"]
        sizes = {key: await redis.zcard(key) for key in counted}
    unbounded = {key: lifetime for key, lifetime in lifetimes.items() if not 0 <= lifetime <= 300}
    assert len(lifetimes) >= 1000
    assert not {key for key in unbounded if key not in counted}, list(unbounded.items())[:5]
    assert all(size <= 5 for size in sizes.values()), sizes
