"""The overlay for production, deployed by the commands of docs/operations.md: TLS, tokens, a Redis elsewhere with TLS.

Without what this cluster lacks (GPUs, cert-manager, a volume for many nodes), with Markov models, as small as fits.
"""

import asyncio
import hashlib
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from outrider.client import OutriderClient, TlsFiles
from outrider.errors import Unauthenticated, Unavailable
from outrider.local.valkey import EmbeddedValkey
from outrider.v1 import worker_pb2, worker_pb2_grpc
from tests.cluster.deployed import Deployed
from tests.cluster.node import ADDRESS, DOMAIN, PROGRAMS, Node
from tests.cluster.streams import strike_streams
from tests.faults.history import watch
from tests.faults.scene import asking
from tests.k8s.rendering import K8S, SERVICES, production
from tests.serving.certificates import Authority
from tests.serving.tls_front import tls_front

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

_DOCS: Final = K8S.parent / "docs" / "operations.md"
_NAMESPACE: Final = "outrider-production"
_TOKEN: Final = "token-of-a-tenant"
_LACKING: Final = ("gpu", "cert-manager", "models")
_NUM_STREAMS: Final = 8
_SMALL: Final = """
- op: replace
  path: /spec/template/spec/containers/0/resources
  value: {requests: {cpu: 50m, memory: 128Mi}, limits: {memory: 2Gi}}
"""
_MODELS: Final = {
    "target": ["OUTRIDER_MODEL=markov:vocabulary=16,order=2,seed=5,step_s=0.02", "OUTRIDER_DEVICE=cpu"],
    "draft": ["OUTRIDER_MODEL=markov:vocabulary=16,order=2,seed=5,noise=0.2,step_s=0.002", "OUTRIDER_DEVICE=cpu"],
}


@dataclass(frozen=True)
class Production:
    """What is deployed, and what its callers need.

    Attributes:
        deployed: the overlay.
        folder: of the files that the docs' commands read and write.
        authority: of all certificates.
    """

    deployed: Deployed
    folder: Path
    authority: Authority

    def client(self, token: str = _TOKEN, **more: Any) -> OutriderClient:
        return self.deployed.client(token=token, tls=TlsFiles(authority=self.authority.file), **more)

    def run(self, commands: str, **values: str) -> str:
        """Runs commands of the docs in this namespace, with values in place of what they leave open."""
        return _run(commands, self.deployed.node, self.folder, values)


def documented(begin: str, end: str) -> list[str]:
    """Returns the blocks of commands of docs/operations.md between two texts."""
    text = _DOCS.read_text()
    part = text[text.index(begin) : text.index(end)]
    return [textwrap.dedent(block) for block in re.findall(r"^ *```\n(.*?)^ *```$", part, re.DOTALL | re.MULTILINE)]


