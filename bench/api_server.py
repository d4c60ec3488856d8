"""As much of a Kubernetes API server as discovery sees of one, and its ways to fail.

For machines without a cluster.
"""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any, Final

from aiohttp import web

NAMESPACE: Final = "models"


class ApiServer:
    """Keeps EndpointSlices in memory, under versions that grow with each change.

    Attributes:
        versions: of EndpointSlices that are offered.
        list_delay_s: seconds that each list takes.
        is_silent: whether watches tell nothing, and never end.
        num_lists: lists of EndpointSlices so far.
        num_watches: watches of them so far.
        refusal: HTTP status of all answers; 0 answers properly.
        num_refused: answers with it so far.
    """

    def __init__(self) -> None:
        self.versions = ["v1"]
        self.list_delay_s = 0.0
        self.is_silent = False
        self.num_lists = self.num_watches = 0
        self.refusal = self.num_refused = 0
        self._slices: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count(100)
        self._version = next(self._numbers)
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._compacted = 0
        self._news = asyncio.Condition()
        self._watches: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        """Listens, on the same port as before."""
        app = web.Application(middlewares=[self._refuse])
        app.router.add_get("/apis/discovery.k8s.io/", self._group)
        app.router.add_get("/apis/discovery.k8s.io/{version}/namespaces/{namespace}/endpointslices", self._slices_of)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Ends all connections, and listens no more."""
        self.end_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def kubeconfig(self, folder: Path) -> Path:
        """Writes a kubeconfig file for this server; returns its path."""
        path = folder / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
            "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self._port}"}}],
            "users": [{"name": "fake", "user": {}}],
        }
        path.write_text(json.dumps(config))
        return path

    async def put(self, name: str, *endpoints: dict[str, Any], service: str = "target", port: int = 50051) -> None:
        """Makes or changes a slice of a service."""
        kind = "MODIFIED" if name in self._slices else "ADDED"
        item = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "addressType": "IPv4",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
            "endpoints": list(endpoints),
            "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}],
        }
        self._slices[name] = item
        await self._tell(kind, item)

    async def remove(self, name: str) -> None:
        """Takes a slice away."""
        await self._tell("DELETED", self._slices.pop(name))

    async def bookmark(self) -> None:
        """Tells all watches the present version, as servers do now and then."""
        item = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": {}}
        await self._tell("BOOKMARK", item)

    def compact(self) -> None:
        """Forgets all versions but the present one."""
        self._compacted = self._version

    def end_watches(self) -> None:
        """Cuts the connections of all watches."""
        for task in list(self._watches):
            task.cancel()

    async def until(self, *, num_watches: int = 0, num_lists: int = 0, num_refused: int = 0) -> None:
        """Returns once there were so many watches, lists and refusals."""
        wanted = (num_watches, num_lists, num_refused)
        async with self._news, asyncio.timeout(20):
            await self._news.wait_for(
                lambda: all(
                    num >= least
                    for num, least in zip((self.num_watches, self.num_lists, self.num_refused), wanted, strict=True)
                )
            )

    async def _tell(self, kind: str, item: dict[str, Any]) -> None:
        self._version = next(self._numbers)
        item["metadata"] = {**item["metadata"], "resourceVersion": str(self._version)}
        async with self._news:
            self._events.append((self._version, json.loads(json.dumps({"type": kind, "object": item}))))
            self._news.notify_all()

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.refusal:
            async with self._news:
                self.num_refused += 1
                self._news.notify_all()
            return _status(self.refusal, "refused")
        response: web.StreamResponse = await handler(request)
        return response

    async def _group(self, request: web.Request) -> web.Response:
        versions = [{"groupVersion": f"discovery.k8s.io/{name}", "version": name} for name in self.versions]
        return web.json_response({"kind": "APIGroup", "name": "discovery.k8s.io", "versions": versions})

    async def _slices_of(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["version"] not in self.versions or request.match_info["namespace"] != NAMESPACE:
            return _status(404, "no such thing")
        service = request.query["labelSelector"].removeprefix("kubernetes.io/service-name=")
        return await (self._watch(request, service) if "watch" in request.query else self._list(service))

    async def _list(self, service: str) -> web.Response:
        async with self._news:
            self.num_lists += 1
            self._news.notify_all()
        await asyncio.sleep(self.list_delay_s)
        items = [item for item in self._slices.values() if _service(item) == service]
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, request: web.Request, service: str) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        async with self._news:
            self.num_watches += 1
            self._news.notify_all()
        if version < self._compacted:
            gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "old"}}
            await response.write(json.dumps(gone).encode() + b"\n")
            return response
        task = asyncio.create_task(self._follow(response, version, service, int(request.query["timeoutSeconds"])))
        self._watches.add(task)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            self._watches.discard(task)
        if task.cancelled() and request.transport is not None:
            request.transport.abort()
        return response

    async def _follow(self, response: web.StreamResponse, version: int, service: str, timeout_s: int) -> None:
        if self.is_silent:
            await asyncio.Event().wait()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    async with self._news:
                        while self._version <= version:
                            await self._news.wait()
                        news = [event for number, event in self._events if number > version]
                        version = self._version
                    for event in news:
                        if event["type"] == "BOOKMARK" or _service(event["object"]) == service:
                            await response.write(json.dumps(event).encode() + b"\n")
        except TimeoutError:
            return


def pod(
    name: str, address: str, *, ready: bool | None = True, terminating: bool | None = None, uid: str = ""
) -> dict[str, Any]:
    """Returns an endpoint of a slice."""
    conditions = {"ready": ready, "terminating": terminating}
    return {
        "addresses": [address],
        "conditions": {condition: value for condition, value in conditions.items() if value is not None},
        "targetRef": {"kind": "Pod", "name": name, "uid": uid or f"uid-{name}"},
    }


def _service(item: dict[str, Any]) -> str:
    return str(item["metadata"].get("labels", {}).get("kubernetes.io/service-name", ""))


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "reason": message, "message": message}, status=code)
