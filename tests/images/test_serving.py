"""Containers of the images that were built serve, secured as the manifests have them."""

import json
import socket
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.api_server import NAMESPACE, ApiServer, pod
from k8s.images import Image
from outrider import Client, Generation, SamplingParameters
from outrider.client.loop_thread import LoopThread
from outrider.local.valkey import EmbeddedValkey
from tests.images.conftest import Report
from tests.images.containers import Container

pytestmark = [pytest.mark.images, pytest.mark.timeout(1200)]

MODEL = "markov:text=1,seed=5"
NO_CAPABILITIES = "0000000000000000"


def _ports(num: int) -> list[int]:
    # Held all at once, so that no two are the same.
    with ExitStack() as sockets:
        probes = [sockets.enter_context(socket.socket()) for _ in range(num)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        content: bytes = answer.read()
        return content


def _is_secured(container: Container) -> None:
    """Asserts what the manifests promise, by what Linux has of the first process and what a process cannot do."""
    status = container.status()
    assert status["Uid"].split() == ["10001"] * 4
    assert status["Gid"].split() == ["10001"] * 4
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert status[kind] == NO_CAPABILITIES, kind
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    written = container.run("python", "-c", "open('/opt/outrider/written', 'w')")
    assert "Read-only file system" in written.stderr
    assert container.run("python", "-c", "open('/tmp/written', 'w')").returncode == 0


@contextmanager
def _started(report: Report, container: Container, what: str = "") -> Iterator[Container]:
    begun = time.monotonic()
    with container:
        container.wait_healthy()
        report(f"{what or container.name.partition('-')[0]}: healthy after {time.monotonic() - begun:.1f} s")
        _is_secured(container)
        yield container
        assert container.terminate() == 0, container.output()


def _complete(address: str, report: Report, what: str, num: int = 40) -> Generation:
    begun = time.monotonic()
    with Client(address) as client:
        generation = client.complete("Once upon a time", SamplingParameters(max_tokens=num, ignore_eos=True))
    statistics = generation.statistics
    report(
        f"{what}: {len(generation.token_ids)} tokens in {time.monotonic() - begun:.1f} s, "
        f"{statistics.num_accepted_tokens} of {statistics.num_draft_tokens} drafted tokens accepted"
    )
    assert len(generation.token_ids) == num
    assert generation.text
    return generation


@pytest.fixture
def api_server() -> Iterator[tuple[ApiServer, LoopThread]]:
    """A stub of a cluster's API server, and the thread that it runs in."""
    thread, server = LoopThread("api-server"), ApiServer()
    thread.run(server.start())
    try:
        yield server, thread
    finally:
        thread.close(server.stop)


def test_the_services_find_each_other_and_generate(
    orchestrator: Image,
    target: Image,
    draft: Image,
    valkey: EmbeddedValkey,
    api_server: tuple[ApiServer, LoopThread],
    tmp_path: Path,
    report: Report,
) -> None:
    """They meet by EndpointSlices, as in a cluster: what the image has of the Kubernetes client is enough."""
    server, thread = api_server
    names = ("target", "draft", "orchestrator", "http", "target-metrics", "draft-metrics", "orchestrator-metrics")
    ports = dict(zip(names, _ports(len(names)), strict=True))

    def container(image: Image, variables: Mapping[str, str], files: Mapping[str, Path] | None = None) -> Container:
        own = {
            "OUTRIDER_ADDRESS": f"127.0.0.1:{ports[image.part]}",
            "OUTRIDER_METRICS_ADDRESS": f"127.0.0.1:{ports[f'{image.part}-metrics']}",
        }
        return Container(image, tmp_path, own | dict(variables), files)

    slices = {f"OUTRIDER_{name.upper()}S": f"kubernetes://{NAMESPACE}/{name}:grpc" for name in ("target", "draft")}
    serving = {
        "OUTRIDER_HTTP_ADDRESS": f"127.0.0.1:{ports['http']}",
        "OUTRIDER_REDIS_URL": valkey.url,
        "OUTRIDER_KUBECONFIG": "/tmp/kubeconfig",
        "OUTRIDER_DRAFT_MAX_WAIT_S": "5",
    }
    kubeconfig = {"/tmp/kubeconfig": server.kubeconfig(tmp_path)}
    containers = [
        # It waits for every proposal, so that all of them are verified.
        container(target, {"OUTRIDER_MODEL": MODEL, "OUTRIDER_ADAPTIVE_SPECULATION": "false"}),
        container(draft, {"OUTRIDER_MODEL": f"{MODEL},noise=0.2"}),
        container(orchestrator, slices | serving, kubeconfig),
    ]
    with ExitStack() as stack:
        for one in containers:
            stack.enter_context(_started(report, one))
        assert _get(ports["http"], "/health") == b""
        for name in ("target", "draft"):
            thread.run(server.put(f"{name}s", pod(f"{name}-0", "127.0.0.1"), service=name, port=ports[name]))
        thread.run(server.until(num_watches=2))
        address = f"127.0.0.1:{ports['orchestrator']}"
        with Client(address) as client:
            _until_in_rotation(client, 2)
        assert [item["id"] for item in json.loads(_get(ports["http"], "/v1/models"))["data"]]
        assert _complete(address, report, "orchestrator, target and draft").statistics.num_accepted_tokens > 0


def test_a_target_converts_no_embedded_model_at_its_start(target: Image, tmp_path: Path, report: Report) -> None:
    if "embedded" not in target.reference:
        pytest.skip("built without the embedded model")
    grpc, metrics = _ports(2)
    variables = {
        "OUTRIDER_ADDRESS": f"127.0.0.1:{grpc}",
        "OUTRIDER_METRICS_ADDRESS": f"127.0.0.1:{metrics}",
        "OUTRIDER_MODEL": "embedded",
        "OUTRIDER_KV_BUDGET_BYTES": "268435456",
    }
    with _started(report, Container(target, tmp_path, variables), "target, embedded model") as container:
        assert "converting" not in container.output()
        assert not list((container.volumes / "cache").rglob("*.safetensors"))


def test_the_one_image_serves_the_embedded_model(whole: Image, tmp_path: Path, report: Report) -> None:
    grpc, http = _ports(2)
    variables = {
        "OUTRIDER_ADDRESS": f"127.0.0.1:{grpc}",
        "OUTRIDER_HTTP_ADDRESS": f"127.0.0.1:{http}",
        "OUTRIDER_KV_BUDGET_BYTES": "268435456",
    }
    with _started(report, Container(whole, tmp_path, variables)) as container:
        assert _get(http, "/health") == b""
        assert json.loads(_get(http, "/v1/models"))["data"]
        assert _complete(f"127.0.0.1:{grpc}", report, "whole").statistics.num_drafts > 0
        assert not list((container.volumes / "cache").rglob("*.safetensors"))


def _until_in_rotation(client: Client, num: int) -> None:
    give_up = time.monotonic() + 60
    while sum(worker.in_rotation for worker in client.list_models().workers) < num:
        assert time.monotonic() < give_up, client.list_models()
        time.sleep(0.1)
