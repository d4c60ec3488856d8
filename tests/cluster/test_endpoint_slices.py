"""The watch of a service's endpoints against a real API server, with the rights that the manifests give."""

import asyncio
import logging
from pathlib import Path

import pytest
from kubernetes.aio.config import incluster_config

from bench.api_server import NAMESPACE, pod
from outrider.discovery.cluster import Cluster
from outrider.discovery.endpoint_slices import EndpointSlices
from outrider.discovery.endpoints import Endpoint
from tests.cluster.control_plane import ControlPlane, RefusedError
from tests.discovery.test_endpoint_slices import PLACE, Told, watching
from tests.orchestrator.stage import until

pytestmark = pytest.mark.cluster

NUM_MANY = 1000
"""Endpoints in one slice, as many as a cluster may be told to put there."""


def num_noted(caplog: pytest.LogCaptureFixture, message: str, *statuses: int) -> int:
    """Returns how often discovery has said something, of any of these statuses where some are given."""
    return sum(
        record.message.startswith(message) and (not statuses or record.__dict__["status"] in statuses)
        for record in caplog.records
        if record.name == "outrider.discovery.endpoint_slices"
    )


async def test_pods_come_and_go(server: ControlPlane, tmp_path: Path) -> None:
    assert await server.versions() == ["v1beta1"], "the newer version is not there to be found"
    await server.put("one", pod("target-0", "10.0.0.1"))
    await server.put("other", pod("draft-0", "10.9.0.1"), service="draft")
    num_lists = await server.num_requests("LIST", "endpointslices")
    async with watching(server, tmp_path) as told:
        await told.until(lambda endpoints: endpoints == (Endpoint("10.0.0.1:50051", "target-0"),))
        await server.put("two", pod("target-1", "10.0.0.2", ready=False))
        await told.addresses("10.0.0.1:50051", "10.0.0.2:50051")
        assert [item.is_ready for item in told.endpoints or ()] == [True, False]
        await server.put("two", pod("target-1", "10.0.0.2"))
        await told.until(lambda endpoints: all(item.is_ready for item in endpoints))
        await server.put("one", pod("target-0", "10.0.0.1", ready=False, terminating=True))
        await told.until(lambda endpoints: endpoints[0].is_terminating)
        await server.remove("one")
        await told.addresses("10.0.0.2:50051")
    assert await server.num_requests("LIST", "endpointslices") == num_lists + 1, "changes came by the watch"


async def test_a_watch_that_ends_goes_on_where_it_was(server: ControlPlane, tmp_path: Path) -> None:
    await server.put("one", pod("target-0", "10.0.0.1"))
    num_lists = await server.num_requests("LIST", "endpointslices")
    num_watches = await server.num_requests("WATCH", "endpointslices")
    async with watching(server, tmp_path, watch_s=1.0) as told:
        await server.until_requests("WATCH", "endpointslices", num_watches + 2)
        await server.put("two", pod("target-1", "10.0.0.2"))
        await told.addresses("10.0.0.1:50051", "10.0.0.2:50051")
        await server.until_requests("WATCH", "endpointslices", num_watches + 4)
        await server.remove("two")
        await told.addresses("10.0.0.1:50051")
    assert await server.num_requests("LIST", "endpointslices") == num_lists + 1
    assert told.num == 3, "nothing is told that has not changed"


