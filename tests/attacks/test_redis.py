"""What a Redis may hold or answer on purpose, and who may reach it."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis import exceptions

from orchestrator.store.sessions import NewRequest
from orchestrator.store.store import SessionStore
from outrider.errors import DataLoss, OutriderError, Overloaded, Unavailable
from outrider.local.valkey import EmbeddedValkey
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.serving.accepting import stop_accepting
from outrider.serving.status import peer_errors
from outrider.v1 import generation_pb2 as pb
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import Orchestrator, asking, orchestrating, tokens_of

PASSWORD = "a-password-of-its-own"


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(durable=False) as server:
        yield server


@pytest.fixture
def admin(valkey: EmbeddedValkey) -> Iterator[redis.Redis]:
    """A client that stays connected, whatever becomes of the server's password."""
    with redis.Redis.from_url(valkey.url, single_connection_client=True) as client:
        yield client
        client.config_set("requirepass", valkey.url.partition("@")[0].removeprefix("redis://:"))


def test_attack_19_the_embedded_valkey_serves_nobody_without_its_password() -> None:
    with EmbeddedValkey(durable=False) as server, EmbeddedValkey(durable=False) as another:
        with redis.Redis.from_url(server.url) as client:
            assert client.set("a", "1")
        for url in (f"redis://{server.address}/0", another.url_by(server.address)):
            with pytest.raises(exceptions.AuthenticationError), redis.Redis.from_url(url) as stranger:
                stranger.get("a")
        # What `ps` shows to every user.
        password = server.url.partition("@")[0].removeprefix("redis://:")
        assert len(password) >= 32
        assert password.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        server.kill()
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A state in which a server refuses, and what must be said of it.

    Attributes:
        begin: brings it about.
        end: ends it.
        problem: part of what is logged, and told to clients.
        error: what clients get.
        code: its gRPC code.
    """

    begin: Callable[[redis.Redis], object]
    end: Callable[[redis.Redis], object]
    problem: str
    error: type[OutriderError] = Unavailable
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE


def _lock(password: str) -> Callable[[redis.Redis], object]:
    def lock(admin: redis.Redis) -> None:
        admin.config_set("requirepass", password)
        # Connections that have shown the password before keep their rights.
        admin.client_kill_filter(_type="normal", skipme=True)

    return lock


def _demote(admin: redis.Redis) -> None:
    admin.replicaof("127.0.0.1", "1")


REFUSALS: Mapping[str, Refusal] = {
    "wrong password": Refusal(_lock("another"), _lock(PASSWORD), "user or password is wrong"),
    "replica": Refusal(_demote, lambda admin: admin.replicaof("NO", "ONE"), "it is a replica"),
    "full": Refusal(
        lambda admin: admin.config_set("maxmemory", "1"),
        lambda admin: admin.config_set("maxmemory", "0"),
        "out of memory",
        Overloaded,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ),
    "user without rights": Refusal(
        lambda admin: admin.acl_setuser("default", enabled=True, commands=["-@write"]),
        lambda admin: admin.acl_setuser("default", enabled=True, commands=["+@all"]),
        "its user lacks a permission",
    ),
}


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.01)


async def check_refused(orchestrator: Orchestrator, refusal: Refusal, caplog: pytest.LogCaptureFixture) -> None:
    """Asserts that nothing is served, that clients are told why, and that it was logged once."""
    await until(lambda: not orchestrator.watch.takes_writes)
    for _ in range(2):
        with pytest.raises(refusal.error, match=refusal.problem) as caught:
            await orchestrator.events(asking(max_tokens=2))
        assert PASSWORD not in caught.value.message and "127.0.0.1" not in caught.value.message
    await asyncio.sleep(0.1)  # two checks more
    (line,) = [record.getMessage() for record in caplog.records if "OUTRIDER_REDIS_URL" in record.getMessage()]
    assert refusal.problem in line
    assert PASSWORD not in caplog.text


@pytest.mark.parametrize("state", REFUSALS)
async def test_attack_15_a_redis_that_refuses_ends_readiness_and_is_named(
    state: str, valkey: EmbeddedValkey, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = REFUSALS[state]
    caplog.set_level(logging.INFO)
    admin.config_set("requirepass", PASSWORD)
    async with ScriptedTarget() as target:
        url = f"redis://:{PASSWORD}@{valkey.address}/0"
        async with orchestrating(url, (target,)) as orchestrator:
            assert orchestrator.watch.takes_writes
            refusal.begin(admin)
            try:
                await check_refused(orchestrator, refusal, caplog)
            finally:
                refusal.end(admin)
            await until(lambda: orchestrator.watch.takes_writes)
            assert len(tokens_of(await orchestrator.events(asking(max_tokens=2)))) == 2


async def test_attack_15_a_redis_that_wants_a_password_is_not_ready_from_the_start(
    valkey: EmbeddedValkey, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = Refusal(_lock(PASSWORD), _lock(""), "it requires a password")
    refusal.begin(admin)
    async with ScriptedTarget() as target, orchestrating(f"redis://{valkey.address}/0", (target,)) as orchestrator:
        async with grpc.aio.insecure_channel(orchestrator.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            asked = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"), timeout=10)
            assert (await asked.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            live = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))
            assert live.status == health_pb2.HealthCheckResponse.SERVING
            await check_refused(orchestrator, refusal, caplog)
            refusal.end(admin)
            assert (await asked.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert len(tokens_of(await orchestrator.events(asking(max_tokens=2)))) == 2


DAMAGES = (None, b"", b"x", b"-1", b"9" * 30, b"1e300", b"\xff", b"[]")
"""What stands in place of a field; None for nothing."""
CHECKED = (
    "created",
    "seed",
    "rule",
    "prompt_start",
    "prompt_len",
    "committed_len",
    "fencing_token",
    "state",
    "deadline",
)
OTHER_PARAMETERS = (
    {"max_tokens": "5"},
    {"max_tokens": 5.5},
    {"max_tokens": 10**400},
    {"logit_bias": [1]},
    {"logit_bias": {"-1": 1.0}},
    {"logit_bias": {"1": "x"}},
    {"stop": "abc"},
    {"stop": [1]},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [2**32]},
    {"ignore_eos": "yes"},
    {"temperature": None},
    {"unheard_of": 1},
)


async def reasons(orchestrator: Orchestrator, session_id: str) -> list[str]:
    """Returns how the calls on a session end: Get, Generate anew, again, resumed, Cancel."""

    async def get() -> object:
        return await orchestrator.session(session_id)

    async def cancel() -> object:
        with peer_errors():
            return await orchestrator.stub.CancelGeneration(pb.CancelGenerationRequest(session_id=session_id))

    def generate(request_id: str, offset: int | None = None) -> Callable[[], Awaitable[object]]:
        request = asking(session_id=session_id, request_id=request_id, resume_offset=offset, max_tokens=2)
        return lambda: orchestrator.events(request)

    found = []
    for call in (get, generate("another"), generate("first"), generate("first", 0), cancel):
        try:
            await call()
            found.append("OK")
        except OutriderError as error:
            found.append(error.reason)
            if isinstance(error, DataLoss):
                assert session_id in error.message and "127.0.0.1" not in error.message
    return found


async def delete(orchestrator: Orchestrator, session_id: str) -> None:
    with peer_errors():
        await orchestrator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))


# Every seventh of the table by default: each field is damaged in at least one of its eight ways.
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
async def test_attack_14_a_damaged_record_is_data_loss_and_can_be_deleted(
    valkey: EmbeddedValkey, admin: redis.Redis, caplog: pytest.LogCaptureFixture, step: int
) -> None:
    async with ScriptedTarget() as target, orchestrating(valkey.url, (target,)) as orchestrator:
        for ends in (True, False):
            admin.flushall()
            await orchestrator.events(asking(session_id="s", request_id="first", max_tokens=2))
            (key,), (log,) = admin.keys("*:session"), admin.keys("*:log")
            if not ends:
                admin.hset(key, mapping={"state": "running", "finish_reason": "", "deadline": "0"})
            whole, tokens = admin.hgetall(key), admin.get(log)
            parameters = json.loads(whole[b"parameters"])
            changed = [(name, value) for name in whole for value in DAMAGES]
            changed += [(b"parameters", json.dumps(parameters | other).encode()) for other in OTHER_PARAMETERS]
            for name, value in changed[::step]:
                admin.delete(key, log)
                admin.hset(key, mapping=whole)
                admin.set(log, tokens)
                admin.hdel(key, name) if value is None else admin.hset(key, name, value)
                found = await reasons(orchestrator, "s")
                assert "INTERNAL" not in found, (name, value, found)
                if name.decode() in (*CHECKED, "parameters"):
                    assert found[:4] == ["DATA_LOSS"] * 4, (name, value, found)
                await delete(orchestrator, "s")
                assert admin.keys("*:session") == admin.keys("*:log") == []
        assert len(tokens_of(await orchestrator.events(asking(session_id="s", max_tokens=2)))) == 2
    assert not [record for record in caplog.records if record.exc_info]


async def test_attack_14_keys_of_another_type_are_data_loss(valkey: EmbeddedValkey, admin: redis.Redis) -> None:
    others: tuple[Callable[[bytes], object], ...] = (
        lambda key: admin.set(key, "text"),
        lambda key: admin.hset(key, "a", "b"),
        lambda key: admin.rpush(key, "a"),
        lambda key: admin.zadd(key, {"a": 1}),
    )
    async with ScriptedTarget() as target, orchestrating(valkey.url, (target,)) as orchestrator:
        for kind in ("session", "log"):
            for other in others:
                admin.flushall()
                await orchestrator.events(asking(session_id="s", request_id="first", max_tokens=2))
                (key,) = admin.keys(f"*:{kind}")
                admin.delete(key)
                other(key)
                found = await reasons(orchestrator, "s")
                assert set(found) <= {"DATA_LOSS", "OK"} and found[0] == "DATA_LOSS", (kind, found)
                await delete(orchestrator, "s")
                assert not admin.exists(key)


async def test_attack_14_a_record_damaged_under_a_stream_ends_it_by_name(
    valkey: EmbeddedValkey, admin: redis.Redis
) -> None:
    store = SessionStore(valkey.url)
    request = NewRequest(
        tenant="t",
        session_id="s",
        request_id="a",
        fingerprint="f",
        model="m",
        tokenizer="t",
        parameters=SamplingParameters(seed=1),
        rule=AcceptanceRule.COUPLED,
        prompt=(1, 2, 3),
        expected_len=None,
        takes_over=False,
        must_exist=False,
        max_len=100,
    )
    try:
        for name in ("fencing_token", "committed_len", "state"):
            for value in DAMAGES:
                admin.flushall()
                begun = await store.begin(request)
                assert begun.lease is not None
                (key,) = admin.keys("*:session")
                admin.hdel(key, name) if value is None else admin.hset(key, name, value)
                with pytest.raises(DataLoss, match="session s"):
                    await store.append(begun.lease, 3, [4])
                if name == "fencing_token":
                    # Whether another one has the session cannot be seen, so nothing is written over it.
                    for call in (
                        store.renew(begun.lease),
                        store.restore(begun.record, begun.lease, 0, [1, 2, 3]),
                    ):
                        with pytest.raises(DataLoss, match="session s"):
                            await call
                else:
                    await store.restore(begun.record, begun.lease, 0, [1, 2, 3])
                    assert (await store.append(begun.lease, 3, [4])).length == 4
    finally:
        await store.close()


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """A server that gives one answer to whoever connects; yields its address."""

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            writer.write(answer)
            await writer.drain()

    async with await asyncio.start_server(answer_all, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await stop_accepting(server)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        # Valkey's own, which it gives to no caller on its own machine.
        (b"-DENIED Valkey is running in protected mode because protected mode is enabled\r\n", "protected mode"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no Redis"),
        (b"-ERR max number of clients reached\r\n", "does not answer"),
    ],
)
async def test_attack_15_a_server_that_takes_nobody_in_is_named(
    answer: bytes, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        answering(answer) as address,
        ScriptedTarget() as target,
        orchestrating(f"redis://{address}/0", (target,)) as orchestrator,
    ):
        await check_refused(orchestrator, Refusal(lambda _: None, lambda _: None, problem), caplog)
