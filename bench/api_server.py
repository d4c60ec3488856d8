"""A stub of a Kubernetes API server for service discovery, with injectable failures, for machines without a cluster."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any, Final

from aiohttp import web

NAMESPACE: Final = "models"


class ApiServer:
    """A server that lists and watches EndpointSlices, kept in memory with versions that grow with each change.

    Attributes:
        versions: API versions of EndpointSlices that are served.
        list_delay_s: seconds before each list is answered.
        is_silent: whether watches send no events and never end.
        num_lists: number of lists of EndpointSlices.
        num_watches: number of watches of EndpointSlices.
        refusal: HTTP status that all requests are refused with; 0 for none.
        num_refused: number of refused requests.
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
        self._changed = asyncio.Condition()
        self._watches: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        """Start to listen, on the same port at each start."""
        app = web.Application(middlewares=[self._refuse])
        app.router.add_get("/apis/discovery.k8s.io/", self._group)
        app.router.add_get("/apis/discovery.k8s.io/{version}/namespaces/{namespace}/endpointslices", self._slices_of)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close all connections and stop to listen."""
        self.end_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig file for this server and return its path."""
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
        """Create or change a slice of a service."""
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
        await self._publish(kind, item)

    async def remove(self, name: str) -> None:
        """Delete a slice."""
        await self._publish("DELETED", self._slices.pop(name))

    async def bookmark(self) -> None:
        """Send a bookmark with the current version to all watches, as API servers do periodically."""
        item = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": {}}
        await self._publish("BOOKMARK", item)

    def compact(self) -> None:
        """Make all versions but the current one expired."""
        self._compacted = self._version

    def end_watches(self) -> None:
        """Abort the connections of all watches."""
        for task in list(self._watches):
            task.cancel()

    async def until(self, *, num_watches: int = 0, num_lists: int = 0, num_refused: int = 0) -> None:
        """Wait until at least so many watches, lists and refused requests have arrived; at most 20 s."""
        wanted = (num_watches, num_lists, num_refused)
        async with self._changed, asyncio.timeout(20):
            await self._changed.wait_for(
                lambda: all(
                    num >= least
                    for num, least in zip((self.num_watches, self.num_lists, self.num_refused), wanted, strict=True)
                )
            )

    async def _publish(self, kind: str, item: dict[str, Any]) -> None:
        self._version = next(self._numbers)
        item["metadata"] = {**item["metadata"], "resourceVersion": str(self._version)}
        async with self._changed:
            self._events.append((self._version, json.loads(json.dumps({"type": kind, "object": item}))))
            self._changed.notify_all()

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.refusal:
            async with self._changed:
                self.num_refused += 1
                self._changed.notify_all()
            return _status(self.refusal, "refused")
        response: web.StreamResponse = await handler(request)
        return response

    async def _group(self, request: web.Request) -> web.Response:
        versions = [{"groupVersion": f"discovery.k8s.io/{name}", "version": name} for name in self.versions]
        return web.json_response({"kind": "APIGroup", "name": "discovery.k8s.io", "versions": versions})

    async def _slices_of(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["version"] not in self.versions or request.match_info["namespace"] != NAMESPACE:
            return _status(404, "not found")
        service = request.query["labelSelector"].removeprefix("kubernetes.io/service-name=")
        return await (self._watch(request, service) if "watch" in request.query else self._list(service))

    async def _list(self, service: str) -> web.Response:
        async with self._changed:
            self.num_lists += 1
            self._changed.notify_all()
        await asyncio.sleep(self.list_delay_s)
        items = [item for item in self._slices.values() if _service(item) == service]
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, request: web.Request, service: str) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        async with self._changed:
            self.num_watches += 1
            self._changed.notify_all()
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
                    async with self._changed:
                        while self._version <= version:
                            await self._changed.wait()
                        events = [event for number, event in self._events if number > version]
                        version = self._version
                    for event in events:
                        if event["type"] == "BOOKMARK" or _service(event["object"]) == service:
                            await response.write(json.dumps(event).encode() + b"\n")
        except TimeoutError:
            return


def pod(
    name: str, address: str, *, ready: bool | None = True, terminating: bool | None = None, uid: str = ""
) -> dict[str, Any]:
    """Return an endpoint of a slice."""
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