async def test_a_compacted_version_is_listed_again(
    server: ControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    # Without its cache of recent changes the API server asks etcd for each watch.
    await server.stop()
    await server.start("--watch-cache-sizes=endpointslices.discovery.k8s.io#0")
    await server.put("one", pod("target-0", "10.0.0.1"))
    async with watching(server, tmp_path, watch_s=1.0) as told:
        await told.addresses("10.0.0.1:50051")
        # Nothing that the watch tells of, so its version stays behind.
        for address in ("10.9.0.1", "10.9.0.2", "10.9.0.3"):
            await server.put("other", pod("draft-0", address), service="draft")
        assert not num_noted(caplog, "endpoints are listed again")
        await server.compact()
        await until(lambda: num_noted(caplog, "endpoints are listed again", 410) == 1)
        await server.put("two", pod("target-1", "10.0.0.2"))
        await told.addresses("10.0.0.1:50051", "10.0.0.2:50051")
    assert await server.num_requests("LIST", "endpointslices") == 2
    assert not num_noted(caplog, "endpoints cannot be watched")


async def test_while_the_server_is_away_the_last_list_counts(
    server: ControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await server.put("one", pod("target-0", "10.0.0.1"))
    async with watching(server, tmp_path) as told:
        await told.addresses("10.0.0.1:50051")
        await server.put("other", pod("draft-0", "10.9.0.1"), service="draft")
        await server.stop()
        await until(lambda: num_noted(caplog, "endpoints cannot be watched", 0) >= 2)
        assert told.num == 1
        await server.start()
        # It remembers nothing from before its start, and that was before the last change.
        await until(lambda: num_noted(caplog, "endpoints are listed again", 410) == 1)
        assert told.num == 1
        await server.put("two", pod("target-1", "10.0.0.2"))
        await told.addresses("10.0.0.1:50051", "10.0.0.2:50051")
        await server.remove("one")
        await told.addresses("10.0.0.2:50051")
    assert told.num == 3


async def test_rights_that_are_taken_away_and_given_back(
    server: ControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await server.put("one", pod("target-0", "10.0.0.1"))
    async with watching(server, tmp_path, watch_s=1.0) as told:
        await told.addresses("10.0.0.1:50051")
        await server.unbind()
        await until(lambda: num_noted(caplog, "endpoints cannot be watched", 403) >= 2)
        assert told.num == 1
        await server.put("two", pod("target-1", "10.0.0.2"))
        await server.restore_access()
        await told.addresses("10.0.0.1:50051", "10.0.0.2:50051")


async def test_the_account_may_do_nothing_else(server: ControlPlane) -> None:
    slices = "/apis/discovery.k8s.io/v1beta1"
    own = f"{slices}/namespaces/{NAMESPACE}/endpointslices"
    assert "items" in await server.call("GET", own, token=server.token)
    for method, path in (
        ("DELETE", own),
        ("GET", f"{slices}/endpointslices"),
        ("GET", f"{slices}/namespaces/default/endpointslices"),
        ("GET", f"/api/v1/namespaces/{NAMESPACE}/pods"),
        ("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets"),
        ("GET", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"),
        ("POST", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"),
    ):
        with pytest.raises(RefusedError) as caught:
            await server.call(method, path, token=server.token)
        assert caught.value.status == 403, (method, path)


async def test_a_slice_may_be_long(server: ControlPlane, tmp_path: Path) -> None:
    def pods(num: int) -> list[dict[str, object]]:
        return [pod(f"target-deployment-{index:010}", f"10.0.{index // 250}.{index % 250}") for index in range(num)]

    await server.put("one", *pods(1))
    async with watching(server, tmp_path) as told:
        await told.addresses("10.0.0.0:50051")
        await server.put("one", *pods(NUM_MANY))
        await told.until(lambda endpoints: len(endpoints) == NUM_MANY)
    async with watching(server, tmp_path) as told:
        await told.until(lambda endpoints: len(endpoints) == NUM_MANY)


async def test_a_pod_uses_its_own_account(
    server: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Their place in a pod cannot be had here.
    token, authority = server.mount_account(tmp_path)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    host, _, port = server.address.rpartition(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    await server.put("one", pod("target-0", "10.0.0.1"))
    cluster, told = Cluster(None), Told()
    task = asyncio.create_task(EndpointSlices(await cluster.api(), PLACE).run(told))
    try:
        await told.addresses("10.0.0.1:50051")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await cluster.close()
