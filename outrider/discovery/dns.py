"""Endpoints of a name in DNS: all of its addresses."""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from outrider.discovery.endpoints import DnsPlace, Endpoint, Found

_LOG: Final = logging.getLogger(__name__)
_ANSWER_S: Final = 10.0


class SystemResolver:
    """The system's resolver: one query at a time, each in a thread that ends with its answer.

    The event loop's own threads are not used: a query that hangs, as it does for a minute where no name server answers,
    would block them, and the end of the process.
    """

    def __init__(self) -> None:
        # Not whether the thread is alive: it is, for a moment after it has answered.
        self._is_answered = threading.Event()
        self._is_answered.set()

    async def __call__(self, host: str, port: int) -> set[str]:
        """Return the addresses of a name, as host:port.

        Raises:
            OSError: it has none, or the query before is not answered yet.
        """
        if not self._is_answered.is_set():
            raise OSError(f"no answer yet to the last query for {host}")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[set[str]] = loop.create_future()
        self._is_answered.clear()
        threading.Thread(target=self._query, args=(host, port, loop, answer), name="resolver", daemon=True).start()
        return await answer

    def _query(self, host: str, port: int, loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[set[str]]") -> None:
        result: set[str] | OSError
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            result = {f"{_bracketed(str(place[0]), family)}:{port}" for family, _, _, _, place in found}
        except OSError as error:
            result = error
        self._is_answered.set()
        # The loop may be closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, answer, result)


def _settle(answer: "asyncio.Future[set[str]]", result: set[str] | OSError) -> None:
    if answer.done():
        return
    if isinstance(result, OSError):
        answer.set_exception(result)
    else:
        answer.set_result(result)


class DnsName:
    """Discovery by a name that is resolved at intervals.

    A name without an answer keeps its last addresses: the stream of a worker that is gone breaks by itself.

    Args:
        place: the name.
        interval_s: seconds from an answer to the next query.
        resolve: returns the addresses of a host and a port; raises `OSError`. None takes the system's resolver.
    """

    def __init__(
        self,
        place: DnsPlace,
        interval_s: float,
        resolve: Callable[[str, int], Awaitable[Iterable[str]]] | None = None,
    ) -> None:
        self._place = place
        self._interval_s = interval_s
        self._resolve = resolve or SystemResolver()

    async def run(self, found: Found) -> None:
        """See `Discovery`."""
        known: list[str] | None = None
        while True:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    addresses = sorted(await self._resolve(self._place.host, self._place.port))
            except OSError as error:
                _LOG.warning("name not resolved", extra={"host": self._place.host, "problem": str(error)})
            else:
                if addresses != known:
                    known = addresses
                    found([Endpoint(address) for address in addresses])
            await asyncio.sleep(self._interval_s)


def _bracketed(host: str, family: int) -> str:
    return f"[{host}]" if family == socket.AF_INET6 else host
