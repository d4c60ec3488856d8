"""What every HTTP request passes first: Host, Origin, content type, body, tenant; and what is counted of it."""

import asyncio
import ipaddress
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Histogram

from orchestrator.http.asgi import App, Headers, Message, Receive, Scope, Send, header, metadata, send_body, send_error
from orchestrator.http.errors import HttpError, as_http, body_at
from outrider.errors import OutriderError
from outrider.serving.interceptor import CallsInFlight, Metadata
from outrider.serving.metrics import LATENCY_BUCKETS_S, PREFIX

_LOG: Final = logging.getLogger(__name__)
MAX_BODY_BYTES: Final = 4 << 20
"""As a message of gRPC: prompts that fit no context are refused by their size later, by name."""
BODY_TIMEOUT_S: Final = 30.0
MAX_DISCARDED_BYTES: Final = 16 << 20
"""Of a body that is refused: clients that send all of it first read the answer only then."""
_LOOPBACK: Final = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})
_CURL_TYPE: Final = "application/x-www-form-urlencoded"
_METHODS: Final = b"GET, POST, DELETE, OPTIONS"


class HttpMetrics:
    """Counts and times of HTTP requests, by route and status; routes are those of the table, so no caller adds one.

    Args:
        registry: exposes them.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            f"{PREFIX}http_requests", "HTTP requests, by route and status.", ["route", "status"], registry=registry
        )
        self._duration = Histogram(
            f"{PREFIX}http_request_duration_seconds",
            "Seconds from an HTTP request to the end of its response, by route.",
            ["route"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )

    def record(self, route: str, status: int, duration_s: float) -> None:
        """Count a request that has ended."""
        self._requests.labels(route, str(status)).inc()
        self._duration.labels(route).observe(duration_s)


class Guard:
    """The outermost application.

    Args:
        app: what it guards; it gets the whole body at once.
        routes: paths that are counted by name; the last part may be in braces, and stands for any.
        open_routes: paths that need no token.
        authenticate: raises `Unauthenticated` for headers without a known token.
        calls: counts the calls that a drain waits for.
        metrics: of HTTP.
        is_local: whether the address is on a loopback interface only, so that browsers are the only strangers.
        hosts: names that a request's Host may have; without any, a local address takes names of this machine and
            addresses, another one takes every name.
        origins: web origins, besides the server's own, whose pages may call.
    """

    def __init__(
        self,
        app: App,
        *,
        routes: Iterable[str],
        open_routes: Iterable[str],
        authenticate: Callable[[Metadata], object],
        calls: CallsInFlight,
        metrics: HttpMetrics,
        is_local: bool,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._routes = frozenset(routes)
        self._by_folder = {route.partition("{")[0]: route for route in self._routes if "{" in route}
        self._open_routes = frozenset(open_routes)
        self._authenticate = authenticate
        self._calls = calls
        self._metrics = metrics
        self._is_local = is_local
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            return
        began, status = time.monotonic(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *cross_origin]
            await send(message)

        route = self._route(scope["path"])
        cross_origin = self._cross_origin(scope)
        # Probes and scrapes, like those of gRPC, are nothing that a drain waits for.
        try:
            if route in self._open_routes:
                await self._serve(scope, receive, noting)
            else:
                with self._calls.entered():
                    await self._serve(scope, receive, noting)
        finally:
            self._metrics.record(route, status or 499, time.monotonic() - began)

    def _route(self, path: str) -> str:
        """Return the name under which a path is counted."""
        folder = path[: path.rfind("/") + 1]
        return path if path in self._routes else self._by_folder.get(folder, "other")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_caller(scope)
            if scope["method"] == "OPTIONS":
                await send_body(send, b"", status=204, headers=[(b"allow", _METHODS)])
                return
            if scope["path"] not in self._open_routes:
                self._authenticate(metadata(scope))
            scope["state"]["body"] = await self._body(scope, receive)
        except (HttpError, OutriderError) as error:
            await self._refuse(scope, receive, send, error)
            return
        except _Left:
            return
        await self._app(scope, receive, send)

    @staticmethod
    async def _refuse(scope: Scope, receive: Receive, send: Send, error: HttpError | OutriderError) -> None:
        """Answer with an error; end a connection on which the rest of a body could still come, for ever."""
        is_complete = False
        # Who waits for "100 Continue" has sent nothing of the body, and sends nothing after this answer. Who is late
        # has had its time.
        if header(scope, b"expect").lower() != "100-continue" and getattr(error, "status", 0) != 408:
            is_complete = await _discarded(receive)

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_complete:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        told = as_http(error, {})
        await send_error(closing, told, error, body_at(scope["path"], told))

    def _check_caller(self, scope: Scope) -> None:
        """Refuse what a page of another site makes a browser send."""
        host = _name_of(header(scope, b"host"))
        if not self._is_known_host(host):
            hint = "add it to OUTRIDER_HTTP_HOSTS"
            raise HttpError(403, "PermissionDeniedError", f"Host {host!r} is not served here; {hint}", "Host")
        origin = header(scope, b"origin")
        if origin and not self._is_known_origin(scope, origin):
            hint = "add it to OUTRIDER_HTTP_ORIGINS"
            raise HttpError(403, "PermissionDeniedError", f"Origin {origin!r} may not call; {hint}", "Origin")
        kind = header(scope, b"content-type").partition(";")[0].strip().lower()
        # Ollama's documented curl lines leave curl's own type; a browser, which the check is for, adds an Origin.
        is_curl = kind == _CURL_TYPE and not origin and scope["path"].startswith("/api/")
        if scope["method"] == "POST" and kind != "application/json" and not is_curl:
            problem = "the body must be JSON, with the header Content-Type: application/json"
            raise HttpError(415, "UnsupportedMediaTypeError", problem, "Content-Type")

    def _is_known_host(self, host: str) -> bool:
        if self._hosts:
            return host in self._hosts
        return not self._is_local or host in _LOOPBACK or host.endswith(".localhost") or _is_address(host)

    def _is_known_origin(self, scope: Scope, origin: str) -> bool:
        return origin.lower() in self._origins or self._is_own(scope, origin)

    @staticmethod
    def _is_own(scope: Scope, origin: str) -> bool:
        return bool(netloc := _netloc_of(origin)) and netloc == header(scope, b"host").lower()

    def _cross_origin(self, scope: Scope) -> Headers:
        origin = header(scope, b"origin")
        if not origin or origin.lower() not in self._origins:
            return []
        headers: Headers = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
        if scope["method"] == "OPTIONS":
            asked = header(scope, b"access-control-request-headers").encode("latin-1")
            headers += [
                (b"access-control-allow-methods", _METHODS),
                (b"access-control-allow-headers", asked),
                (b"access-control-max-age", b"600"),
            ]
        return headers

    @staticmethod
    async def _body(scope: Scope, receive: Receive) -> bytes:
        """Return the whole body, which comes within a bound of size and time."""
        length = header(scope, b"content-length")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            raise HttpError(413, "BadRequestError", f"the body may have at most {MAX_BODY_BYTES} bytes", "body")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Left
                    body += message.get("body", b"")
                    if len(body) > MAX_BODY_BYTES:
                        problem = f"the body may have at most {MAX_BODY_BYTES} bytes"
                        raise HttpError(413, "BadRequestError", problem, "body")
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            problem = f"the body did not come within {BODY_TIMEOUT_S:g} s"
            raise HttpError(408, "TimeoutError", problem, "body") from None


async def _discarded(receive: Receive) -> bool:
    """Drop the rest of a body; return whether it has come to its end, within a bound of size and time."""
    num_bytes = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while num_bytes <= MAX_DISCARDED_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return True
                num_bytes += len(message.get("body", b""))
    except TimeoutError:
        pass
    return False


class _Left(Exception):
    """The client has gone before its request was complete."""


def _name_of(host: str) -> str:
    """Return the name in a Host header, without its port and brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower() if host.isprintable() else ""
    except ValueError:  # brackets that hold no address
        return ""


def _netloc_of(origin: str) -> str:
    """Return host and port of an origin; empty for what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
