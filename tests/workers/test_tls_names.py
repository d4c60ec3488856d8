"""Which name a worker's certificate must have: the one that the setting of its place has."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench.api_server import NAMESPACE, ApiServer, pod
from orchestrator.settings import OrchestratorSettings
from outrider.discovery.cluster import Cluster
from outrider.serving.tls import TlsFiles
from outrider.workers.links import TARGET
from outrider.workers.pool import LinkPool
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import until
from tests.serving.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


@asynccontextmanager
async def certified(authority: Authority, host: str) -> AsyncIterator[ScriptedTarget]:
    """Runs a target whose certificate is for this host."""
    target = ScriptedTarget()
    target.credentials = TlsFiles(*authority.issue("worker", host)).server_credentials()
    async with target:
        yield target


@asynccontextmanager
async def linked(authority: Authority, place: str, cluster: Cluster) -> AsyncIterator[LinkPool]:
    """Runs the links to the targets of a place, which must come from this authority."""
    settings = OrchestratorSettings(worker_tls_authority=authority.file, keepalive_s=1)
    pool = LinkPool(TARGET, (place,), "targets", settings, cluster)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


PLACES = {
    "kubernetes": (f"kubernetes://{NAMESPACE}/target:grpc", "target"),
    "dns": ("dns:///localhost:{port}", "localhost"),
    "address": ("127.0.0.1:{port}", "127.0.0.1"),
}


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("kind", PLACES)
async def test_a_certificate_must_have_the_name_of_the_place(
    server: ApiServer, tmp_path: Path, authority: Authority, kind: str, *, is_right: bool
) -> None:
    place, name = PLACES[kind]
    async with certified(authority, name if is_right else "draft") as target:
        host, _, port = target.address.rpartition(":")
        await server.put("targets", pod("target-0", host), port=int(port))
        cluster = Cluster(server.kubeconfig(tmp_path))
        try:
            async with linked(authority, place.format(port=port), cluster) as pool:
                if is_right:
                    await until(lambda: any(link.is_up for link in pool.links))
                else:
                    await until(lambda: any("could not be reached" in link.problem for link in pool.links))
                    assert not any(link.is_up for link in pool.links)
        finally:
            await cluster.close()
