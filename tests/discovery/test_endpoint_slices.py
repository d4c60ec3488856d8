"""The watch of a service's endpoints, against an API server that fails in every way it can."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.api_server import NAMESPACE, ApiServer, pod
from outrider.discovery.cluster import Cluster
from outrider.discovery.endpoint_slices import EndpointSlices, endpoints_of
from outrider.discovery.endpoints import Endpoint, KubernetesPlace
from outrider.errors import InvalidArgument

PLACE = KubernetesPlace(NAMESPACE, "target", "grpc")


class Told:
    """The endpoints that discovery has reported so far."""

    def __init__(self) -> None:
        self.endpoints: Sequence[Endpoint] | None = None
        self.num = 0
        self._changed = asyncio.Event()

    def __call__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = endpoints
        self.num += 1
        self._changed.set()

    async def until(self, condition: Callable[[Sequence[Endpoint]], bool]) -> None:
        async with asyncio.timeout(20):
            while self.endpoints is None or not condition(self.endpoints):
                self._changed.clear()
                await self._changed.wait()

    async def addresses(self, *addresses: str) -> None:
        await self.until(lambda endpoints: [item.address for item in endpoints] == list(addresses))


@asynccontextmanager
async def watching(server: ApiServer, folder: Path, **more: Any) -> AsyncIterator[Told]:
    cluster, told = Cluster(server.kubeconfig(folder)), Told()
    task = asyncio.create_task(EndpointSlices(await cluster.api(), PLACE, **more).run(told))
    try:
        yield told
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await cluster.close()


async def test_pods_come_and_go(server: ApiServer, tmp_path: Path) -> None:
    await server.put("one", pod("target-0", "10.0.0.1"))
    await server.put("other", pod("draft-0", "10.9.0.1"), service="draft")
    async with watching(server, tmp_path) as told:
        await told.until(lambda endpoints: endpoints == (Endpoint("10.0.0.1:50051", "target-0"),))
        await server.put("two", pod("target-1", "10.0.0.2", ready=False))
        await told.addresses("10.0.0.1:50051", "10.0.0.2:50051")
        await server.put("two", pod("target-1", "10.0.0.2"))
        await told.until(lambda endpoints: all(item.is_ready for item in endpoints))
        await server.put("one", pod("target-0", "10.0.0.1", ready=False, terminating=True))
        await told.until(lambda endpoints: endpoints[0].is_terminating)
        await server.remove("one")
        await told.addresses("10.0.0.2:50051")
    assert server.num_lists == 1, "changes came by the watch"


async def test_a_watch_that_ends_or_breaks_goes_on_where_it_was(server: ApiServer, tmp_path: Path) -> None:
    await server.put("one", pod("target-0", "10.0.0.1"))
    async with watching(server, tmp_path, watch_s=1.0) as told:
        await server.until(num_watches=3)
        await server.put("two", pod("target-1", "10.0.0.2"))
        await told.addresses("10.0.0.1:50051", "10.0.0.2:50051")
        server.end_watches()
        await server.put("two", pod("target-2", "10.0.0.3"))
        await told.addresses("10.0.0.1:50051", "10.0.0.3:50051")
        await server.bookmark()
        server.compact()
        await server.until(num_watches=server.num_watches + 2)
    assert server.num_lists == 1
    assert told.num == 3, "nothing is told that has not changed"


async def test_a_forgotten_version_is_listed_again(server: ApiServer, tmp_path: Path) -> None:
    await server.put("one", pod("target-0", "10.0.0.1"))
    async with watching(server, tmp_path, watch_s=1.0) as told:
        await told.addresses("10.0.0.1:50051")
        await server.until(num_watches=1)
        await server.stop()
        await server.remove("one")
        await server.put("two", pod("target-1", "10.0.0.2"))
        server.compact()
        await server.start()
        await told.addresses("10.0.0.2:50051")
    assert server.num_lists == 2


async def test_while_the_server_is_away_the_last_list_counts(server: ApiServer, tmp_path: Path) -> None:
    await server.put("one", pod("target-0", "10.0.0.1"))
    async with watching(server, tmp_path) as told:
        await told.addresses("10.0.0.1:50051")
        await server.until(num_watches=1)
        await server.stop()
        await server.put("one", pod("target-0", "10.0.0.1"), pod("target-1", "10.0.0.2"))
        assert told.num == 1
        server.refusal = 503
        await server.start()
        await server.until(num_refused=2)
        assert [item.address for item in told.endpoints or ()] == ["10.0.0.1:50051"]
        server.refusal = 0
        await told.addresses("10.0.0.1:50051", "10.0.0.2:50051")


async def test_a_silent_server_is_noticed(server: ApiServer, tmp_path: Path) -> None:
    await server.put("one", pod("target-0", "10.0.0.1"))
    server.is_silent = True
    async with watching(server, tmp_path, watch_s=1.0, grace_s=0.2) as told:
        await server.until(num_watches=1)
        await server.put("two", pod("target-1", "10.0.0.2"))
        assert told.num == 1
        server.is_silent = False
        await told.addresses("10.0.0.1:50051", "10.0.0.2:50051")
    assert server.num_lists == 1


async def test_a_slow_list_is_given_up(server: ApiServer, tmp_path: Path) -> None:
    await server.put("one", pod("target-0", "10.0.0.1"))
    server.list_delay_s = 30.0
    began = time.monotonic()
    async with watching(server, tmp_path, list_s=0.2) as told:
        await server.until(num_lists=2)
        server.list_delay_s = 0.0
        await told.addresses("10.0.0.1:50051")
    assert time.monotonic() - began < 15


async def test_an_old_server_has_v1beta1_only(server: ApiServer, tmp_path: Path) -> None:
    server.versions = ["v1beta1"]
    await server.put("one", pod("target-0", "10.0.0.1"))
    async with watching(server, tmp_path, watch_s=1.0) as told:
        await told.addresses("10.0.0.1:50051")
        # Upgraded meanwhile to one that has it no more.
        server.versions = ["v1"]
        await server.put("one", pod("target-1", "10.0.0.2"))
        await told.addresses("10.0.0.2:50051")


async def test_no_cluster_is_one_clear_error(tmp_path: Path) -> None:
    for path in (None, tmp_path / "missing"):
        with pytest.raises(InvalidArgument, match="no cluster to connect to") as caught:
            await Cluster(path).api()
        assert caught.value.field == "kubeconfig"


def slice_of(*endpoints: dict[str, Any], family: str = "IPv4", ports: Sequence[tuple[str, int]] = ()) -> dict[str, Any]:
    named = [{"name": name, "port": port} for name, port in ports or (("health", 1), ("grpc", 2))]
    return {"addressType": family, "endpoints": list(endpoints), "ports": named}


def test_ports_by_name_and_number() -> None:
    found = slice_of(pod("a", "10.0.0.1"))
    assert endpoints_of([found], "grpc") == (Endpoint("10.0.0.1:2", "a"),)
    assert endpoints_of([found], "7") == (Endpoint("10.0.0.1:7", "a"),)
    assert endpoints_of([found], "metrics") == ()


def test_what_is_not_said_is_ready_and_stays() -> None:
    (endpoint,) = endpoints_of([slice_of(pod("a", "10.0.0.1", ready=None))], "grpc")
    assert endpoint.is_ready
    assert not endpoint.is_terminating


def test_a_pod_counts_once() -> None:
    moving = slice_of(pod("a", "10.0.0.1", ready=False)), slice_of(pod("a", "10.0.0.1"))
    assert endpoints_of(moving, "grpc") == endpoints_of(moving[::-1], "grpc") == (Endpoint("10.0.0.1:2", "a"),)
    both = slice_of(pod("a", "fd00::1"), family="IPv6"), slice_of(pod("a", "10.0.0.1"))
    assert endpoints_of(both, "grpc") == (Endpoint("10.0.0.1:2", "a"),)
    assert endpoints_of(both[:1], "grpc") == (Endpoint("[fd00::1]:2", "a"),)
