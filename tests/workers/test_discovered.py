"""An orchestrator whose workers come and go as pods of a cluster do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from bench.api_server import NAMESPACE, ApiServer, pod
from orchestrator.settings import OrchestratorSettings
from outrider.discovery.cluster import Cluster
from outrider.errors import Unavailable
from outrider.workers.links import DRAFT, TARGET
from outrider.workers.pool import LinkPool
from tests.orchestrator.scripted import ScriptedDraft, ScriptedTarget, continuation
from tests.orchestrator.stage import PROMPT, Orchestrator, asking, orchestrating, tokens_of, until

EXPECTED = continuation(PROMPT, 20)


@pytest.fixture
async def orchestrator(server: ApiServer, session_store_url: str, tmp_path: Path) -> AsyncIterator[Orchestrator]:
    async with finding(server.kubeconfig(tmp_path), session_store_url) as running:
        yield running


def finding(kubeconfig: Path, redis_url: str) -> AbstractAsyncContextManager[Orchestrator]:
    """Run an orchestrator that finds its workers in a cluster."""
    return orchestrating(
        redis_url,
        (),
        targets=(f"kubernetes://{NAMESPACE}/target:grpc",),
        drafts=(f"kubernetes://{NAMESPACE}/draft:grpc",),
        kubeconfig=kubeconfig,
    )


async def list_target(server: ApiServer, target: ScriptedTarget, **conditions: bool) -> None:
    """Make the API server list a target, or change it."""
    host, _, port = target.address.rpartition(":")
    await server.put(target.info.replica, pod(target.info.replica, host, **conditions), port=int(port))


async def until_links(orchestrator: Orchestrator, *addresses: str) -> None:
    await until(lambda: {link.address for link in orchestrator.replicas.targets if link.is_up} == set(addresses))


async def test_a_new_pod_gets_sessions(server: ApiServer, orchestrator: Orchestrator, target: ScriptedTarget) -> None:
    asked = asyncio.create_task(orchestrator.events(asking(plain=True)))
    await list_target(server, target)
    assert tokens_of(await asked) == EXPECTED, "it waited for the first one"
    async with ScriptedTarget("t1") as other:
        target.load.num_active_sessions = 9
        await list_target(server, other)
        await until_links(orchestrator, target.address, other.address)
        async with asyncio.timeout(10):
            while not other.opened:
                assert tokens_of(await orchestrator.events(asking(plain=True))) == EXPECTED


async def test_a_terminating_pod_keeps_its_sessions_and_gets_no_others(
    server: ApiServer, orchestrator: Orchestrator, target: ScriptedTarget
) -> None:
    target.run_len = 5
    await list_target(server, target)
    running = asyncio.create_task(orchestrator.events(asking(plain=True)))
    await target.saw("open")
    async with ScriptedTarget("t1") as other:
        other.load.num_active_sessions = 99
        await list_target(server, other)
        await list_target(server, target, ready=False, terminating=True)
        await until(
            lambda: any(link.endpoint and link.endpoint.is_terminating for link in orchestrator.replicas.targets)
        )
        await until_links(orchestrator, target.address, other.address)
        assert tokens_of(await orchestrator.events(asking(plain=True))) == EXPECTED
        assert len(other.opened) == 1
        # Gone from the list: the session that runs there still does not notice.
        await server.remove(target.info.replica)
        await until(lambda: not all(link.endpoint for link in orchestrator.replicas.targets))
        target.allow(None)
        assert tokens_of(await running) == EXPECTED
        assert len(other.opened) == 1
        await until_links(orchestrator, other.address)
        await until(lambda: len(orchestrator.replicas.targets) == 1)


async def test_without_the_api_server_everything_goes_on(
    server: ApiServer, orchestrator: Orchestrator, target: ScriptedTarget
) -> None:
    await list_target(server, target)
    await until_links(orchestrator, target.address)
    await server.stop()
    assert tokens_of(await orchestrator.events(asking(plain=True))) == EXPECTED


async def test_a_pod_that_is_listed_again_before_its_sessions_end_stays(
    server: ApiServer, orchestrator: Orchestrator, target: ScriptedTarget
) -> None:
    target.run_len = 5
    await list_target(server, target)
    running = asyncio.create_task(orchestrator.events(asking(plain=True)))
    await target.saw("open")
    await server.remove(target.info.replica)
    await until(lambda: not all(link.endpoint for link in orchestrator.replicas.targets))
    await list_target(server, target)
    await until(lambda: all(link.endpoint for link in orchestrator.replicas.targets))
    target.allow(None)
    assert tokens_of(await running) == EXPECTED
    assert tokens_of(await orchestrator.events(asking(plain=True))) == EXPECTED
    assert len(target.opened) == 2


async def test_a_pod_that_is_gone_and_idle_loses_its_link_at_once(
    server: ApiServer, orchestrator: Orchestrator, target: ScriptedTarget
) -> None:
    await list_target(server, target)
    await until_links(orchestrator, target.address)
    await server.remove(target.info.replica)
    await until(lambda: not orchestrator.replicas.targets)
    with pytest.raises(Unavailable, match="none was found"):
        await orchestrator.events(asking(plain=True))


async def test_a_pod_that_is_not_ready_comes_last(
    server: ApiServer, orchestrator: Orchestrator, target: ScriptedTarget
) -> None:
    await list_target(server, target, ready=False)
    assert tokens_of(await orchestrator.events(asking(plain=True))) == EXPECTED, "better than none"
    async with ScriptedTarget("t1") as other:
        other.load.num_active_sessions = 99
        await list_target(server, other)
        await until_links(orchestrator, target.address, other.address)
        assert tokens_of(await orchestrator.events(asking(plain=True))) == EXPECTED
        assert len(other.opened) == 1


async def test_drafts_are_discovered_too(
    server: ApiServer, orchestrator: Orchestrator, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    await list_target(server, target)
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


async def test_a_worker_of_the_other_kind_is_out_of_rotation(session_store_url: str, draft: ScriptedDraft) -> None:
    async with orchestrating(session_store_url, (), (), targets=(draft.address,), failover_timeout_s=0.5) as running:
        await until(lambda: "is a draft" in running.replicas.targets[0].problem)
        with pytest.raises(Unavailable, match="is a draft"):
            await running.events(asking(plain=True))


async def test_two_places_that_have_the_same_address_are_one_link() -> None:
    settings = OrchestratorSettings()
    pool = LinkPool(TARGET, ("a:1", "b:1", "a:1"), "targets", settings, Cluster(None))
    assert [link.address for link in pool.links] == ["a:1", "b:1"]
    assert LinkPool(DRAFT, (), "drafts", settings, Cluster(None)).is_empty
    assert not LinkPool(DRAFT, ("dns:///d:1",), "drafts", settings, Cluster(None)).is_empty
