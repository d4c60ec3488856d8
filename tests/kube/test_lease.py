"""Elections by a Lease of a real API server, with the rights that the manifests give."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench.api_server import NAMESPACE
from bench.proxy import proxied
from orchestrator.discovery.api import connect
from orchestrator.election.election import parse_lease
from orchestrator.election.lease import LeaseElection
from tests.k8s.rendering import environment, overlay, workloads
from tests.kube.control_plane import ControlPlane
from tests.orchestrator.election.candidate import Candidate, until
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import orchestrating
from tests.orchestrator.test_housekeeping import keeping_house, reading

pytestmark = pytest.mark.kube

LEASE_S = 8.0


@pytest.fixture
def name() -> str:
    """The Lease that orchestrators are told of, and that their role names."""
    objects = overlay("production")
    lease = parse_lease(environment(objects, workloads(objects)["orchestrator"])["OUTRIDER_HOUSEKEEPING_LEASE"])
    assert lease is not None
    return lease[1]


@asynccontextmanager
async def standing(
    server: ControlPlane, name: str, folder: Path, identity: str, *, address: str = "", lease_s: float = LEASE_S
) -> AsyncIterator[Candidate]:
    """A candidate with a connection of its own; see `ControlPlane.kubeconfig` for `address`."""
    api = await connect(server.kubeconfig(folder, address=address))
    candidate = Candidate(LeaseElection(api, NAMESPACE, name, identity, lease_s))
    try:
        yield candidate
    finally:
        await candidate.stop()
        await api.close()


async def test_one_leads_and_another_follows_when_it_gives_up(server: ControlPlane, name: str, tmp_path: Path) -> None:
    async with (
        standing(server, name, tmp_path, "one") as one,
        standing(server, name, tmp_path, "two") as two,
    ):
        await until(lambda: one.is_leading or two.is_leading)
        # Each renews or looks once in a retry period; so both have done it again and again.
        num_looks = await server.num_requests("GET", "leases")
        await server.until_requests("GET", "leases", num_looks + 10)
        assert sorted((one.num_times, two.num_times)) == [0, 1]
        leader, other, other_identity = (one, two, "two") if one.is_leading else (two, one, "one")
        began = time.monotonic()
        await leader.stop()
        assert "holderIdentity" not in await server.lease(name), "it was given up"
        await until(lambda: other.is_leading, LEASE_S)
        assert time.monotonic() - began < LEASE_S / 2, "nobody waits for what was given up to expire"
        assert (await server.lease(name))["holderIdentity"] == other_identity


async def test_a_leader_that_is_cut_off_stops_before_another_begins(
    server: ControlPlane, name: str, tmp_path: Path
) -> None:
    async with (
        proxied(server.address) as proxy,
        standing(server, name, tmp_path, "cut-off", address=proxy.address) as leader,
    ):
        await until(lambda: leader.is_leading)
        async with standing(server, name, tmp_path, "other") as other:
            num_looks = await server.num_requests("GET", "leases")
            await server.until_requests("GET", "leases", num_looks + 4)
            await proxy.set_blackhole(up=True, down=True)
            began = time.monotonic()
            await until(lambda: not leader.is_leading or other.is_leading, 2 * LEASE_S)
            assert not other.is_leading
            assert time.monotonic() - began < LEASE_S
            await until(lambda: other.is_leading, 2 * LEASE_S)
            await proxy.set_blackhole(up=False, down=False)
            # The one that was cut off is back, and sees that another one leads.
            num_looks = await server.num_requests("GET", "leases")
            await server.until_requests("GET", "leases", num_looks + 6)
            assert (leader.is_leading, leader.num_times, other.num_times) == (False, 1, 1)
            assert (await server.lease(name))["holderIdentity"] == "other"


async def test_a_restart_of_the_server_changes_no_leader(server: ControlPlane, name: str, tmp_path: Path) -> None:
    # With the lease that orchestrators have, whose renewal may take 20 s.
    async with (
        standing(server, name, tmp_path, "leader", lease_s=30.0) as leader,
        standing(server, name, tmp_path, "other", lease_s=30.0) as other,
    ):
        await until(lambda: leader.is_leading or other.is_leading)
        times = (leader.num_times, other.num_times)
        await server.stop()
        await server.start()
        await server.until_requests("PUT", "leases", 2)
        assert (leader.num_times, other.num_times) == times
        assert leader.is_leading != other.is_leading


async def test_of_two_orchestrators_one_keeps_house(
    server: ControlPlane, name: str, session_store_url: str, target: ScriptedTarget, tmp_path: Path
) -> None:
    where = {"kubeconfig": server.kubeconfig(tmp_path), "housekeeping_lease": f"kubernetes://{NAMESPACE}/{name}"}
    async with (
        orchestrating(session_store_url, (target,), **where) as one,
        orchestrating(session_store_url, (target,), **where) as other,
    ):
        async with keeping_house(one):
            await until(lambda: reading(one, "is_housekeeper") == 1)
            num_looks = target.num_looks
            async with keeping_house(other):
                await until(lambda: target.num_looks > num_looks + 3)
                assert reading(other, "is_housekeeper") == 0
        async with keeping_house(other):
            await until(lambda: reading(other, "is_housekeeper") == 1)
