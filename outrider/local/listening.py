"""Where services listen: HOST:PORT, HOST:0 for any free port, HOST:PORT+ for the first free port from PORT on."""

import errno
import os
import socket
from collections.abc import Collection
from typing import Final

from outrider.errors import InvalidArgument, Unavailable

_NEXT: Final = "+"
_UNIX: Final = "unix:"
_NUM_PORTS: Final = 100
"""Ports that are tried from the first one on: more than a user of this machine is likely to have taken in a row."""
_MAX_PORT: Final = 65535
_ANY_HOST: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}


def check_address(address: str, field: str, num: int = 1) -> None:
    """Check where `num` processes shall listen.

    Raises:
        InvalidArgument: it is not of one of the three forms, or names one port for several processes.
    """
    host, port = _parts(address)
    if address.startswith(_UNIX):
        fixed = True
    else:
        if not host or not port.isdecimal() or int(port) > _MAX_PORT:
            problem = f"{address!r} is not HOST:PORT, such as 127.0.0.1:8000, or 127.0.0.1:8000+ for the next free port"
            raise InvalidArgument(problem, field)
        fixed = int(port) != 0 and not address.endswith(_NEXT)
    if fixed and num > 1:
        raise InvalidArgument(f"{address} is one address for {num} processes; {address}+ takes the next ports", field)


def check_free(address: str) -> None:
    """Check that an address can be listened on, where it names a port; raise `Unavailable`, which says why not."""
    if not address.startswith(_UNIX) and not address.endswith(_NEXT) and not _is_free(address):
        raise Unavailable(f"cannot listen on {address}: the port is taken")


def chosen_addresses(address: str, num: int, taken: Collection[str] = ()) -> list[str]:
    """Return the addresses at which `num` processes shall listen.

    Args:
        address: of one of the three forms.
        num: number of processes.
        taken: addresses that are not free, although nobody listens yet.

    Raises:
        Unavailable: too few of the ports from that of HOST:PORT+ on are free.
    """
    if not address.endswith(_NEXT):
        return [address] * num
    host, port = _parts(address)
    last = min(int(port) + _NUM_PORTS, _MAX_PORT + 1)
    found: list[str] = []
    for candidate in (f"{host}:{number}" for number in range(int(port), last)):
        if len(found) < num and candidate not in taken and _is_free(candidate):
            found.append(candidate)
    if len(found) < num:
        raise Unavailable(f"cannot listen on {host}: no port from {port} to {last - 1} is free")
    return found


def reachable(address: str) -> str:
    """Return the address by which this machine reaches a service: the loopback for one that listens on all hosts."""
    host, separator, port = address.rpartition(":")
    return f"{_ANY_HOST.get(host, host)}:{port}" if separator and not address.startswith(_UNIX) else address


def _parts(address: str) -> tuple[str, str]:
    host, _, port = address.removesuffix(_NEXT).rpartition(":")
    return host, port


def _is_free(address: str) -> bool:
    host, port = _parts(address)
    bare = host.strip("[]")
    try:
        # As servers do it: a port whose old connections are still closing counts as free.
        with socket.create_server((bare, int(port)), family=socket.AF_INET6 if ":" in bare else socket.AF_INET):
            return True
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise Unavailable(f"cannot listen on {address}: {reason}") from None
