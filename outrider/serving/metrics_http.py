"""The HTTP server of a process's metrics, with a bounded number of connections, each for a bounded time."""

import logging
import socket
import threading
from http.server import ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, MetricsHandler

_LOG: Final = logging.getLogger(__name__)
MAX_CONNECTIONS: Final = 16
"""Each has a thread; a Prometheus or two and a person with curl need a handful."""
_TIMEOUT_S: Final = 5.0


class MetricsHTTPServer(ThreadingHTTPServer):
    """Serves a registry's metrics to at most `MAX_CONNECTIONS` connections.

    One more closes the oldest, so that idle connections never lock a scraper out. A connection that
    sends nothing, or takes nothing, for the timeout is ended too.

    Args:
        host: to listen on, without brackets.
        port: to listen on; 0 takes a free one.
        registry: what is served.
        timeout_s: seconds without progress after which a connection ends.

    Raises:
        OSError: the address cannot be bound.
    """

    daemon_threads = True
    # With socketserver's 5, callers would wait a second where many come at once.
    request_queue_size = 128

    def __init__(self, host: str, port: int, registry: CollectorRegistry, timeout_s: float = _TIMEOUT_S) -> None:
        self._lock = threading.Lock()
        # In order of their age.
        self._open: dict[socket.socket, None] = {}
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        handler = MetricsHandler.factory(registry)
        super().__init__((str(address[0]), int(address[1])), type("Handler", (handler,), {"timeout": timeout_s}))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a new connection in a thread of its own, in the oldest one's place where there are too many."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                # Its thread sees the end, and closes it.
                _hang_up(oldest)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection that broke."""
        _LOG.debug("a connection for metrics failed", exc_info=True)


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the caller was faster
        return
