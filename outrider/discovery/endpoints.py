"""Endpoints of workers, and the places that settings name."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from outrider.errors import InvalidArgument

_KUBERNETES: Final = re.compile(r"kubernetes://(?P<namespace>[a-z0-9-]*)/(?P<service>[a-z0-9-]+):(?P<port>[a-z0-9-]+)")
_DNS: Final = re.compile(r"dns:///(?P<host>[A-Za-z0-9._-]+):(?P<port>\d+)")
_ADDRESS: Final = re.compile(r"(?P<host>[^/\s]+):(?P<port>\d+)|unix:\S+")
_MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a worker, with its state in discovery.

    Attributes:
        address: host:port.
        name: of the pod; empty without one.
        is_ready: whether it takes new sessions.
        is_terminating: whether it is about to end; its sessions continue until it ends them.
    """

    address: str
    name: str = ""
    is_ready: bool = True
    is_terminating: bool = False


Found = Callable[[Sequence[Endpoint]], None]
"""Called with all endpoints of one place, each time that they change."""


class Discovery(Protocol):
    """Discovery of the endpoints of one place."""

    async def run(self, found: Found) -> None:
        """Call `found` with the present endpoints, and again whenever they change, until cancelled.

        While the place is out of reach, `found` is not called: the last endpoints stay in force.
        """


@dataclass(frozen=True, slots=True)
class DnsPlace:
    """A name whose addresses are all endpoints, such as that of a headless service."""

    host: str
    port: int

    @property
    def tls_name(self) -> str:
        """Name that certificates of workers there must have, since they are called by their addresses."""
        return self.host


@dataclass(frozen=True, slots=True)
class KubernetesPlace:
    """A service of a cluster.

    Attributes:
        namespace: its namespace; empty takes the pod's own.
        service: its name.
        port: name of one of its ports, or a number.
    """

    namespace: str
    service: str
    port: str

    @property
    def tls_name(self) -> str:
        """Name that certificates of workers there must have, since they are called by their addresses."""
        return self.service


def parse_place(text: str, field: str) -> Endpoint | DnsPlace | KubernetesPlace:
    """Return the place that a setting names: `host:port`, `dns:///host:port` or `kubernetes://[NAMESPACE]/SERVICE:PORT`.

    Raises:
        InvalidArgument: the text is none of these; it names `field`.
    """
    if found := _KUBERNETES.fullmatch(text):
        return KubernetesPlace(found["namespace"], found["service"], found["port"])
    if (found := _DNS.fullmatch(text)) and int(found["port"]) <= _MAX_PORT:
        return DnsPlace(found["host"], int(found["port"]))
    if _ADDRESS.fullmatch(text) and "://" not in text:
        return Endpoint(text)
    raise InvalidArgument(
        f"{text!r} is none of host:port, dns:///host:port and kubernetes://[NAMESPACE]/SERVICE:PORT", field
    )
