"""The header by which a gateway keeps a session at one orchestrator, and the headers that say who responded."""

import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.orchestrator.http.conftest import give_text
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import orchestrating

HELLO = [{"role": "user", "content": "Hello"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/api/chat": {"messages": HELLO, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "Hello", "options": {"num_predict": 4}},
}
every_route = pytest.mark.parametrize("path", ROUTES)


def session_of(name: str) -> dict[str, str]:
    return {"X-Outrider-Session": name}


@pytest.fixture
def name() -> str:
    return f"s-{uuid.uuid4().hex}"


@pytest.fixture
async def named(session_store_url: str, target: ScriptedTarget) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an orchestrator that has a name."""
    give_text(target)
    more = {"http_address": "127.0.0.1:0", "replica": "orchestrator-7"}
    async with (
        orchestrating(session_store_url, (target,), **more) as running,
        running.http_client() as client,
    ):
        yield client


@every_route
@pytest.mark.parametrize("streams", [False, True])
async def test_it_names_the_session_as_the_body_does(
    named: httpx.AsyncClient, path: str, name: str, streams: bool
) -> None:
    body = {**ROUTES[path], "stream": streams}
    answer = await named.post(path, json=body, headers=session_of(name))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-outrider-session"] == name
    assert answer.headers["x-outrider-replica"] == "orchestrator-7"
    deleted = await named.delete(f"/v1/sessions/{name}")
    assert deleted.status_code == 200, "the session was kept under this name"
    both = await named.post(path, json={**body, "session_id": name}, headers=session_of(name))
    assert both.headers["x-outrider-session"] == name


async def test_a_conversation_goes_on_under_the_header_alone(http: httpx.AsyncClient, name: str) -> None:
    path, headers = "/v1/chat/completions", session_of(name)
    lengths = []
    for _ in range(3):
        answer = await http.post(path, json=ROUTES[path], headers=headers)
        lengths.append(answer.json()["usage"]["prompt_tokens"])
    assert lengths[0] < lengths[1] < lengths[2], "each turn follows those before"


@every_route
async def test_another_session_in_the_body_is_refused(http: httpx.AsyncClient, path: str, name: str) -> None:
    refused = await http.post(path, json={**ROUTES[path], "session_id": "other"}, headers=session_of(name))
    assert refused.status_code == 400
    assert "session_id is 'other', X-Outrider-Session is" in refused.text


@pytest.mark.parametrize("name", ["a b", "x" * 129, "caf\u00e9"])
async def test_a_name_that_is_no_id_is_refused(http: httpx.AsyncClient, name: str) -> None:
    path = "/v1/chat/completions"
    refused = await http.post(path, json=ROUTES[path], headers={"X-Outrider-Session": name.encode("latin-1")})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "session_id"


async def test_several_choices_have_no_session(http: httpx.AsyncClient, name: str) -> None:
    path = "/v1/chat/completions"
    refused = await http.post(path, json={**ROUTES[path], "n": 2}, headers=session_of(name))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session_id")


@pytest.mark.parametrize("headers", [{}, {"X-Outrider-Session": ""}])
async def test_without_a_name_there_is_no_session_and_no_replica(
    http: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    path = "/v1/chat/completions"
    answer = await http.post(path, json=ROUTES[path], headers=headers)
    assert answer.status_code == 200
    assert "x-outrider-session" not in answer.headers
    assert "x-outrider-replica" not in answer.headers
    assert "x-request-id" in answer.headers
