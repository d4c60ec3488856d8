"""Bounds on a connection: uvicorn has none for the size of headers, and none for the time that they take."""

import asyncio
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES: Final = 65536
MAX_CONNECTIONS: Final = 4096
"""Each open connection takes a descriptor and some kilobytes; those that generate are bounded by admission."""
HEADER_TIMEOUT_S: Final = 15.0
"""Seconds until the headers of a request are there, from the connection or from its first byte on."""
LINGER_S: Final = 10.0
"""Seconds that a closed connection keeps for the rest of its response; who reads nothing would hold it for ever."""
ABORT: Final = "outrider.abort"
"""The extension of a request's scope that ends its connection at once, whatever waits to be read."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection of HTTP/1.1 whose headers are bounded in size and in time.

    What exceeds the bound is cut off without an answer: the client of such a connection is broken or hostile.
    """

    header_timeout_s = HEADER_TIMEOUT_S
    _num_header_bytes = 0
    _waits_for_headers = True
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request; end a connection beyond the limit at once."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all waits."""
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; abort where a request's headers become too long."""
        if self._waits_for_headers:
            self._num_header_bytes += len(data)
            if self._deadline is None:
                self._expect_headers()
        super().data_received(data)
        if self._waits_for_headers and self._num_header_bytes > MAX_HEADER_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._waits_for_headers = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Take the headers of a request."""
        self._waits_for_headers, self._num_header_bytes = False, 0
        self._end_wait()
        super().on_headers_complete()
        extensions: dict[str, Any] = {ABORT: self.transport.abort}
        self.scope["extensions"] = extensions

    def on_message_complete(self) -> None:
        """Take the end of a request's body; the next request may follow."""
        super().on_message_complete()
        self._waits_for_headers = True

    def on_response_complete(self) -> None:
        """Follow with the next request; bound the wait of a connection that closes."""
        super().on_response_complete()
        self._linger()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that has idled."""
        super().timeout_keep_alive_handler()
        self._linger()

    def _linger(self) -> None:
        transport = cast(Any, self.transport)
        if transport is not None and transport.is_closing():
            self.loop.call_later(LINGER_S, transport.abort)

    def _expect_headers(self) -> None:
        self._end_wait()
        self._deadline = self.loop.call_later(self.header_timeout_s, self._on_late)

    def _on_late(self) -> None:
        transport = cast(Any, self.transport)
        if transport is not None:
            transport.abort()

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
