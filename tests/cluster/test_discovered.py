"""A whole orchestrator whose workers are found in a real API server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench.api_server import pod
from tests.cluster.control_plane import ControlPlane
from tests.orchestrator.scripted import ScriptedDraft, ScriptedTarget
from tests.orchestrator.stage import Orchestrator, asking, tokens_of, until
from tests.workers.test_discovered import EXPECTED, finding, list_target, until_links

pytestmark = pytest.mark.cluster


@pytest.fixture
async def orchestrator(server: ControlPlane, session_store_url: str, tmp_path: Path) -> AsyncIterator[Orchestrator]:
    async with finding(server.kubeconfig(tmp_path), session_store_url) as running:
        yield running


async def test_a_request_is_served_by_workers_that_were_found(
    server: ControlPlane, orchestrator: Orchestrator, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    asked = asyncio.create_task(orchestrator.events(asking(plain=True)))
    await list_target(server, target)
    assert tokens_of(await asked) == EXPECTED, "it waited for the first one"
    host, _, port = draft.address.rpartition(":")
    await server.put("drafts", pod("draft-0", host), service="draft", port=int(port))
    await orchestrator.until_drafts(1)
    num_accepted = 0
    # On a busy machine the target, which takes no time at all, may be done before the draft has proposed anything.
    async with asyncio.timeout(20):
        while not num_accepted:
            events = await orchestrator.events(asking())
            assert tokens_of(events) == EXPECTED
            num_accepted = events[-1].finished.statistics.num_accepted_tokens


async def test_a_pod_that_goes_hands_over_to_one_that_comes_while_the_server_restarts(
    server: ControlPlane, orchestrator: Orchestrator, target: ScriptedTarget
) -> None:
    target.run_len = 5
    await list_target(server, target)
    running = asyncio.create_task(orchestrator.events(asking(plain=True)))
    await target.saw("open")
    await server.stop()
    await server.start()
    async with ScriptedTarget("t1") as other:
        await list_target(server, other)
        await list_target(server, target, ready=False, terminating=True)
        await until_links(orchestrator, target.address, other.address)
        await until(
            lambda: any(link.endpoint and link.endpoint.is_terminating for link in orchestrator.replicas.targets)
        )
        assert tokens_of(await orchestrator.events(asking(plain=True))) == EXPECTED
        assert len(other.opened) == 1
        await server.remove(target.info.replica)
        target.allow(None)
        assert tokens_of(await running) == EXPECTED, "it kept the session that it had"
        await until_links(orchestrator, other.address)
