"""Endpoints that are all addresses of one name."""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from orchestrator.discovery.endpoints import DnsPlace, Endpoint, Found

_LOG: Final = logging.getLogger(__name__)
_ANSWER_S: Final = 10.0


class SystemResolver:
    """Asks the system for addresses, one question at a time, each in a thread that ends with its answer.

    Not in the event loop's own threads: a question that hangs, as it does for a minute where no name server answers,
    would keep them from everything else, and the process from its end.
    """

    def __init__(self) -> None:
        # Not whether the thread lives: it does for a moment after it has answered.
        self._is_answered = threading.Event()
        self._is_answered.set()

    async def __call__(self, host: str, port: int) -> set[str]:
        """Returns the addresses of a name, as host:port.

        Raises:
            OSError: it has none, or the question before is still open.
        """
        if not self._is_answered.is_set():
            raise OSError(f"no answer yet to the last question for {host}")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[set[str]] = loop.create_future()
        self._is_answered.clear()
        threading.Thread(target=self._ask, args=(host, port, loop, answer), name="resolver", daemon=True).start()
        return await answer

    def _ask(self, host: str, port: int, loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[set[str]]") -> None:
        result: set[str] | OSError
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            result = {f"{_bracketed(str(place[0]), family)}:{port}" for family, _, _, _, place in found}
        except OSError as error:
            result = error
        self._is_answered.set()
        # Nobody may be waiting any more.
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
    """Asks for a name's addresses again and again.

    A name that has none, or is not answered, keeps those that it had: whoever is gone is noticed by its stream.

    Args:
        place: the name.
        interval_s: seconds from an answer to the next question.
        resolve: asks for addresses; raises `OSError`. None asks the system.
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
