"""What any caller may try at the HTTP address."""

import asyncio
import itertools
import json
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from pydantic import BaseModel

from orchestrator.http import answer, guard, protocol
from orchestrator.http.bodies import ChatBody, CompletionBody
from orchestrator.http.server import HttpServer
from tests.orchestrator.api.test_servicer import saying, tokenizer_files
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import Orchestrator, orchestrating

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
GOOD: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 2},
    COMPLETIONS: {"prompt": "hello", "max_tokens": 2},
}
BODIES: Mapping[str, type[BaseModel]] = {CHAT: ChatBody, COMPLETIONS: CompletionBody}
# Of the processor: a wrong value must be refused within them, since nothing else of the process runs meanwhile.
STALL_S = 2.0


@pytest.fixture
async def sayer() -> AsyncIterator[ScriptedTarget]:
    async with ScriptedTarget(next_token=saying("one two. END of it. ")) as target:
        target.files = tokenizer_files()
        yield target


@pytest.fixture
async def orchestrator(session_store_url: str, sayer: ScriptedTarget) -> AsyncIterator[Orchestrator]:
    # On a busy machine 128 requests at once may keep the event loop from the store's answers for more than a second.
    async with orchestrating(session_store_url, (sayer,), http_address="127.0.0.1:0", redis_timeout_s=5.0) as running:
        yield running


@pytest.fixture
async def client(orchestrator: Orchestrator) -> AsyncIterator[httpx.AsyncClient]:
    async with orchestrator.http_client() as running:
        yield running


class Wire:
    """A connection whose bytes a test writes itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    def reset(self) -> None:
        self._writer.transport.abort()

    def end(self) -> None:
        """Sends nothing more, but goes on reading."""
        self._writer.write_eof()

    async def until(self, end: bytes) -> bytes:
        async with asyncio.timeout(10):
            return await self._reader.readuntil(end)

    async def rest(self) -> bytes:
        """Returns what comes until the server closes; empty where it resets the connection."""
        async with asyncio.timeout(10):
            try:
                return await self._reader.read()
            except ConnectionError:
                return b""


@asynccontextmanager
async def connected(orchestrator: Orchestrator, **more: Any) -> AsyncIterator[Wire]:
    host, _, port = orchestrator.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), **more)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


def request_of(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def asked(path: str = CHAT, **more: Any) -> bytes:
    return json.dumps({**GOOD[path], **more}).encode()


def num_connections(orchestrator: Orchestrator) -> int:
    """Returns how many connections of its HTTP address the orchestrator holds open, closed by their clients or not."""
    port = int(orchestrator.http_address.rpartition(":")[2])
    sockets = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    # A socket that no process holds any more has inode 0; 0A is the state of the one that listens.
    return sum(int(of[1][-4:], 16) == port and of[9] != "0" and of[3] != "0A" for of in sockets)


def num_running(orchestrator: Orchestrator) -> float | None:
    return orchestrator.registry.get_sample_value("outrider_num_requests_running")


async def until(condition: Any) -> None:
    """Returns once the condition holds, within 10 s."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def is_alive(client: httpx.AsyncClient) -> None:
    """Fails unless a chat is answered."""
    response = await client.post(CHAT, json=GOOD[CHAT])
    assert response.status_code == 200, response.text


async def refusal(client: httpx.AsyncClient, path: str, content: bytes, *statuses: int) -> dict[str, Any]:
    """Returns the error of a body that must be refused, and names a parameter."""
    began = time.process_time()
    response = await client.post(path, content=content, headers={"content-type": "application/json"})
    assert time.process_time() - began < STALL_S, content[:200]
    assert response.status_code in (statuses or (400,)), (content[:300], response.status_code, response.text[:300])
    error: dict[str, Any] = response.json()["error"]
    assert error["param"], (content[:300], error)
    assert len(error["message"]) < 1000
    return error


# Sizes and times.


