"""The HTTP server: tenants, origins, certificates, drain."""

import asyncio
import contextlib
import json
import ssl
from pathlib import Path

import httpx
import pytest
import trustme

from orchestrator.http import server as http_server
from orchestrator.http.asgi import Receive, Scope, Send
from orchestrator.store.record import derived_session_id
from outrider.errors import InvalidArgument, Unavailable
from tests.orchestrator.http.conftest import give_text
from tests.orchestrator.http.events import read
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import Orchestrator, orchestrating, until

PATH = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 2}


async def test_tenants_are_known_by_their_tokens(
    session_store_url: str, target: ScriptedTarget, tmp_path: Path
) -> None:
    give_text(target)
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"acme": {"tokens": ["acme-secret"], "max_sessions": 2}}))
    async with (
        orchestrating(session_store_url, (target,), http_address="127.0.0.1:0", tenants_file=tenants) as running,
        running.http_client() as client,
    ):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic acme-secret"}):
            refused = await client.post(PATH, json=BODY, headers=headers)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert refused.json()["error"]["type"] == "AuthenticationError"
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        # Probes need no token. Metrics add up all tenants, so no tenant gets them.
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 404
        client.headers["Authorization"] = "Bearer acme-secret"
        # Requests without a session count as none, however many.
        for _ in range(6):
            assert (await client.post(PATH, json=BODY)).status_code == 200
        for number in range(2):
            assert (await client.post(PATH, json={**BODY, "session_id": f"http-{number}"})).status_code == 200
        full = await client.post(PATH, json={**BODY, "session_id": "http-2"})
        assert (full.status_code, full.json()["error"]["type"]) == (429, "RateLimitError")
        assert int(full.headers["retry-after"]) >= 1
        assert (await client.post(PATH, json=BODY)).status_code == 200
        # A session that is deleted makes room.
        assert (await client.delete("/v1/sessions/http-0", headers={"Authorization": ""})).status_code == 401
        assert (await client.delete("/v1/sessions/http-0")).status_code == 200
        assert (await client.post(PATH, json={**BODY, "session_id": "http-2"})).status_code == 200


