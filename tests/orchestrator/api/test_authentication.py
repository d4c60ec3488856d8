"""Tenants through the served API: whose a session is, and what its owner may use."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outrider.client import GenerationRequest, OutriderClient
from outrider.client.retry import RetryPolicy
from outrider.errors import Overloaded, SessionNotFound, Unauthenticated
from outrider.parameters import SamplingParameters
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import PROMPT, Orchestrator, early_in_a_minute, orchestrating

ONE, TWO = "token-of-one", "token-of-two"
ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture
async def orchestrator(session_store_url: str, target: ScriptedTarget, tmp_path: Path) -> AsyncIterator[Orchestrator]:
    file = tmp_path / "tenants.json"
    limits = {"max_streams": 1, "max_sessions": 2, "tokens_per_minute": 100}
    # Other names than those of other tests, which share the store.
    names = [f"{tmp_path.name}-{number}" for number in range(2)]
    file.write_text(json.dumps({names[0]: {"tokens": [ONE]}, names[1]: {"tokens": [TWO], **limits}}))
    async with orchestrating(session_store_url, (target,), tenants_file=file) as running:
        yield running


def client(orchestrator: Orchestrator, token: str) -> OutriderClient:
    return OutriderClient(orchestrator.address, token=token, retry=ONCE)


def request(session_id: str, num_tokens: int = 8) -> GenerationRequest:
    parameters = SamplingParameters(max_tokens=num_tokens, seed=1)
    return GenerationRequest(token_ids=PROMPT, session_id=session_id, parameters=parameters)


@pytest.mark.parametrize("token", ["", "token-of-nobody"])
async def test_fault_45_no_call_is_served_without_a_token(orchestrator: Orchestrator, token: str) -> None:
    async with client(orchestrator, token) as caller:
        for call in (
            caller.complete(request("s")),
            caller.cancel("s"),
            caller.get_session("s"),
            caller.delete_session("s"),
            caller.list_models(),
        ):
            with pytest.raises(Unauthenticated):
                await call


async def test_fault_43_another_tenants_session_is_not_found(
    orchestrator: Orchestrator, target: ScriptedTarget
) -> None:
    async with client(orchestrator, ONE) as owner, client(orchestrator, TWO) as other:
        await owner.complete(request("session"))
        for call in (other.get_session("session"), other.cancel("session"), other.delete_session("session")):
            with pytest.raises(SessionNotFound):
                await call
        # A request of the other's under the same name is a session of its own.
        assert len((await other.complete(request("session"))).token_ids) == 8
        assert (await owner.get_session("session")).committed_len == len(PROMPT) + 8
        salts = {message.cache_salt for message in target.opened}
        keys = {message.session_id for message in target.opened}
        assert len(salts) == len(keys) == 2
        await owner.delete_session("session")
        assert (await other.get_session("session")).committed_len == len(PROMPT) + 8


async def test_fault_43_what_a_client_sends_does_not_choose_the_salt(
    orchestrator: Orchestrator, target: ScriptedTarget
) -> None:
    async with client(orchestrator, ONE) as owner, client(orchestrator, TWO) as other:
        for caller, session_id in ((owner, "a"), (owner, "b"), (other, "a")):
            await caller.complete(request(session_id))
    first, second, third = (message.cache_salt for message in target.opened)
    assert first == second != third


async def test_a_tenant_at_its_limit_is_told_when_to_come_back(
    orchestrator: Orchestrator, target: ScriptedTarget
) -> None:
    async with client(orchestrator, TWO) as caller, client(orchestrator, ONE) as unlimited:
        target.allow(5)
        running = caller.generate(request("a"))
        await anext(running)
        with pytest.raises(Overloaded, match="1 requests generate at once") as caught:
            await caller.complete(request("b"))
        assert caught.value.retry_after_s > 0
        target.allow(None)
        await unlimited.complete(request("b"))
        await running.aclose()
        async with asyncio.timeout(10):
            while True:  # the server learns a moment later that the stream was closed
                try:
                    await caller.complete(request("b"))
                    break
                except Overloaded:
                    await asyncio.sleep(0.02)
        with pytest.raises(Overloaded, match="2 sessions live"):
            await caller.complete(request("c"))
        await caller.delete_session("a")
        await early_in_a_minute()
        await caller.complete(request("c", 100))
        with pytest.raises(Overloaded, match="100 tokens were generated"):
            await caller.complete(request("c"))