async def test_attack_20_bodies_that_are_too_large(orchestrator: Orchestrator, client: httpx.AsyncClient) -> None:
    large = b" " * (guard.MAX_BODY_BYTES + 1)
    for path in (CHAT, "/tokenize", "/health/no/such/path"):
        response = await client.post(path, content=large, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert response.json()["error"]["param"] == "body"
    async with connected(orchestrator) as wire:
        wire.send(request_of(CHAT, b"", f"Content-Length: {1 << 60}", "Expect: 100-continue"))
        assert (await wire.rest()).startswith(b"HTTP/1.1 413")
    await is_alive(client)


async def test_attack_20_a_body_without_an_end_ends_its_connection(
    orchestrator: Orchestrator, client: httpx.AsyncClient
) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    async with connected(orchestrator) as wire:
        wire.send(request_of(CHAT, b"", "Transfer-Encoding: chunked"))
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(20):
                while True:
                    wire.send(chunk)
                    await wire.drain()
    await is_alive(client)


@pytest.mark.parametrize("refused", [False, True])
async def test_attack_20_a_body_that_comes_slowly_is_cut_off(
    orchestrator: Orchestrator, monkeypatch: pytest.MonkeyPatch, *, refused: bool
) -> None:
    monkeypatch.setattr(guard, "BODY_TIMEOUT_S", 0.3)
    headers = ("Origin: http://elsewhere.example",) if refused else ()
    async with connected(orchestrator) as wire:
        wire.send(request_of(CHAT, b"{", "Content-Length: 100", *headers))
        said = await wire.rest()
    assert said.startswith(b"HTTP/1.1 403" if refused else b"HTTP/1.1 408")


async def test_attack_20_headers_that_come_slowly_are_cut_off(
    orchestrator: Orchestrator, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol.BoundedProtocol, "header_timeout_s", 0.3)
    async with AsyncExitStack() as exits:
        wires = [await exits.enter_async_context(connected(orchestrator)) for _ in range(50)]
        for number, wire in enumerate(wires):
            wire.send(b"" if number % 2 else b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc")
        for wire in wires:
            assert not await wire.rest()
        # Those of a second request too, on a connection that has been served.
        late = await exits.enter_async_context(connected(orchestrator))
        late.send(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await late.until(b"}")
        late.send(b"GET /version HTTP/1.1\r\n")
        assert not await late.rest()
    await until(lambda: num_connections(orchestrator) == 0)
    await is_alive(client)


async def test_attack_20_headers_without_an_end_are_cut_off(
    orchestrator: Orchestrator, client: httpx.AsyncClient
) -> None:
    async with connected(orchestrator) as wire:
        wire.send(b"GET /version HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(10):
                while True:
                    wire.send(b"X-Header: " + b"x" * 1000 + b"\r\n")
                    await wire.drain()
    await is_alive(client)


# Contents.


async def test_attack_21_what_is_no_json(client: httpx.AsyncClient) -> None:
    for content in (
        b"",
        b"{",
        b"\xff\xfe{",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages": ' + b"[" * 2_000_000,
        b"null",
        b"[]",
        b"1",
        b'"x"',
    ):
        for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
            await refusal(client, path, content)
    await is_alive(client)


@pytest.mark.slow
async def test_attack_21_a_million_wrong_values_are_refused_at_the_first(client: httpx.AsyncClient) -> None:
    num = 1_000_000
    lists = {
        CHAT: ("messages", "stop_token_ids", "stop"),
        COMPLETIONS: ("prompt", "stop_token_ids", "stop"),
        "/tokenize": ("messages",),
        "/detokenize": ("tokens",),
    }
    for path, names in lists.items():
        for name, item in itertools.product(names, ("1.5", "{}", "[]", "[0.5]")):
            values = ",".join([item] * (num if len(item) < 3 else num // 2))
            if path == COMPLETIONS and name == "prompt" and item == "[]":
                continue
            fields = {**GOOD.get(path, {}), name: "@"}
            await refusal(client, path, json.dumps(fields).replace('"@"', f"[{values}]").encode())
    for path in (CHAT, COMPLETIONS):
        keys = {f"k{number}": 1 for number in range(200_000)}
        await refusal(client, path, asked(path, **keys))
        await refusal(client, path, asked(path, speculation=keys))
        await refusal(client, path, asked(path, logit_bias={key: "x" for key in keys}))
    parts = [{"type": "image"}] * 100_000
    await refusal(client, CHAT, asked(messages=[{"role": "user", "content": parts}]))
    await is_alive(client)


WRONG: tuple[Any, ...] = (
    True,
    -1,
    1.5,
    10**30,
    -(10**30),
    1e308,
    "",
    "x" * 2000,
    "a b\r\nc: d",
    "\x00\u202e🙂",
    [],
    [None],
    [[]],
    [{}],
    [-1],
    [10**30],
    {},
    {"a": {"b": [1]}},
    {"-1": 1},
    {"99999999999999999999": 1},
    {"1": 10**30},
    {"type": "json_object"},
)
NOT_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", "1" * 5000)


def _fields(body: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Yields the path of every field of a body, those of nested objects too, and of its neutral fields."""
    schema = body.model_json_schema()
    for name, field in schema["properties"].items():
        yield (name,)
        references = json.dumps(field).split('"#/$defs/')[1:]
        for reference in (reference.partition('"')[0] for reference in references):
            if name != "messages":
                yield from ((name, inner) for inner in schema["$defs"][reference]["properties"])
    for name in getattr(body, "neutral"):  # noqa: B009
        yield (name,)
    yield ("no_such_field",)


def _with(path: str, where: Sequence[str], value: Any) -> dict[str, Any]:
    body = {**GOOD[path], "request_id": None, "stream": False}
    inner: Any = value if len(where) == 1 else {where[1]: value}
    return {**body, where[0]: inner}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_attack_21_wrong_values_in_every_field(client: httpx.AsyncClient, path: str) -> None:
    num_refused = 0
    for where in _fields(BODIES[path]):
        values = [json.dumps(value) for value in WRONG] + list(NOT_NUMBERS)
        for value in values:
            content = json.dumps(_with(path, where, "@")).replace('"@"', value).encode()
            response = await client.post(path, content=content, headers={"content-type": "application/json"})
            # Some values are right for some fields, or name something that does not exist.
            assert response.status_code in (200, 400, 404), (content, response.status_code, response.text)
            if response.status_code != 200:
                num_refused += 1
                error = response.json()["error"]
                assert error["param"], (content, error)
    assert num_refused > 500
    await is_alive(client)


async def test_attack_21_every_field_of_a_message(client: httpx.AsyncClient) -> None:
    for name in ("role", "content", "name", "tool_calls", "refusal", "audio", "x"):
        for value in WRONG:
            response = await client.post(CHAT, json={"messages": [{"role": "user", "content": "a", name: value}]})
            assert response.status_code in (200, 400), (name, value, response.text)
            if response.status_code == 400:
                assert response.json()["error"]["param"].startswith("messages"), (name, value, response.text)


async def test_attack_21_variables_that_break_the_template(client: httpx.AsyncClient) -> None:
    nested: Any = 1
    for _ in range(150):
        nested = [nested]
    for variables in (
        {"messages": 1},
        {"messages": [{"role": "user", "content": "<|end|>"}]},
        {"add_generation_prompt": {"a": 1}},
        {"range": 1, "loop": 2, "self": 3, "raise_exception": 4, "strftime_now": "x"},
        {"not a name": 1, "": 2, "__class__": 3},
        {"x": nested},
        {"x": "<|end|>" * 1000},
        {"x": float("nan")},
        {f"k{number}": number for number in range(50_000)},
    ):
        content = json.dumps({**GOOD[CHAT], "chat_template_kwargs": variables}).encode()
        response = await client.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400), (str(variables)[:200], response.text)
        if response.status_code == 400:
            assert response.json()["error"]["param"] in ("chat_template_kwargs", "messages"), response.text
    await is_alive(client)


async def test_attack_21_choices_times_prompts_are_bounded(
    orchestrator: Orchestrator, client: httpx.AsyncClient
) -> None:
    for more in ({"n": 128, "prompt": ["a", "b"]}, {"prompt": ["a"] * 129}, {"prompt": [[1]] * 100_000}, {"n": 129}):
        error = await refusal(client, COMPLETIONS, asked(COMPLETIONS, **more))
        assert error["param"] in ("n", "prompt")
    response = await client.post(COMPLETIONS, json={**GOOD[COMPLETIONS], "n": 64, "prompt": ["a", "b"]})
    assert response.status_code in (200, 429), response.text
    await until(lambda: num_running(orchestrator) == 0)


# Headers.


async def test_attack_22_hosts_origins_and_content_types(
    orchestrator: Orchestrator, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    body = asked()
    length = f"Content-Length: {len(body)}"
    for host in (b"evil.example", b"[", b"[::1", b"[]", b"a:b:c", b"localhost@evil.example", b"\xff", b"", b"%5b"):
        async with connected(orchestrator) as wire:
            head = b"POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nConnection: close\r\n%s\r\n\r\n"
            wire.send(head % (CHAT.encode(), host, length.encode()) + body)
            said = await wire.rest()
            assert said.startswith(b"HTTP/1.1 4"), (host, said)
    for origin in ("http://evil.example", "null", "http://[", "http://localhost:1", "x" * 5000, "http://localhost@a"):
        async with connected(orchestrator) as wire:
            wire.send(request_of(CHAT, body, f"Origin: {origin}", "Connection: close"))
            said = await wire.rest()
            assert said.startswith(b"HTTP/1.1 403"), (origin, said)
            assert b"access-control-allow-origin" not in said.lower()
    for kind in ("text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx"):
        response = await client.post(CHAT, content=body, headers={"content-type": kind})
        assert response.status_code == 415
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    await is_alive(client)


async def test_attack_22_positions_that_are_none(client: httpx.AsyncClient) -> None:
    for position in (
        "x",
        ":",
        "chatcmpl-",
        "chatcmpl-:0",
        "chatcmpl-a:-1",
        "chatcmpl-a:1,",
        "chatcmpl-a:99999999999999",
        "chatcmpl-a b:1",
        "cmpl-a:1",
        "chatcmpl-a:" + "1," * 5000,
        "chatcmpl-" + "a" * 5000 + ":1",
        "chatcmpl-\u00e9:1",
        "chatcmpl-never-begun:7",
        "chatcmpl-a:\u00b2",
    ):
        response = await client.post(CHAT, json=GOOD[CHAT], headers={"last-event-id": position.encode("latin-1")})
        assert response.status_code in (400, 404), (position[:50], response.text)
        assert response.json()["error"]["param"] in ("Last-Event-ID", "request_id"), response.text[:300]
    for seconds in ("x", "0", "-1", "nan", "inf", "1e9"):
        response = await client.post(CHAT, json=GOOD[CHAT], headers={"x-request-timeout": seconds})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "X-Request-Timeout"
    for name in ("a b", "a\r\nX-Evil: 1", "é", "", "a" * 129):
        for field in ("request_id", "session_id"):
            response = await client.post(CHAT, json={**GOOD[CHAT], field: name})
            assert response.status_code == 400, (field, name, response.text)
            assert response.json()["error"]["param"] == field


# Connections.


async def test_attack_23_a_reader_that_takes_nothing_is_cut_off(
    session_store_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bind = HttpServer._bind

    def bind_with_small_buffers(server: HttpServer) -> socket.socket:
        listener = bind(server)
        # Else the kernel takes megabytes of a stream before it is full.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(HttpServer, "_bind", bind_with_small_buffers)
    monkeypatch.setattr(answer, "_READER_TIMEOUT_S", 0.3)
    async with ScriptedTarget(next_token=saying("one two. ")) as target:
        target.files = tokenizer_files()
        target.info.max_session_len = 100_000
        more = {"http_address": "127.0.0.1:0", "max_active_requests": 3, "max_queued_requests": 0}
        async with orchestrating(session_store_url, (target,), **more) as orchestrator, AsyncExitStack() as exits:
            url = f"http://{orchestrator.http_address}"
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                await is_alive(client)
            body = asked(max_tokens=60_000, stream=True, speculation={"report": True})
            host, _, port = orchestrator.http_address.rpartition(":")
            for _ in range(3):
                connection = exits.enter_context(socket.socket())
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect((host, int(port)))
                connection.sendall(request_of(CHAT, body))
            await target.saw("open", 4)
            await until(lambda: num_running(orchestrator) == 0)
            await target.saw("close", 4)
            # Their connections are gone too.
            await until(lambda: num_connections(orchestrator) == 0)
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                await is_alive(client)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


PHASES = ("connect", "line", "headers", "body", "sent", "stream")


@pytest.mark.parametrize("phase", PHASES)
async def test_attack_23_connections_that_reset_at_once(
    orchestrator: Orchestrator,
    client: httpx.AsyncClient,
    caplog: pytest.LogCaptureFixture,
    phase: str,
) -> None:
    request = request_of(CHAT, asked(max_tokens=200, stream=True))
    parts = {"connect": 0, "line": 20, "headers": 60, "body": len(request) - 3}

    async def strike() -> None:
        async with connected(orchestrator) as wire:
            wire.send(request[: parts.get(phase, len(request))])
            await wire.drain()
            if phase == "stream":
                await wire.until(b"\r\n\r\n")
            wire.reset()

    for _ in range(10):
        await asyncio.gather(*(strike() for _ in range(20)))
    await until(lambda: num_running(orchestrator) == 0)
    await until(lambda: num_connections(orchestrator) == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    await is_alive(client)


async def test_attack_23_idle_connections(
    orchestrator: Orchestrator, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 60)
    monkeypatch.setattr(protocol.BoundedProtocol, "header_timeout_s", 2.0)
    async with AsyncExitStack() as exits:
        for _ in range(200):
            await exits.enter_async_context(connected(orchestrator))
        # Those beyond the bound have ended at once, the others do so within the time for headers.
        await until(lambda: num_connections(orchestrator) <= 60)
        await until(lambda: num_connections(orchestrator) == 0)
        await is_alive(client)


async def test_attack_23_a_half_closed_connection_counts_as_left(
    orchestrator: Orchestrator, sayer: ScriptedTarget, client: httpx.AsyncClient
) -> None:
    for body in (asked(max_tokens=200, stream=True), asked(max_tokens=200)):
        for cut in (10, 80, -3, None):
            async with connected(orchestrator) as wire:
                wire.send(request_of(CHAT, body)[:cut])
                await wire.drain()
                wire.end()
                await wire.rest()
    await until(lambda: num_running(orchestrator) == 0)
    await until(lambda: num_connections(orchestrator) == 0)
    await is_alive(client)


async def test_attack_23_what_is_no_tls(
    session_store_url: str,
    sayer: ScriptedTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(asyncio.constants, "SSL_HANDSHAKE_TIMEOUT", 0.5)
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(certificate)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    hello = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        trust.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="127.0.0.1").do_handshake()
    first = hello.read()
    settings = {"http_address": "127.0.0.1:0", "tls_certificate": certificate, "tls_key": key}
    async with (
        AsyncExitStack() as exits,
        orchestrating(session_store_url, (sayer,), **settings) as orchestrator,
        httpx.AsyncClient(base_url=f"https://{orchestrator.http_address}", verify=trust) as client,
    ):
        await is_alive(client)
        # Plain text, noise, half a greeting, a whole one without what follows, and nothing; reset, closed or idle.
        for data in (request_of(CHAT, asked()), b"\x16\x03\x01\xff\xff" + b"\x00" * 70_000, first[:50], first, b""):
            for end in (Wire.reset, Wire.end, None):
                wire = await exits.enter_async_context(connected(orchestrator))
                wire.send(data)
                with suppress(ConnectionError):
                    await wire.drain()
                    if end is not None:
                        end(wire)
                    await wire.rest()
        await until(lambda: num_connections(orchestrator) == 1)  # that of the client
        await is_alive(client)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_attack_23_pipelined_requests(orchestrator: Orchestrator, client: httpx.AsyncClient) -> None:
    num = 300
    async with connected(orchestrator) as wire:
        wire.send(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * num)
        for _ in range(num):
            assert b"200 OK" in await wire.until(b"}")
        # Behind a stream, and left.
        wire.send(request_of(CHAT, asked(max_tokens=200, stream=True)) * 20)
        await wire.until(b"\r\n\r\n")
        wire.reset()
    await until(lambda: num_running(orchestrator) == 0)
    await is_alive(client)