async def test_a_session_is_deleted_by_its_name(http: httpx.AsyncClient, texting: Orchestrator) -> None:
    assert (await http.post(PATH, json={**BODY, "session_id": "a:1"})).status_code == 200
    deleted = await http.delete("/v1/sessions/a%3A1")
    assert deleted.status_code == 200
    assert deleted.json() == {"id": "a:1", "object": "session.deleted", "deleted": True}
    assert await texting.store.get("default", "a:1") is None
    for name, status in (("a:1", 404), ("a%20b", 400)):
        refused = await http.delete(f"/v1/sessions/{name}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, "session_id")
    assert (await http.get("/v1/sessions/a:1")).status_code == 405
    assert (await http.delete("/v1/sessions/a/b")).status_code == 404
    counted = (await http.get("/metrics")).text
    assert 'outrider_http_requests_total{route="/v1/sessions/{session_id}",status="200"} 1.0' in counted


async def test_a_session_that_nobody_named_expires_with_its_request(
    http: httpx.AsyncClient, texting: Orchestrator
) -> None:
    answer = await http.post(PATH, json={**BODY, "request_id": "unnamed-1"})
    assert answer.status_code == 200
    named = await http.post(PATH, json={**BODY, "session_id": "named-1"})
    assert named.status_code == 200
    assert await texting.store.expires_in_s("default", "named-1") > 300
    assert 0 < await texting.store.expires_in_s("default", derived_session_id("default", "unnamed-1")) <= 300


async def test_pages_of_listed_origins_may_call(session_store_url: str, target: ScriptedTarget) -> None:
    give_text(target)
    settings = {"http_address": "127.0.0.1:0", "http_origins": ("https://chat.example",)}
    async with (
        orchestrating(session_store_url, (target,), **settings) as running,
        running.http_client() as client,
    ):
        allowed = await client.post(PATH, json=BODY, headers={"Origin": "https://chat.example"})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        preflight = await client.options(
            PATH, headers={"Origin": "https://chat.example", "Access-Control-Request-Headers": "authorization"}
        )
        assert preflight.headers["access-control-allow-headers"] == "authorization"
        other = await client.post(PATH, json=BODY, headers={"Origin": "https://evil.example"})
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers
        assert "DELETE" in preflight.headers["access-control-allow-methods"]
        assert (await client.delete("/v1/sessions/a", headers={"Origin": "https://evil.example"})).status_code == 403
        own = await client.post(PATH, json=BODY, headers={"Origin": f"http://{running.http_address}"})
        assert own.status_code == 200
        foreign = await client.get("/v1/models", headers={"Host": "evil.example"})
        assert (foreign.status_code, foreign.json()["error"]["param"]) == (403, "Host")
        form = await client.post(PATH, content="{}", headers={"Content-Type": "text/plain"})
        assert form.status_code == 415


async def test_certificates_are_those_of_grpc_and_are_taken_anew(
    session_store_url: str, target: ScriptedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_text(target)
    monkeypatch.setattr(http_server, "_RENEWAL_S", 0.05)
    authority = trustme.CA()
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"

    def issue() -> None:
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(key)
        issued.cert_chain_pems[0].write_to_path(certificate)

    def serial() -> bytes:
        address = running.http_address.rpartition(":")
        return ssl.get_server_certificate((address[0], int(address[2]))).encode()

    issue()
    settings = {"http_address": "127.0.0.1:0", "tls_certificate": certificate, "tls_key": key}
    async with orchestrating(session_store_url, (target,), **settings) as running:
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        async with httpx.AsyncClient(base_url=f"https://{running.http_address}", verify=trust) as client:
            assert (await client.post(PATH, json=BODY, timeout=20)).status_code == 200
        first = await asyncio.to_thread(serial)
        issue()
        async with asyncio.timeout(10):
            while await asyncio.to_thread(serial) == first:
                await asyncio.sleep(0.05)


async def test_a_drain_lets_streams_end_and_refuses_new_ones(session_store_url: str, target: ScriptedTarget) -> None:
    give_text(target)
    target.run_len = 5
    async with (
        orchestrating(session_store_url, (target,), http_address="127.0.0.1:0") as running,
        running.http_client() as client,
        running.http_client() as other,
    ):
        assert (await other.get("/health")).status_code == 200
        stream = asyncio.create_task(read(client, PATH, {"prompt": "x", "max_tokens": 50}))
        await until(lambda: len(target.of("span")) == 1)
        ending = asyncio.create_task(running.server.stop())
        async with asyncio.timeout(5):
            while (await other.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
        refused = await other.post(PATH, json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        target.allow(None)
        whole = await stream
        assert whole.is_done
        assert len(whole.text()) == 50
        await ending


async def test_a_response_that_nobody_reads_ends_with_the_server() -> None:
    num_bytes = 64 << 20

    async def send_much(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(num_bytes)})

    server = http_server.HttpServer("127.0.0.1:0", send_much, http_server.TlsFiles())
    host, _, port = (await server.start()).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.closing(writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await asyncio.wait_for(reader.readline(), 5) == b"HTTP/1.1 200 OK\r\n"
        await server.stop()
        with pytest.raises(asyncio.IncompleteReadError):
            await asyncio.wait_for(reader.readexactly(num_bytes), 10)


async def test_connections_that_come_while_it_stops_are_closed() -> None:
    async def come(num_turns: int) -> None:
        server = http_server.HttpServer("127.0.0.1:0", lambda *_: None, http_server.TlsFiles())
        host, _, port = (await server.start()).rpartition(":")
        connecting = asyncio.create_task(asyncio.open_connection(host, int(port)))
        # It is accepted over some turns of the event loop.
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await server._server.shutdown()
        await server.stop()
        with contextlib.suppress(ConnectionError):
            reader, writer = await connecting
            # Sooner than one that sends no headers is closed anyway.
            with contextlib.closing(writer):
                assert await asyncio.wait_for(reader.read(), 5) == b""

    await asyncio.gather(*(come(num_turns) for num_turns in range(12)))


@pytest.mark.parametrize("address", ["8000", "localhost", ":8000", "host:port"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        http_server.HttpServer(address, lambda *_: None, http_server.TlsFiles())
    assert caught.value.field == "http_address"


async def test_an_address_in_use_is_named() -> None:
    taken = http_server.HttpServer("127.0.0.1:0", lambda *_: None, http_server.TlsFiles())
    address = await taken.start()
    with pytest.raises(Unavailable, match=address):
        await http_server.HttpServer(address, lambda *_: None, http_server.TlsFiles()).start()
    await taken.stop()
