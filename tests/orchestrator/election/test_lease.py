"""Elections by a Lease, held by a fake API server; `make kube-apiserver` has them held by a real one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bench.api_server import NAMESPACE, ApiServer
from orchestrator.discovery.api import connect
from orchestrator.election.lease import LeaseElection
from tests.orchestrator.election.candidate import Candidate, until

NAME = "house"
LEASE_S = 8.0


@pytest.fixture
async def api(server: ApiServer, tmp_path: Path) -> AsyncIterator[Any]:
    client = await connect(server.kubeconfig(tmp_path))
    yield client
    await client.close()


def candidate(api: Any, identity: str) -> Candidate:
    return Candidate(LeaseElection(api, NAMESPACE, NAME, identity, LEASE_S))


def holder(server: ApiServer) -> str | None:
    return server.leases[NAME]["spec"].get("holderIdentity")


async def test_one_leads_and_another_follows_when_it_gives_up(server: ApiServer, api: Any) -> None:
    first = candidate(api, "first")
    await until(lambda: first.is_leading)
    second = candidate(api, "second")
    renewed = server.leases[NAME]["spec"]["renewTime"]
    await until(lambda: server.leases[NAME]["spec"]["renewTime"] != renewed)
    assert (holder(server), second.is_leading) == ("first", False)
    await first.stop()
    assert (first.is_leading, holder(server)) == (False, None), "so that nobody waits for it to expire"
    await until(lambda: second.is_leading, LEASE_S / 2)
    assert holder(server) == "second"
    await second.stop()


async def test_who_cannot_renew_stops_before_another_one_may_begin(
    server: ApiServer, api: Any, caplog: pytest.LogCaptureFixture
) -> None:
    leader = candidate(api, "leader")
    await until(lambda: leader.is_leading)
    renewed = server.leases[NAME]["spec"]["renewTime"]
    await until(lambda: server.leases[NAME]["spec"]["renewTime"] != renewed)
    server.refusal = 500
    # From its last renewal on, which is just over.
    await until(lambda: not leader.is_leading, LEASE_S)
    assert "lease not read" in caplog.text
    # Told once it has tried to give the Lease up, which the work does not wait for.
    await until(lambda: "no longer elected" in caplog.text)
    server.refusal = 0
    await until(lambda: leader.is_leading)
    assert leader.num_times == 2, "it stands again"
    await leader.stop()


async def test_a_server_that_is_away_ends_no_candidate(
    server: ApiServer, api: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await server.stop()
    patient = candidate(api, "patient")
    await until(lambda: caplog.text.count("lease not read") > 1)
    await server.start()
    await until(lambda: patient.is_leading)
    await patient.stop()
    assert holder(server) is None


async def test_who_finds_another_one_elected_stops(server: ApiServer, api: Any) -> None:
    leader = candidate(api, "leader")
    await until(lambda: leader.is_leading)
    lease = server.leases[NAME]
    server.leases[NAME] = {
        "metadata": {**lease["metadata"], "resourceVersion": "1000000"},
        "spec": {**lease["spec"], "holderIdentity": "another", "renewTime": "2030-01-01T00:00:00.000001Z"},
    }
    await until(lambda: not leader.is_leading, LEASE_S)
    await leader.stop()
    assert holder(server) == "another", "which it leaves alone"


async def test_work_that_ends_gives_the_lease_up(server: ApiServer, api: Any) -> None:
    num_times = 0

    async def work() -> None:
        nonlocal num_times
        num_times += 1
        if num_times == 1:
            raise asyncio.CancelledError
        await asyncio.Event().wait()

    standing = asyncio.create_task(LeaseElection(api, NAMESPACE, NAME, "one", LEASE_S).run(work))
    await until(lambda: num_times == 2)
    standing.cancel()
    await asyncio.gather(standing, return_exceptions=True)
    assert holder(server) is None
