"""Unexpected errors: one answer in the form of all others, and none where a response has begun."""

from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from orchestrator.http.api import ROUTES, Api
from orchestrator.http.app import make_app


class _Broken(PlainTextResponse):
    """A response that fails behind its beginning."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("in the midst of it")


async def _fails(request: Request) -> Response:
    raise RuntimeError("a secret")


async def _breaks(request: Request) -> Response:
    return _Broken()


async def sent_by(path: str, handler: Any) -> list[dict[str, Any]]:
    """What an application sends whose handlers are this one."""
    app = make_app(cast(Api, SimpleNamespace(**{name: handler for _, _, name, _ in ROUTES})))
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("path", ["/v1/models", "/api/tags"])
async def test_an_unexpected_error_is_answered_once_and_logged(path: str, caplog: pytest.LogCaptureFixture) -> None:
    start, body = await sent_by(path, _fails)
    assert (start["status"], dict(start["headers"])[b"content-type"]) == (500, b"application/json")
    error = httpx.Response(500, content=body["body"]).json()["error"]
    assert error == "internal error" if path.startswith("/api/") else error["code"] == "internal_error"
    assert b"secret" not in body["body"]
    assert [record.message for record in caplog.records] == ["request failed"]


async def test_nothing_is_sent_behind_a_response_that_broke(caplog: pytest.LogCaptureFixture) -> None:
    assert [message["type"] for message in await sent_by("/v1/models", _breaks)] == ["http.response.start"]
    assert [record.message for record in caplog.records] == ["request failed"]
