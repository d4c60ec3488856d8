"""Plain requests to an API server, over a real connection."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from outrider.discovery.cluster import ApiError, Cluster
from outrider.errors import InvalidArgument
from tests.cli.api_server import ApiServer, serving

ANSWERS = {
    "/object": web.Response(text='{"a": 1}'),
    "/list": web.Response(text="[1]"),
    "/text": web.Response(text="no JSON"),
    "/refused": web.Response(text='{"message": "because"}', status=403),
    "/broken": web.Response(text="<html>", status=502),
}


class Answering(ApiServer):
    """Answers a few paths, and notes the credentials and the body of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[str] = []
        self.bodies: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization", ""))
        self.bodies.append(await request.text())
        known = ANSWERS[request.path]
        return web.Response(text=known.text, status=known.status)


@pytest.fixture
async def server() -> AsyncIterator[Answering]:
    server = Answering()
    async with serving(server):
        yield server


@pytest.fixture
async def cluster(server: Answering, tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(server.kubeconfig(tmp_path))
    yield cluster
    await cluster.close()


async def test_an_object_is_returned_to_who_shows_the_token(server: Answering, cluster: Cluster) -> None:
    assert await cluster.request("GET", "/object", timeout_s=10) == {"a": 1}
    assert await cluster.request("POST", "/object", {"b": [2]}, timeout_s=10) == {"a": 1}
    assert server.tokens == ["Bearer secret-token"] * 2
    assert server.bodies == ["", '{"b": [2]}']


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("/list", 0, "/list: the answer is no JSON object"),
        ("/text", 0, "/text: the answer is no JSON object"),
        ("/refused", 403, "because"),
        ("/broken", 502, "Bad Gateway"),
    ],
)
async def test_what_is_no_object_is_an_error(cluster: Cluster, path: str, status: int, reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        await cluster.request("GET", path, timeout_s=10)
    assert (caught.value.status, caught.value.reason) == (status, reason)


async def test_a_context_that_is_not_the_current_one(server: Answering, tmp_path: Path) -> None:
    cluster = Cluster(server.kubeconfig(tmp_path), "nowhere")
    with pytest.raises(ApiError) as caught:
        await cluster.request("GET", "/object", timeout_s=10)
    assert caught.value.status == 0
    await cluster.close()


async def test_a_service_account_has_no_contexts() -> None:
    with pytest.raises(InvalidArgument, match="no contexts"):
        await Cluster(None, "x").api()
