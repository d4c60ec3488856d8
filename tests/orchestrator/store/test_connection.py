"""Scripts on a real Valkey server: many at once, unknown to the server, failing one by one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis.asyncio

from orchestrator.store.connection import RedisConnection
from outrider.errors import DataLoss, Unavailable
from tests.serving.certificates import Authority
from tests.serving.tls_front import tls_front

KEY_NAMES = ("session", "log", "deleted")
KEYS = tuple(f"{{tag}}:{name}" for name in KEY_NAMES)
APPEND = (1, 0, b"", 1_000_000, 1000, "", "")


@pytest.fixture
async def connection(session_store_url: str) -> AsyncIterator[RedisConnection]:
    connected = RedisConnection(session_store_url)
    yield connected
    await connected.close()


async def num_calls(client: redis.asyncio.Redis, command: str) -> int:
    known = (await client.info("commandstats")).get(f"cmdstat_{command}")
    return int(known["calls"]) if known else 0


async def test_calls_of_one_moment_are_answered_each(connection: RedisConnection) -> None:
    calls = [
        connection.run("append", tuple(f"{{{index}}}:{name}" for name in KEY_NAMES), *APPEND)
        if index % 2
        else connection.run("cancel", KEYS, "tenant", "")
        for index in range(150)
    ]
    results = await asyncio.gather(*calls)
    assert results == [[b"gone", 0, b"0"] if index % 2 else b"not_found" for index in range(150)]


async def test_scripts_that_the_server_forgot_are_loaded_once(connection: RedisConnection) -> None:
    await connection.client.script_flush()
    before = await num_calls(connection.client, "script|load")
    assert await asyncio.gather(*(connection.run("cancel", KEYS, "tenant", "") for _ in range(5))) == [b"not_found"] * 5
    assert await connection.run("cancel", KEYS, "tenant", "") == b"not_found"
    assert await num_calls(connection.client, "script|load") == before + 1


async def test_an_error_is_that_of_its_call(connection: RedisConnection) -> None:
    await connection.client.set("{wrong}:session", "no hash", ex=60)
    wrong = connection.run("append", ("{wrong}:session", "{wrong}:log"), *APPEND)
    right = connection.run("cancel", KEYS, "tenant", "")
    results = await asyncio.gather(wrong, right, return_exceptions=True)
    assert results[1] == b"not_found"
    assert isinstance(results[0], DataLoss)


async def test_a_caller_that_is_cancelled_leaves_the_others_alone(connection: RedisConnection) -> None:
    first = asyncio.create_task(connection.run("cancel", KEYS, "tenant", ""))
    second = asyncio.create_task(connection.run("cancel", KEYS, "tenant", ""))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == b"not_found"
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_server_that_is_away_is_every_callers_error() -> None:
    away = RedisConnection("redis://127.0.0.1:1/0")
    results = await asyncio.gather(*(away.run("cancel", KEYS, "t", "") for _ in range(3)), return_exceptions=True)
    assert all(isinstance(result, Unavailable) for result in results)
    await away.close()


async def test_no_caller_waits_for_ever(connection: RedisConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_bound_s", 0.1)

    async def hang(calls: object) -> list[object]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(connection, "_execute", hang)
    with pytest.raises(Unavailable, match="does not answer"):
        await connection.run("cancel", KEYS, "tenant", "")

    async def cancelled(calls: object) -> list[object]:
        raise asyncio.CancelledError

    monkeypatch.setattr(connection, "_execute", cancelled)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(connection.run("cancel", KEYS, "tenant", ""), 5)


async def test_tls_trusts_the_authority_that_the_url_names(session_store_url: str, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "right"), Authority(tmp_path / "wrong")
    plain = urlsplit(session_store_url)
    with tls_front(plain.port or 0, *authority.issue("redis")) as port:
        for file, problem in (
            (authority.file, None),
            (other.file, "not of an authority that is trusted"),
            (tmp_path / "missing.pem", "names cannot be read"),
        ):
            url = f"rediss://:{plain.password or ''}@localhost:{port}{plain.path}?ssl_ca_certs={file}"
            connection = RedisConnection(url)
            if problem is None:
                await connection.check()
            else:
                with pytest.raises(Unavailable, match=problem):
                    await connection.check()
            await connection.close()
