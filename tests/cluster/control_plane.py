"""The cluster's kube-apiserver alone with its etcd, which tests stop, start and compact, and its administrator."""

import asyncio
import base64
import functools
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.api_server import NAMESPACE
from tests.cluster.node import CACHE, PROGRAMS
from tests.k8s.rendering import K8S, kustomize
from tests.serving.certificates import Authority

ACCOUNT: Final = "orchestrator"
_START_S: Final = 120.0
_CALL_S: Final = 20.0
_POLL_S: Final = 0.05
_NOT_FOUND: Final = 404
_FIRST_ERROR: Final = 400
_ADMIN_TOKEN: Final = "admin"
_TAIL_BYTES: Final = 2000
_VERSION: Final = "v1beta1"
_SLICES: Final = f"/apis/discovery.k8s.io/{_VERSION}/namespaces/{NAMESPACE}/endpointslices"
# What the orchestrator's manifests have that the API server alone makes use of.
_ACCESS: Final = {
    "ServiceAccount": f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts",
    "Role": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles",
    "RoleBinding": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings",
}
# They cannot watch their parent by themselves; util-linux has the kernel end them.
_END_WITH_PARENT: Final = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()


class ControlPlane:
    """Keeps what it is told, as a cluster without nodes and without controllers does.

    Callers authenticate with tokens and may do what RBAC lets them. In the namespace that the tests use there are the
    orchestrator's account, role and binding, as the manifests have them; `kubeconfig` is that account's.

    Args:
        folder: for its data, logs and certificates.

    Attributes:
        address: host:port of the API server, the same after each start.
        token: of the orchestrator's account.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        authority = Authority(folder / "certificates")
        self._authority = authority.file
        self._certificate, self._key = authority.issue("kube-apiserver")
        # Held all at once, so that no two are the same.
        with ExitStack() as sockets:
            probes = [sockets.enter_context(socket.socket()) for _ in range(3)]
            for probe in probes:
                probe.bind(("127.0.0.1", 0))
            port, self._etcd_port, self._peer_port = (probe.getsockname()[1] for probe in probes)
        self.address = f"127.0.0.1:{port}"
        self.token = ""
        self._etcd: subprocess.Popen[bytes] | None = None
        self._api_server: subprocess.Popen[bytes] | None = None
        self._flags: tuple[str, ...] = ()
        self._session: aiohttp.ClientSession | None = None

    @property
    def is_as_it_was(self) -> bool:
        """Whether the API server runs, and with the usual flags."""
        return self._api_server is not None and not self._flags

    async def create(self) -> None:
        """Starts everything and makes the namespace with the orchestrator's account."""
        context = ssl.create_default_context(cafile=str(self._authority))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context), timeout=aiohttp.ClientTimeout(total=_CALL_S)
        )
        (self._folder / "tokens.csv").write_text(f'{_ADMIN_TOKEN},admin,1,"system:masters"\n')
        self._etcd = self._run(
            "etcd",
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={self._etcd_url}",
            f"--advertise-client-urls={self._etcd_url}",
            f"--listen-peer-urls=http://127.0.0.1:{self._peer_port}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{self._peer_port}",
            f"--initial-cluster=default=http://127.0.0.1:{self._peer_port}",
        )
        await self._until_healthy("etcd", self._etcd, f"{self._etcd_url}/health")
        await self.start()
        await self.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        await self.restore_access()
        # As the kubelet gets one for each pod.
        path = f"{_ACCESS['ServiceAccount']}/{ACCOUNT}/token"
        issued = await self.call("POST", path, {"spec": {"audiences": [self._issuer], "expirationSeconds": 7200}})
        self.token = issued["status"]["token"]

    async def close(self) -> None:
        """Ends everything. Nothing of it is to be kept, so nobody is asked."""
        await self.stop()
        _end(self._etcd)
        if self._session is not None:
            await self._session.close()

    async def start(self, *flags: str) -> None:
        """Starts the API server, on the same port as before, with further flags; returns once it is ready."""
        self._flags = flags
        self._api_server = self._run(
            "kube-apiserver",
            f"--etcd-servers={self._etcd_url}",
            # The test says when old versions are forgotten.
            "--etcd-compaction-interval=0",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.address.rpartition(':')[2]}",
            f"--cert-dir={self._folder}",
            f"--tls-cert-file={self._certificate}",
            f"--tls-private-key-file={self._key}",
            # Nobody asks for it by its name in the cluster, where a loopback address may not stand.
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.0.0.0/24",
            f"--token-auth-file={self._folder / 'tokens.csv'}",
            f"--service-account-issuer={self._issuer}",
            f"--service-account-signing-key-file={self._key}",
            f"--service-account-key-file={self._key}",
            "--authorization-mode=RBAC",
            # Not yet the rule in 1.20.
            "--feature-gates=EndpointSliceTerminatingCondition=true",
            *flags,
        )
        await self._until_healthy("kube-apiserver", self._api_server, f"https://{self.address}/readyz", _ADMIN_TOKEN)

    async def stop(self) -> None:
        """Ends the API server as a crash would: asked to end, it waits for the last watch."""
        _end(self._api_server)
        self._api_server = None

    async def restore(self) -> None:
        """Puts back what a test may have changed."""
        if not self.is_as_it_was:
            await self.stop()
            await self.start()
        await self.call("DELETE", _SLICES)
        await self.restore_access()

    def kubeconfig(self, folder: Path, *, address: str = "") -> Path:
        """Writes a kubeconfig file for the orchestrator's account; returns its path.

        Args:
            folder: where to.
            address: of a proxy to go by; empty goes straight to the server.
        """
        path = folder / "kubeconfig"
        cluster = {"server": f"https://{address or self.address}", "certificate-authority": str(self._authority)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "real",
            "contexts": [{"name": "real", "context": {"cluster": "real", "user": ACCOUNT}}],
            "clusters": [{"name": "real", "cluster": cluster}],
            "users": [{"name": ACCOUNT, "user": {"token": self.token}}],
        }
        path.write_text(json.dumps(config))
        return path

    def mount_account(self, folder: Path) -> tuple[Path, Path]:
        """Writes the files by which a pod knows its account; returns token and authority."""
        token, authority = folder / "token", folder / "ca.crt"
        token.write_text(self.token)
        shutil.copyfile(self._authority, authority)
        return token, authority

    async def put(self, name: str, *endpoints: dict[str, Any], service: str = "target", port: int = 50051) -> None:
        """Makes or changes a slice of a service."""
        item = {
            "apiVersion": f"discovery.k8s.io/{_VERSION}",
            "kind": "EndpointSlice",
            "addressType": "IPv4",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
            "endpoints": list(endpoints),
            "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}],
        }
        await self._set(_SLICES, item)

    async def remove(self, name: str) -> None:
        """Takes a slice away."""
        await self.call("DELETE", f"{_SLICES}/{name}")

    async def unbind(self) -> None:
        """Takes from the orchestrator's account all that it may do."""
        await self.call("DELETE", f"{_ACCESS['RoleBinding']}/{ACCOUNT}")

    async def restore_access(self) -> None:
        """Gives the orchestrator's account what the manifests give it."""
        for item in self._manifests:
            await self._set(_ACCESS[item["kind"]], item)

    async def versions(self) -> list[str]:
        """Returns the versions of EndpointSlices that it offers."""
        group = await self.call("GET", "/apis/discovery.k8s.io")
        return [item["version"] for item in group["versions"]]

    async def compact(self) -> None:
        """Has etcd forget all versions but the present one."""
        anything = {"key": base64.b64encode(b"/").decode()}
        header = (await self._ask("POST", f"{self._etcd_url}/v3/kv/range", anything))["header"]
        await self._ask("POST", f"{self._etcd_url}/v3/kv/compaction", {"revision": header["revision"]})

    async def num_requests(self, verb: str, resource: str) -> int:
        """Returns how many requests there were since the start of the API server, those that run now not counted.

        Args:
            verb: GET, LIST, WATCH, POST, PUT or DELETE.
            resource: in the plural; what is asked of all namespaces at once is not counted.
        """
        async with self._client.get(f"https://{self.address}/metrics", headers=_bearing(_ADMIN_TOKEN)) as response:
            text = await response.text()
        # A watch that has been answered has no status there.
        lines = re.findall(r'^apiserver_request_total\{code="(?:0|20.)",(.*)\} (\S+)$', text, re.MULTILINE)
        wanted = (f'verb="{verb}"', f'resource="{resource}"')
        return sum(
            int(float(count))
            for labels, count in lines
            if all(label in labels for label in wanted) and 'scope="cluster"' not in labels
        )

    async def until_requests(self, verb: str, resource: str, num: int) -> None:
        """Returns once there were so many requests; see `num_requests`."""
        async with asyncio.timeout(30):
            while await self.num_requests(verb, resource) < num:
                await asyncio.sleep(_POLL_S)

    async def call(self, method: str, path: str, body: Any = None, *, token: str = _ADMIN_TOKEN) -> dict[str, Any]:
        """Calls the API server, as its administrator unless another token is given; returns the answer.

        Raises:
            RefusedError: it was refused.
        """
        return await self._ask(method, f"https://{self.address}{path}", body, token=token)

    async def _set(self, path: str, item: dict[str, Any]) -> None:
        try:
            await self.call("PUT", f"{path}/{item['metadata']['name']}", item)
        except RefusedError as error:
            if error.status != _NOT_FOUND:
                raise
            await self.call("POST", path, item)

    async def _ask(self, method: str, url: str, body: Any, *, token: str = "") -> dict[str, Any]:
        # etcd refuses who brings a token that it has not given.
        headers = _bearing(token) if token else {}
        async with self._client.request(method, url, json=body, headers=headers) as response:
            if response.status >= _FIRST_ERROR:
                raise RefusedError(response.status, await response.text())
            text = await response.text()
            return json.loads(text) if response.content_type == "application/json" else {}

    async def _until_healthy(self, name: str, process: subprocess.Popen[bytes], url: str, token: str = "") -> None:
        give_up = time.monotonic() + _START_S
        while not await self._is_healthy(url, token):
            if process.poll() is not None or time.monotonic() > give_up:
                raise AssertionError(f"{name} does not come up; the end of its log:\n{self._log_tail(name)}")
            await asyncio.sleep(_POLL_S)

    async def _is_healthy(self, url: str, token: str) -> bool:
        try:
            await self._ask("GET", url, None, token=token)
        except (RefusedError, aiohttp.ClientError, TimeoutError):
            return False
        return True

    def _run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        program = next(
            (path for path in (PROGRAMS / name, CACHE / "node" / "usr" / "bin" / name) if path.is_file()), None
        )
        if program is None:
            raise AssertionError(f"no {name} in {CACHE}: `make cluster` builds it")
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*_END_WITH_PARENT, str(program), *arguments],
                env={"PATH": os.defpath, "HOME": str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _log_tail(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_bytes()[-_TAIL_BYTES:].decode(errors="replace")

    @functools.cached_property
    def _manifests(self) -> list[dict[str, Any]]:
        folder = self._folder / "manifests"
        folder.mkdir(exist_ok=True)
        # It says whose account the binding is for, which only a kustomization with a namespace does.
        whole = {"namespace": NAMESPACE, "resources": [os.path.relpath(K8S / "base", folder)]}
        (folder / "kustomization.yaml").write_text(json.dumps(whole))
        found = [item for item in kustomize(folder) if item["metadata"]["name"] == ACCOUNT and item["kind"] in _ACCESS]
        assert len(found) == len(_ACCESS)
        return found

    @property
    def _etcd_url(self) -> str:
        return f"http://127.0.0.1:{self._etcd_port}"

    @property
    def _issuer(self) -> str:
        return "https://kubernetes.default.svc"

    @property
    def _client(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session


class RefusedError(Exception):
    """A call that was answered with an error.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


def _bearing(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.kill()
        process.wait()
