"""An API server of a cluster with whatever objects a test gives it: discovery, objects, lists and access reviews."""

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

Manifest = dict[str, Any]

CLUSTER_WIDE = {
    "ClusterIssuer",
    "ClusterRole",
    "GatewayClass",
    "IngressClass",
    "Namespace",
    "Node",
    "PriorityClass",
    "RuntimeClass",
    "StorageClass",
}


class ApiServer:
    """A cluster as its API server shows it.

    Attributes:
        version: what /version answers.
        objects: all objects, by path.
        kinds: the kinds that are served, with their API version.
        metrics: resources of custom.metrics.k8s.io/v1beta1, such as pods/NAME; None where the group is not served.
        denied: verb and resource of what an access review does not allow.
        refused: status that requests below a path get; a path that ends in $ has none below it.
        page_len: objects of each page of a list, at most.
        requests: method and path of each request.
    """

    def __init__(self) -> None:
        self.version: Any = {"major": "1", "minor": "31", "gitVersion": "v1.31.2"}
        self.objects: dict[str, Manifest] = {}
        self.kinds: set[tuple[str, str]] = set()
        self.metrics: list[str] | None = []
        self.denied: set[tuple[str, str]] = set()
        self.refused: dict[str, int] = {}
        self.page_len = 100
        self.requests: list[tuple[str, str]] = []
        self.port = 0

    def serve(self, objects: Iterable[Manifest]) -> None:
        """Serve the kinds of these objects."""
        self.kinds |= {(item["apiVersion"], item["kind"]) for item in objects}

    def put(self, text: str, namespace: str = "outrider") -> None:
        """Add objects, as YAML."""
        for item in yaml.safe_load_all(text):
            where = "" if item["kind"] in CLUSTER_WIDE else f"/namespaces/{namespace}"
            path = f"{base(item['apiVersion'])}{where}/{plural(item['kind'])}/{item['metadata']['name']}"
            self.objects[path] = item

    def remove(self, name: str) -> None:
        """Delete all objects of a name."""
        self.objects = {path: item for path, item in self.objects.items() if item["metadata"]["name"] != name}

    def object(self, name: str) -> Manifest:
        """Return the only object of a name."""
        (found,) = [item for item in self.objects.values() if item["metadata"]["name"] == name]
        return found

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig with two contexts, `here` (current) and `nowhere`; return its path."""
        path = folder / "kubeconfig"
        servers = {"here": f"http://127.0.0.1:{self.port}", "nowhere": "http://127.0.0.1:1"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": name, "context": {"cluster": name, "user": "user"}} for name in servers],
            "clusters": [{"name": name, "cluster": {"server": server}} for name, server in servers.items()],
            "users": [{"name": "user", "user": {"token": "secret-token"}}],
        }
        path.write_text(json.dumps(config))
        return path

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer any request."""
        self.requests.append((request.method, request.path))
        for prefix, status in self.refused.items():
            if f"{request.path}$".startswith(prefix):
                return web.json_response({"kind": "Status", "message": f"{request.path} is forbidden"}, status=status)
        if request.method == "POST":
            return await self._review(request)
        if request.path == "/version":
            return web.json_response(self.version)
        found = self._discovered(request.path) or self.objects.get(request.path) or self._listed(request)
        if found is None:
            return web.json_response({"kind": "Status", "message": f"{request.path} not found"}, status=404)
        return web.json_response(found)

    async def _review(self, request: web.Request) -> web.Response:
        assert request.path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        asked = (await request.json())["spec"]["resourceAttributes"]
        allowed = (asked["verb"], asked["resource"]) not in self.denied
        return web.json_response({"status": {"allowed": allowed}}, status=201)

    def _discovered(self, path: str) -> Manifest | None:
        if path == "/apis/custom.metrics.k8s.io" and self.metrics is not None:
            return {"preferredVersion": {"groupVersion": "custom.metrics.k8s.io/v1beta1"}}
        if path == "/apis/custom.metrics.k8s.io/v1beta1" and self.metrics is not None:
            return {"resources": [{"name": name, "kind": "MetricValueList"} for name in self.metrics]}
        kinds = sorted(kind for api_version, kind in self.kinds if base(api_version) == path)
        if not kinds:
            return None
        resources = [{"name": plural(kind), "kind": kind, "namespaced": kind not in CLUSTER_WIDE} for kind in kinds]
        return {"resources": [*resources, *({"name": f"{plural(kind)}/status", "kind": kind} for kind in kinds)]}

    def _listed(self, request: web.Request) -> Manifest | None:
        """Return a page of a list of cluster-wide objects."""
        if request.path.rpartition("/")[2] not in ("nodes", "namespaces", "storageclasses"):
            return None
        items = [item for path, item in self.objects.items() if path.rpartition("/")[0] == request.path]
        begin = int(request.query.get("continue", 0))
        end = begin + min(self.page_len, int(request.query["limit"]))
        token = str(end) if end < len(items) else ""
        return {"items": items[begin:end], "metadata": {"continue": token}}


def base(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"


def plural(kind: str) -> str:
    name = kind.lower()
    if name.endswith("y") and not name.endswith("ay"):
        return f"{name.removesuffix('y')}ies"
    return f"{name}es" if name.endswith(("s", "x")) else f"{name}s"


@asynccontextmanager
async def serving(server: ApiServer) -> AsyncIterator[ApiServer]:
    """Serve on a free loopback port within the block."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()
