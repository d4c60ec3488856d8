"""The few types of ASGI, and plain JSON responses."""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

from orchestrator.http.errors import HttpError, body_of, encoded, headers_of

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]

JSON: bytes = b"application/json"


async def send_body(
    send: Send, body: bytes, *, status: int = 200, kind: bytes = JSON, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send a whole response."""
    own = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: HttpError, cause: BaseException | None = None, body: Any = None) -> None:
    """Send an error; `body` replaces OpenAI's form of it."""
    content = encoded(body_of(error) if body is None else body)
    await send_body(send, content, status=error.status, headers=headers_of(error, cause))


def header(scope: Scope, name: bytes) -> str:
    """Return a header's value; empty without one."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def metadata(scope: Scope) -> list[tuple[str, str | bytes]]:
    """Return the headers as the metadata of a call, with names in lower case."""
    return [(key.decode("latin-1").lower(), value.decode("latin-1")) for key, value in scope["headers"]]