def _run(commands: str, node: Node, folder: Path, values: dict[str, str]) -> str:
    commands = re.sub(r"-n outrider\b", f"-n {_NAMESPACE}", commands)
    for name, value in values.items():
        commands, num = re.subn(rf"\b{name}\b", value, commands)
        assert num, f"{name} is not in {commands}"
    path = f"{PROGRAMS}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"KUBECONFIG": str(node.kubeconfig), "PATH": path}
    done = subprocess.run(
        ["bash", "-euc", commands],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not done.returncode, f"{commands}\n{done.stdout}{done.stderr}"
    return done.stdout


def _change(chosen: dict[str, Any]) -> None:
    """Says which images and models it should be, as the docs have it, and how small the pods are."""
    chosen["configMapGenerator"] = [
        {"name": name, "behavior": "merge", "literals": literals} for name, literals in _MODELS.items()
    ]
    chosen["patches"].append({"target": {"kind": "Deployment"}, "patch": _SMALL})


@pytest.fixture(scope="module")
def fleet(markov: Deployed, say: Callable[[str], None]) -> Iterator[Production]:
    node = markov.node
    # There is one node for both.
    markov.scale(**dict.fromkeys(SERVICES, 1))
    deployed = Deployed(node, say, _NAMESPACE)
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        overlays = Path(exits.enter_context(tempfile.TemporaryDirectory(dir=K8S, prefix=".test-")))
        authority = Authority(folder / "authority")
        urls = []
        for name, evicts in (("sessions", False), ("kv-blocks", True)):
            server = exits.enter_context(EmbeddedValkey(durable=not evicts, evicts=evicts))
            port = exits.enter_context(tls_front(server.port, *authority.issue(name, ADDRESS), host=ADDRESS))
            urls.append((urlsplit(server.url).password or "", port))
        ports = {"sessions-redis-port": str(urls[0][1]), "kv-blocks-redis-port": str(urls[1][1])}
        addresses = {"sessions-redis-cidr": f"{ADDRESS}/32", "kv-blocks-redis-cidr": f"{ADDRESS}/32"}
        objects = production(
            overlays, without=_LACKING, namespace=_NAMESPACE, cluster=ports | addresses, change=_change
        )
        for name in SERVICES:
            node.tag_image(f"docker.io/outrider/{name}:local", f"registry.example.com/outrider/{name}:0.1.0")
        made = Production(deployed, folder, authority)
        _make_secrets(made, overlays / "production", urls)
        deployed.apply(objects)
        deployed.until_ready(*SERVICES)
        yield made
        node.kubectl("delete", "namespace", _NAMESPACE, "--wait=false")


def _make_secrets(fleet: Production, overlay: Path, urls: list[tuple[str, int]]) -> None:
    """Step 3 of the docs, word by word."""
    namespace = overlay / "namespace.yaml"
    namespace.write_text(namespace.read_text().replace("name: outrider", f"name: {_NAMESPACE}"))
    secrets, redis_authority, tls = documented("3. Make the namespace", "4. Give the addresses")
    digest = hashlib.sha256(_TOKEN.encode()).hexdigest()
    tenant = {"tokens": [f"sha256:{digest}"], "max_streams": 20, "max_sessions": 1000, "tokens_per_minute": 1000000}
    (fleet.folder / "tenants.json").write_text(json.dumps({"acme": tenant}))
    shutil.copy(fleet.authority.file, fleet.folder / "ca.crt")
    # The URL that the second block gives as a comment, with two passwords and ports.
    (suffix,) = re.findall(r"6379/0(\?\S+)", redis_authority)
    lines = secrets.splitlines(keepends=True)
    for name, (password, port) in zip(("HOST", "OTHERHOST"), urls, strict=True):
        url = f"rediss://:PASSWORD@{name}:6379/0"
        (number,) = [number for number, line in enumerate(lines) if url in line]
        lines[number] = lines[number].replace(url, f"rediss://:{password}@{ADDRESS}:{port}/0{suffix}")
    secrets = "".join(lines).replace("k8s/overlays/production/namespace.yaml", str(namespace))
    fleet.run(secrets, REGISTRY="registry.example.com", USER="reader", PASSWORD="of-the-registry", TOKEN="of-the-hub")
    fleet.run(redis_authority)
    for name in SERVICES:
        outside = [f"{name}.{_NAMESPACE}.svc.{DOMAIN}", f"{name}-http.{_NAMESPACE}.svc.{DOMAIN}", "localhost"]
        pair = fleet.authority.issue(name, name, *(outside if name == "orchestrator" else []))
        for file, known_as in zip(pair, ("tls.crt", "tls.key"), strict=True):
            shutil.copy(file, fleet.folder / known_as)
        fleet.run(tls, SERVICE=name)


async def test_streams_by_tls_and_a_token_go_on_without_a_target(
    fleet: Production, record_property: Callable[[str, object], None]
) -> None:
    deployed = fleet.deployed

    async def strike() -> None:
        await deployed.in_thread(lambda: deployed.kill(deployed.busiest("target")))

    async with fleet.client() as client:
        streams = await strike_streams(client, _NUM_STREAMS, strike)
    record_property("failed_requests", streams.num_failed)
    record_property("num_tokens", streams.num_tokens)
    record_property("next_token_s", round(streams.next_token_s, 2))
    assert sum(record.statistics.num_accepted_tokens for record in streams.records) > 0
    await deployed.in_thread(deployed.until_ready, "target")


async def test_callers_without_a_token_or_tls_are_refused(fleet: Production) -> None:
    async with fleet.client(token="of-nobody", max_attempts=1) as stranger:
        record = await watch(stranger, asking(num_tokens=1), timeout_s=20)
    assert isinstance(record.error, Unauthenticated), record.error
    async with fleet.deployed.client(token=_TOKEN, max_attempts=1) as plain:
        record = await watch(plain, asking(num_tokens=1), timeout_s=20)
    assert isinstance(record.error, Unavailable), record.error


async def test_http_is_by_tls_and_a_token_too(fleet: Production) -> None:
    url = f"https://orchestrator-http.{_NAMESPACE}.svc.{DOMAIN}:80/v1/models"
    async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(fleet.authority.file))) as http:
        assert (await http.get(url)).status_code == 401
        answer = await http.get(url, headers={"authorization": f"Bearer {_TOKEN}"})
    assert answer.status_code == 200 and answer.json()["data"]


