"""The HTTP server: uvicorn in the process's own event loop, started and stopped with the gRPC server."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Final

import uvicorn

from orchestrator.http.asgi import App
from orchestrator.http.protocol import BoundedProtocol
from outrider.errors import InvalidArgument, Unavailable
from outrider.serving.accepting import stop_accepting
from outrider.serving.tls import TlsFiles

_LOG: Final = logging.getLogger(__name__)
_BACKLOG: Final = 1024
_KEEP_ALIVE_S: Final = 75
"""Seconds that a connection may idle between requests; load balancers keep theirs for 60."""
_GRACE_S: Final = 1
_POLL_S: Final = 0.01
_RENEWAL_S: Final = 10.0


class HttpServer:
    """Serves an application at an address.

    Args:
        address: host:port; port 0 takes a free one.
        app: the application.
        tls: certificate and key, where connections use TLS, and the authorities of callers' certificates.
    """

    name = "http_address"

    def __init__(self, address: str, app: App, tls: TlsFiles) -> None:
        host, separator, port = address.rpartition(":")
        if not separator or not host or not port.isdecimal():
            raise InvalidArgument(f"{address!r} is not host:port", "http_address")
        self._host, self._port = host, int(port)
        self._tls = tls
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        self._renewal: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Serve; return the bound address. Raises `Unavailable` when the address cannot be bound."""
        # Its lines about connections are no news, and those about broken requests are any caller's to write.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        config = self._server.config
        config.load()
        config.ssl = _context(self._tls)
        if config.ssl is not None:
            self._renewal = asyncio.create_task(_renew(config.ssl, self._tls))
        listener = self._bind()
        self._task = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
                raise Unavailable("the HTTP server did not start")
            await asyncio.sleep(_POLL_S)
        return f"{self._host}:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Close all connections; calls that still run are cancelled after a second."""
        if self._renewal is not None:
            self._renewal.cancel()
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            # Those that came meanwhile, and those whose clients do not read the rest of a response.
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()

    def _bind(self) -> socket.socket:
        try:
            found = socket.getaddrinfo(
                self._host.strip("[]"), self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, kind, protocol, _, address = found[0]
            listener = socket.socket(family, kind, protocol)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.setblocking(False)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            raise Unavailable(f"cannot listen on {self._host}:{self._port} for HTTP: {error.strerror}") from None
        return listener


class _Server(uvicorn.Server):
    """A server that leaves signals to the process, and loses no connection as it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            await stop_accepting(server)
        await super().shutdown(sockets)


async def _renew(context: ssl.SSLContext, tls: TlsFiles) -> None:
    """Take certificates that were renewed, for connections that come after."""
    known = _stamps(tls)
    while True:
        await asyncio.sleep(_RENEWAL_S)
        try:
            if (found := _stamps(tls)) == known:
                continue
            _load(context, tls)
            known = found
        except (OSError, ssl.SSLError) as error:
            # Until they are complete, the old ones stay in use.
            _LOG.warning("the certificates for HTTP could not be reloaded: %s", error)


def _stamps(tls: TlsFiles) -> list[int]:
    return [path.stat().st_mtime_ns for path in (tls.certificate, tls.key, tls.authority) if path is not None]


def _load(context: ssl.SSLContext, tls: TlsFiles) -> None:
    assert tls.certificate is not None
    context.load_cert_chain(tls.certificate, tls.key)
    if tls.authority is not None:
        context.load_verify_locations(tls.authority)
        context.verify_mode = ssl.CERT_REQUIRED


def _context(tls: TlsFiles) -> ssl.SSLContext | None:
    if tls.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        _load(context, tls)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"the certificate for HTTP cannot be used: {error}", "tls_certificate") from None
    return context
