"""Reads from a cluster's API server, with bounds on the calls at a time and on each of them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias, TypeVar, cast
from urllib.parse import quote

from outrider.discovery.cluster import ApiError, Cluster
from outrider.doctor.finding import Finding, State
from outrider.doctor.overlay import Manifest

_T = TypeVar("_T")

CALL_S: Final = 10.0
"""Bound on each call."""
FORBIDDEN: Final = (401, 403)
_NOT_FOUND: Final = 404
_MAX_CALLS: Final = 8
_PAGE: Final = 500

Check: TypeAlias = Callable[[], Awaitable[list[Finding]]]


class ClusterReader:
    """What the checks of one cluster read.

    Args:
        cluster: the cluster.
        version: what /version answered.
    """

    def __init__(self, cluster: Cluster, version: Mapping[str, Any]) -> None:
        self._cluster = cluster
        self.version = version
        self._calls = asyncio.Semaphore(_MAX_CALLS)
        self._resources: dict[str, asyncio.Task[dict[str, Manifest]]] = {}

    async def get(self, path: str) -> dict[str, Any]:
        """Return what is at a path."""
        return await self._request("GET", path)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a review, which changes nothing."""
        return await self._request("POST", path, body)

    async def find(self, path: str) -> dict[str, Any] | None:
        """Return an object; None where there is none."""
        try:
            return await self.get(path)
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    async def list(self, path: str) -> "list[Manifest]":
        """Return all objects of a list, page by page."""
        items: list[Manifest] = []
        token = ""
        while True:
            page = await self.get(f"{path}?limit={_PAGE}" + (f"&continue={quote(token)}" if token else ""))
            items += page.get("items") or ()
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return items

    async def resources_of(self, api_version: str) -> dict[str, Manifest]:
        """Return the resources of an API version by kind; none where the server does not have it."""
        if api_version not in self._resources:
            self._resources[api_version] = asyncio.create_task(self._listed_resources(api_version))
        return await self._resources[api_version]

    async def _listed_resources(self, api_version: str) -> dict[str, Manifest]:
        path = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        answer = await self.find(path)
        resources = (answer or {}).get("resources") or ()
        return {item["kind"]: item for item in resources if "/" not in item["name"]}

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        async with self._calls:
            return await self._cluster.request(method, path, body, timeout_s=CALL_S)


async def run(name: str, check: Check) -> list[Finding]:
    """Return the findings of a check; one that it cannot be made where the server refuses a call."""
    try:
        return await check()
    except ApiError as error:
        remedy = "ask somebody who may read it" if error.status in FORBIDDEN else ""
        return [Finding(name, State.UNKNOWN, f"cannot be checked: {error}", remedy)]


async def all_of(*calls: Awaitable[_T]) -> list[_T]:
    """Return the results of all calls; raise the first error only once none of them runs any more."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast(list[_T], results)


def labels_of(item: Manifest) -> dict[str, str]:
    """Return an object's labels."""
    return (item.get("metadata") or {}).get("labels") or {}