@pytest.mark.parametrize("service", ["target", "draft"])
async def test_workers_take_calls_from_certificates_of_their_authority_only(fleet: Production, service: str) -> None:
    (pod, *_) = await fleet.deployed.in_thread(fleet.deployed.ready_pods, service)
    address = f"{pod['status']['podIP']}:50051"
    right, other = fleet.authority, Authority(fleet.folder / "other")
    strangers = [TlsFiles(authority=right.file), TlsFiles(*other.issue("orchestrator"), right.file)]
    for files, is_taken in ((right.files("orchestrator"), True), *((files, False) for files in strangers)):
        options = (("grpc.ssl_target_name_override", service),)
        async with grpc.aio.secure_channel(address, files.channel_credentials(), options) as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).GetLoad(worker_pb2.GetLoadRequest(), timeout=10)
            if is_taken:
                await call
            else:
                with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                    await call


async def test_workers_are_listed_by_the_documented_commands(fleet: Production) -> None:
    (commands,) = documented("5. `kubectl", "6. Clients outside")
    (forward,) = re.findall(r"`(kubectl .* port-forward .*?)`", _DOCS.read_text())
    (fleet.folder / "ca.crt").unlink()
    forwarding = await asyncio.create_subprocess_exec(
        PROGRAMS / "kubectl",
        f"--kubeconfig={fleet.deployed.node.kubeconfig}",
        *re.sub(r"-n outrider\b", f"-n {_NAMESPACE}", forward).split()[1:],
        stdout=subprocess.PIPE,
    )
    try:
        assert forwarding.stdout is not None
        assert b"Forwarding" in await asyncio.wait_for(forwarding.stdout.readline(), 30)
        listed = await fleet.deployed.in_thread(lambda: fleet.run(commands, TOKEN=_TOKEN))
    finally:
        forwarding.terminate()
        await forwarding.wait()
    for pod in (pod for name in ("target", "draft") for pod in fleet.deployed.pods(name)):
        assert pod["metadata"]["name"] in listed


def test_pods_have_their_priorities_and_pull_secret(fleet: Production) -> None:
    for name in SERVICES:
        for pod in fleet.deployed.pods(name):
            assert pod["spec"]["priorityClassName"] == f"outrider-{name}"
            assert pod["spec"]["priority"] == {"orchestrator": 30000, "target": 20000, "draft": 10000}[name]
            assert pod["spec"]["imagePullSecrets"] == [{"name": "outrider-registry"}]
