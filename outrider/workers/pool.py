"""A pool of links to the workers of one kind, as discovery finds them."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from outrider.discovery.cluster import Cluster
from outrider.discovery.dns import DnsName
from outrider.discovery.endpoints import Discovery, DnsPlace, Endpoint, Found, KubernetesPlace, parse_place
from outrider.workers.links import LinkSettings, StreamKind, WorkerLink

_LOG: Final = logging.getLogger(__name__)
_PAUSE_S: Final = 10.0
# About as often as caching resolvers refresh, at one query for each name.
_DNS_INTERVAL_S: Final = 5.0


class LinkPool:
    """Links to all endpoints that discovery finds; links to endpoints that are no longer listed end.

    A worker that is no longer listed keeps its link while it has sessions and its stream works: a list may be wrong, a
    stream that carries tokens is not.

    Args:
        kind: of the workers.
        places: of the workers; see `parse_place`.
        field: the setting with the places, for errors.
        settings: of the process.
        cluster: client of the API server, for Kubernetes services.

    Attributes:
        changed: set when a link is added.
    """

    def __init__(
        self, kind: StreamKind, places: Sequence[str], field: str, settings: LinkSettings, cluster: Cluster
    ) -> None:
        self._kind = kind
        self._settings = settings
        self._cluster = cluster
        self.changed = asyncio.Event()
        self._links: dict[str, WorkerLink] = {}
        self._running: dict[WorkerLink, asyncio.Task[None]] = {}
        self._searches: list[asyncio.Task[None]] = []
        self._is_started = False
        parsed = [parse_place(place, field) for place in places]
        self._places = [place for place in parsed if not isinstance(place, Endpoint)]
        self._found: dict[int, Sequence[Endpoint]] = {-1: [place for place in parsed if isinstance(place, Endpoint)]}
        self._apply()

    @property
    def links(self) -> list[WorkerLink]:
        """All links, in the order in which their endpoints were found."""
        return list(self._links.values())

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a link nor a place where discovery may find workers."""
        return not self._links and not self._places

    async def start(self) -> None:
        """Start discovery and connect. Raise `InvalidArgument` where discovery needs a cluster and there is none."""
        self._is_started = True
        for link in self.links:
            self._start(link)
        for number, place in enumerate(self._places):
            discovery = await self._discovery(place)
            self._searches.append(asyncio.create_task(_discover(discovery, partial(self._on_found, number))))

    async def stop(self) -> None:
        """Stop discovery and all links."""
        self._is_started = False
        tasks = [*self._searches, *self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _discovery(self, place: DnsPlace | KubernetesPlace) -> Discovery:
        if isinstance(place, DnsPlace):
            return DnsName(place, _DNS_INTERVAL_S)
        # Here, because the import takes a second, which processes without a cluster save.
        from outrider.discovery.endpoint_slices import EndpointSlices

        namespace = place.namespace or self._cluster.namespace
        return EndpointSlices(await self._cluster.api(), replace(place, namespace=namespace))

    def _on_found(self, number: int, endpoints: Sequence[Endpoint]) -> None:
        self._found[number] = endpoints
        self._apply()

    def _apply(self) -> None:
        """Add and remove links so that they match all places; an address in two places counts as in the first."""
        wanted: dict[str, tuple[Endpoint, str]] = {}
        for number, endpoints in self._found.items():
            tls_name = self._places[number].tls_name if number >= 0 else ""
            for endpoint in endpoints:
                wanted.setdefault(endpoint.address, (endpoint, tls_name))
        for address, link in list(self._links.items()):
            if address not in wanted:
                self._unlist(link)
        for address, (endpoint, tls_name) in wanted.items():
            self._update(address, endpoint, tls_name)

    def _update(self, address: str, endpoint: Endpoint, tls_name: str) -> None:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = WorkerLink(address, self._kind, self._settings, tls_name)
            self.changed.set()
            if self._is_started:
                _LOG.info("worker found", extra={"worker": address, "pod": endpoint.name})
                self._start(link)
        link.endpoint = endpoint

    def _start(self, link: WorkerLink) -> None:
        task = asyncio.create_task(link.run())
        self._running[link] = task
        task.add_done_callback(lambda _: self._ended(link))

    def _unlist(self, link: WorkerLink) -> None:
        if link.endpoint is None:
            return
        _LOG.info("worker no longer listed", extra={"worker": link.address})
        link.unlist()
        if not link.is_up:
            if (task := self._running.get(link)) is not None:
                task.cancel()
            self._drop(link)

    def _ended(self, link: WorkerLink) -> None:
        self._running.pop(link, None)
        if link.endpoint is None:
            self._drop(link)
        elif self._is_started:
            # The worker was listed again while its stream was ending.
            self._start(link)

    def _drop(self, link: WorkerLink) -> None:
        if self._links.get(link.address) is link:
            del self._links[link.address]


async def _discover(discovery: Discovery, found: Found) -> None:
    while True:
        try:
            await discovery.run(found)
        except Exception:
            # No answer of a name server or an API server may end discovery for good.
            _LOG.exception("discovery failed, trying again")
        await asyncio.sleep(_PAUSE_S)
