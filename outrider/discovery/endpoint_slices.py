"""Endpoints of a Kubernetes service: the EndpointSlices of its name, listed once and then watched.

Import this module only where a cluster is used: the `kubernetes` package takes a second, and memory.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.watch import Watch

from outrider.discovery.endpoints import Endpoint, Found, KubernetesPlace

_LOG: Final = logging.getLogger(__name__)
_GROUP: Final = "discovery.k8s.io"
_VERSIONS: Final = ("v1", "v1beta1")
_PLURAL: Final = "endpointslices"
_API_ERRORS: Final = (ApiException, aiohttp.ClientError, TimeoutError, OSError)
_FIRST_ERROR: Final = 400
_NOT_FOUND: Final = 404
_GONE: Final = 410
_SHORT_S: Final = 0.5
"""A watch that ends sooner was cut short, so the next one waits."""
_LIST_S: Final = 30.0
_WATCH_S: Final = 30.0
_GRACE_S: Final = 10.0
_FIRST_BACKOFF_S: Final = 0.2
_MAX_BACKOFF_S: Final = 10.0


class EndpointSlices:
    """Discovery by the EndpointSlices of one service.

    The list comes first; from its version on a watch sends the changes. A watch that ends or breaks resumes at the last
    version seen; only where the server no longer has that version (410), everything is listed again. The server
    ends each watch after half a minute; one that has not ended ten seconds later times out, which detects a connection
    that died silently. While the server is out of reach, the last endpoints stay in force.

    Args:
        api: client of the API server, which stays the caller's.
        place: the service, with its namespace.
        watch_s: seconds that a watch lasts, at least 1.
        list_s: bound on a list, in seconds.
        grace_s: seconds that a watch may last beyond that.
    """

    def __init__(
        self,
        api: Any,
        place: KubernetesPlace,
        *,
        watch_s: float = _WATCH_S,
        list_s: float = _LIST_S,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._api = api
        self._objects = client.CustomObjectsApi(api)
        self._place = place
        self._watch_s = watch_s
        self._list_s = list_s
        self._grace_s = grace_s
        self._api_version = ""
        self._version: str | None = None
        self._slices: dict[str, Mapping[str, Any]] = {}
        self._known: tuple[Endpoint, ...] | None = None
        self._backoff_s = _FIRST_BACKOFF_S

    async def run(self, found: Found) -> None:
        """See `Discovery`."""
        # One for all watches: each makes a client of its own, which reads all certificates of the system.
        watch = Watch()
        try:
            while True:
                await self._turn(watch, found)
        finally:
            await watch.close()

    async def _turn(self, watch: Watch, found: Found) -> None:
        """List where that is necessary, and watch until the watch ends; pause after a failure."""
        began = time.monotonic()
        try:
            if self._version is None:
                await self._list(found)
            await self._follow(watch, found)
            if time.monotonic() - began >= _SHORT_S:
                return
        except _API_ERRORS as error:
            self._record(error)
        except (KeyError, TypeError, ValueError) as error:
            self._record(ApiException(status=0, reason=f"malformed answer: {error!r}"))
        await asyncio.sleep(self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)

    def _record(self, error: Exception) -> None:
        status = int(error.status or 0) if isinstance(error, ApiException) else 0
        reason = str(getattr(error, "reason", "")) or type(error).__name__
        about = {"service": self._place.service, "status": status, "reason": reason}
        if status == _GONE:
            self._version = None
            _LOG.info("endpoints are listed again", extra=about)
            return
        if status == _NOT_FOUND:
            # An upgrade may have removed the chosen version of the API.
            self._api_version, self._version = "", None
        _LOG.warning("endpoints cannot be watched, the last ones stay in force", extra=about)

    async def _list(self, found: Found) -> None:
        async with asyncio.timeout(self._list_s):
            if not self._api_version:
                self._api_version = await self._chosen_version()
            listed: Any = await self._objects.list_namespaced_custom_object(**self._query)
        self._slices = {item["metadata"]["name"]: item for item in listed.get("items") or ()}
        self._version = str(listed["metadata"]["resourceVersion"])
        self._notify(found)

    async def _chosen_version(self) -> str:
        """Return the newest version of EndpointSlices that both the server and this code support."""
        group = await client.DiscoveryApi(self._api).get_api_group()
        offered = {item.version for item in group.versions}
        return next((version for version in _VERSIONS if version in offered), _VERSIONS[0])

    async def _follow(self, watch: Watch, found: Found) -> None:
        """Apply changes until the server ends the watch."""
        query: dict[str, Any] = {
            **self._query,
            "resource_version": self._version,
            "allow_watch_bookmarks": True,
            "timeout_seconds": max(1, round(self._watch_s)),
        }
        async with asyncio.timeout(self._watch_s + self._grace_s):
            async for event in watch.stream(self._open, **query):
                self._backoff_s = _FIRST_BACKOFF_S
                self._version = watch.resource_version or self._version
                self._apply(event["type"], event["object"])
                self._notify(found)

    async def _open(self, *, _preload_content: bool = False, **query: Any) -> Any:
        """Return the response to a watch, unread; raise its status, which the library does not check."""
        response = await self._objects.list_namespaced_custom_object_without_preload_content(**query)
        if response.status >= _FIRST_ERROR:
            response.release()
            raise ApiException(status=response.status, reason=response.reason)
        return response

    def _apply(self, kind: str, item: Mapping[str, Any]) -> None:
        match kind:
            case "ADDED" | "MODIFIED":
                self._slices[item["metadata"]["name"]] = item
            case "DELETED":
                self._slices.pop(item["metadata"]["name"], None)

    def _notify(self, found: Found) -> None:
        endpoints = endpoints_of(self._slices.values(), self._place.port)
        if endpoints != self._known:
            self._known = endpoints
            found(endpoints)

    @property
    def _query(self) -> dict[str, Any]:
        return {
            "group": _GROUP,
            "version": self._api_version,
            "namespace": self._place.namespace,
            "plural": _PLURAL,
            "label_selector": f"kubernetes.io/service-name={self._place.service}",
        }


def endpoints_of(slices: Iterable[Mapping[str, Any]], port: str) -> tuple[Endpoint, ...]:
    """Return the endpoints of a service's slices, in order of address.

    A pod counts once: with the first of its addresses, IPv4 before IPv6. Where it is in two slices, as for a moment
    while it moves from one to the other, it is ready where it is ready in one of them.

    Args:
        slices: EndpointSlices of version v1 or v1beta1, as JSON.
        port: name of the port, or its number.
    """
    chosen: dict[str, tuple[tuple[bool, bool], Endpoint]] = {}
    for item in slices:
        is_second = item.get("addressType") == "IPv6"
        for identity, endpoint in _endpoints(item, port):
            rank = (not endpoint.is_ready, is_second)
            if identity not in chosen or rank < chosen[identity][0]:
                chosen[identity] = rank, endpoint
    return tuple(sorted((endpoint for _, endpoint in chosen.values()), key=lambda endpoint: endpoint.address))


def _endpoints(item: Mapping[str, Any], port: str) -> Iterator[tuple[str, Endpoint]]:
    number = _port(item.get("ports") or (), port)
    if number is None:
        return
    for entry in item.get("endpoints") or ():
        conditions, pod = entry.get("conditions") or {}, entry.get("targetRef") or {}
        for host in entry.get("addresses", ())[:1]:
            address = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
            # A missing `ready` is true and a missing `terminating` is false, as the API defines.
            endpoint = Endpoint(
                address,
                name=pod.get("name", ""),
                is_ready=conditions.get("ready") is not False,
                is_terminating=conditions.get("terminating") is True,
            )
            yield pod.get("uid") or address, endpoint


def _port(ports: Iterable[Mapping[str, Any]], wanted: str) -> int | None:
    if wanted.isdecimal():
        return int(wanted)
    return next((int(port["port"]) for port in ports if port.get("name") == wanted and port.get("port")), None)
