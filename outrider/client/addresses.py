"""The addresses of orchestrators, checked before anything is connected: a wrong one fails only after all retries."""

import re
from collections.abc import Sequence
from typing import Final

from outrider.errors import InvalidArgument

_HOST_AND_PORT: Final = re.compile(r"(?P<host>\[[^\[\]\s]+\]|[^\[\]\s:/,]+):(?P<port>\d{1,5})", re.ASCII)
_DNS: Final = re.compile(r"dns:(//[^/]*/)?")
# Of gRPC's target names these are no host and port; `dns:` is one behind its prefix.
_OTHER_TARGETS: Final = ("unix:", "unix-abstract:", "vsock:", "ipv4:", "ipv6:", "xds:")
_MAX_PORT: Final = 2**16 - 1


def checked_addresses(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses, host:port or any gRPC target name each.

    Raises:
        InvalidArgument: there is none, or one is not an address; names `addresses`.
    """
    given = (addresses,) if isinstance(addresses, str) else tuple(addresses)
    if not given:
        raise InvalidArgument("needs at least one address, such as 127.0.0.1:50050", "addresses")
    for address in given:
        if problem := _problem(address):
            raise InvalidArgument(f"{address!r} {problem}", "addresses")
    return given


def _problem(address: object) -> str:
    """Return what is wrong with an address, as the end of a sentence; empty for nothing."""
    if not isinstance(address, str):
        return "is not a string"
    if not address.strip():
        return "is empty, must be host:port"
    if address.startswith(_OTHER_TARGETS):
        return ""
    if address.startswith(("http://", "https://")):
        return "must be host:port, without a scheme"
    place = _DNS.sub("", address, count=1) if address.startswith("dns:") else address
    found = _HOST_AND_PORT.fullmatch(place)
    if found is not None:
        return "" if 0 < int(found["port"]) <= _MAX_PORT else f"has port {found['port']}, must be 1 to {_MAX_PORT}"
    if re.fullmatch(r"[^\[\]\s:/,]+|\[[^\[\]\s]+\]", place):
        return f"has no port, must be host:port, such as {address}:50050"
    return "must be host:port, with brackets around an IPv6 host"
