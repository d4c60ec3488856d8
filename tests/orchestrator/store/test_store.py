"""The session store against a real Valkey server."""

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from orchestrator.settings import OrchestratorSettings
from orchestrator.store.connection import Durability, DurabilityLevel
from orchestrator.store.errors import SessionLost
from orchestrator.store.record import derived_session_id
from orchestrator.store.sessions import BeginOutcome, Begun, Lease, NewRequest, SessionEnd
from orchestrator.store.store import SessionStore
from outrider.errors import (
    DataLoss,
    DuplicateRequest,
    Fenced,
    InvalidArgument,
    ModelMismatch,
    OutriderError,
    Overloaded,
    RequestNotFound,
    SessionBusy,
    SessionNotFound,
    Unavailable,
)
from outrider.local.valkey import EmbeddedValkey
from outrider.parameters import AcceptanceRule, FinishReason, SamplingParameters

REQUEST = NewRequest(
    tenant="t",
    session_id="s",
    request_id="a",
    fingerprint="f",
    model="m",
    tokenizer="k",
    parameters=SamplingParameters(seed=2**64 - 1, logit_bias={3: -1.5}, stop=("x",), stop_token_ids=(7,)),
    rule=AcceptanceRule.COUPLED,
    prompt=(1, 2, 3),
    expected_len=None,
    takes_over=False,
    must_exist=False,
    max_len=1000,
)


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture
async def store(valkey: EmbeddedValkey) -> AsyncIterator[SessionStore]:
    raw(valkey).flushall()
    opened = SessionStore(valkey.url, lease_s=30.0)
    yield opened
    await opened.close()


def raw(valkey: EmbeddedValkey) -> redis.Redis:
    return redis.Redis.from_url(valkey.url)


def asked(**changes: object) -> NewRequest:
    return dataclasses.replace(REQUEST, **changes)  # type: ignore[arg-type]


async def leased(store: SessionStore, **changes: object) -> tuple[Begun, Lease]:
    begun = await store.begin(asked(**changes))
    assert begun.lease is not None
    return begun, begun.lease


async def test_a_session_from_begin_to_end(store: SessionStore) -> None:
    begun, lease = await leased(store)
    record = begun.record
    assert begun.outcome is BeginOutcome.NEW
    assert (record.prompt_start, record.prompt_len, record.committed_len) == (0, 3, 3)
    assert record.parameters == REQUEST.parameters
    assert await store.is_leased(record)
    assert (await store.append(lease, 3, [4, 2**32 - 1])).length == 5
    assert (await store.append(lease, 5, [6], FinishReason.STOP, "replica")).length == 6
    assert await store.read_tokens("t", "s", 0, 6) == [1, 2, 3, 4, 2**32 - 1, 6]
    assert await store.read_tokens("t", "s", 2, 4) == [3, 4]
    ended = await store.get("t", "s")
    assert ended is not None
    assert (ended.finish_reason, ended.target) == (FinishReason.STOP, "replica")
    assert not await store.is_leased(ended)


async def test_a_look_at_the_end_of_a_session(valkey: EmbeddedValkey, store: SessionStore) -> None:
    assert await store.read_end("t", "s") == SessionEnd(None, None)
    begun, lease = await leased(store)
    assert await store.read_end("t", "s") == SessionEnd(begun.record, 3)
    await store.append(lease, 3, [2**32 - 1], FinishReason.STOP)
    end = await store.read_end("t", "s")
    assert (end.length, end.last_token) == (4, 2**32 - 1)
    assert end.has_request("a") and not end.has_request("b")
    with raw(valkey) as other:
        (log,), (record,) = other.keys("*:log"), other.keys("*:session")
        other.delete(log)
        assert (await store.read_end("t", "s")).last_token is None
        other.lpush(log, "no text")
        with pytest.raises(DataLoss, match="session s"):
            await store.read_end("t", "s")
        # Without a record the log belongs to no session, and `begin` overwrites it.
        other.delete(record)
        assert await store.read_end("t", "s") == SessionEnd(None, None)
        await leased(store)


async def test_what_has_begun_brings_its_tokens(store: SessionStore) -> None:
    begun, lease = await leased(store)
    assert begun.token_ids == [1, 2, 3]
    await store.append(lease, 3, [4])
    begun, lease = await leased(store, takes_over=True, must_exist=True)
    assert begun.token_ids == [1, 2, 3, 4]
    await store.append(lease, 4, [5], FinishReason.LENGTH)
    assert (await store.begin(asked())).token_ids == [1, 2, 3, 4, 5]
    begun, _ = await leased(store, request_id="b", fingerprint="g", prompt=(6,))
    assert (begun.record.prompt_start, begun.token_ids) == (5, [6])
    await store.release(Lease("t", "s", begun.record.fencing_token, 1000))
    begun, _ = await leased(store, request_id="b", fingerprint="g", prompt=(6,))
    assert (begun.outcome, begun.token_ids) == (BeginOutcome.CONTINUED, [6])


async def test_the_same_request_again(store: SessionStore) -> None:
    _, lease = await leased(store)
    with pytest.raises(SessionBusy):
        await store.begin(asked())
    with pytest.raises(DuplicateRequest):
        await store.begin(asked(fingerprint="other"))
    await store.append(lease, 3, [4], FinishReason.LENGTH)
    again = await store.begin(asked())
    assert (again.outcome, again.lease) == (BeginOutcome.FINISHED, None)
    assert again.record.committed_len == 4


async def test_a_takeover_fences_the_older_lease(store: SessionStore) -> None:
    _, old = await leased(store)
    await store.append(old, 3, [4])
    begun, new = await leased(store, takes_over=True, must_exist=True)
    assert begun.outcome is BeginOutcome.CONTINUED
    assert begun.record.committed_len == 4
    assert new.fencing_token > old.fencing_token
    for change in (store.append(old, 4, [5]), store.renew(old)):
        with pytest.raises(Fenced):
            await change
    await store.release(old)
    assert (await store.append(new, 4, [5])).length == 5


async def test_a_released_lease_lets_the_request_go_on(store: SessionStore) -> None:
    _, old = await leased(store)
    await store.release(old)
    begun, new = await leased(store)
    assert begun.outcome is BeginOutcome.CONTINUED
    assert new.fencing_token > old.fencing_token


async def test_an_expired_lease_lets_the_request_go_on(valkey: EmbeddedValkey, store: SessionStore) -> None:
    brief = SessionStore(valkey.url, lease_s=0.05)
    _, old = await leased(brief)
    async with asyncio.timeout(5):
        while True:
            try:
                begun, _ = await leased(store)
                break
            except SessionBusy:
                await asyncio.sleep(0.01)
    assert begun.outcome is BeginOutcome.CONTINUED
    with pytest.raises(Fenced):
        await brief.append(old, 3, [4])
    await brief.close()


async def test_a_second_turn_appends_its_prompt(store: SessionStore) -> None:
    _, lease = await leased(store)
    with pytest.raises(SessionBusy):
        await store.begin(asked(request_id="b"))
    await store.append(lease, 3, [4], FinishReason.STOP)
    with pytest.raises(SessionBusy):
        await store.begin(asked(request_id="b", expected_len=3))
    begun, _ = await leased(store, request_id="b", prompt=(8, 9), expected_len=4)
    assert (begun.record.prompt_start, begun.record.prompt_len) == (4, 6)
    assert begun.record.created == (lease.fencing_token)
    assert await store.read_tokens("t", "s", 0, 6) == [1, 2, 3, 4, 8, 9]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"request_id": "b", "must_exist": True}, RequestNotFound),
        ({"session_id": "other", "must_exist": True}, SessionNotFound),
        ({"model": "other"}, ModelMismatch),
        ({"tokenizer": "other"}, ModelMismatch),
        ({"session_id": "long", "prompt": (1,) * 1000}, InvalidArgument),
    ],
)
async def test_what_cannot_begin(store: SessionStore, changes: dict[str, object], error: type[OutriderError]) -> None:
    _, lease = await leased(store)
    await store.release(lease)
    with pytest.raises(error):
        await store.begin(asked(**changes))


async def test_tenants_do_not_meet(store: SessionStore) -> None:
    await leased(store)
    begun, _ = await leased(store, tenant="u")
    assert begun.outcome is BeginOutcome.NEW
    assert await store.get("v", "s") is None
    with pytest.raises(SessionNotFound):
        await store.delete("v", "s")
    with pytest.raises(SessionNotFound):
        await store.cancel("v", "s")


async def test_a_repeated_append_succeeds_once(store: SessionStore) -> None:
    _, lease = await leased(store)
    for _ in range(3):
        assert (await store.append(lease, 3, [4, 5])).length == 5
    with pytest.raises(DataLoss):
        await store.append(lease, 3, [4, 6])
    with pytest.raises(DataLoss):
        await store.append(lease, 9, [4])
    assert await store.read_tokens("t", "s", 0, 5) == [1, 2, 3, 4, 5]


async def test_a_log_that_lost_tokens_is_noticed(store: SessionStore, valkey: EmbeddedValkey) -> None:
    _, lease = await leased(store)
    client = raw(valkey)
    (log,) = client.keys("*:log")
    client.set(log, client.get(log)[:-4])
    with pytest.raises(DataLoss):
        await store.append(lease, 3, [4])
    with pytest.raises(DataLoss):
        await store.begin(asked(takes_over=True))


async def test_cancelling(store: SessionStore) -> None:
    _, lease = await leased(store)
    with pytest.raises(RequestNotFound):
        await store.cancel("t", "s", "b")
    assert not await store.renew(lease)
    assert await store.cancel("t", "s", "a")
    assert await store.renew(lease)
    assert (await store.append(lease, 3, [4])).cancelled
    await store.append(lease, 4, [], FinishReason.CANCELLED)
    assert not await store.cancel("t", "s")


async def test_cancelling_what_nobody_runs_ends_it(store: SessionStore) -> None:
    _, lease = await leased(store)
    await store.release(lease)
    assert await store.cancel("t", "s")
    assert (await store.begin(REQUEST)).outcome is BeginOutcome.FINISHED


async def test_deleting(store: SessionStore) -> None:
    _, lease = await leased(store)
    await store.delete("t", "s")
    with pytest.raises(SessionNotFound):
        await store.append(lease, 3, [4])
    begun, _ = await leased(store)
    assert begun.record.created > lease.fencing_token
    assert begun.record.worker_key != dataclasses.replace(begun.record, created=lease.fencing_token).worker_key
    with pytest.raises(Fenced):
        await store.append(lease, 3, [4])


async def test_losing_everything_is_noticed(store: SessionStore, valkey: EmbeddedValkey) -> None:
    _, lease = await leased(store)
    raw(valkey).script_flush()
    assert (await store.append(lease, 3, [4])).length == 4
    raw(valkey).flushall()
    for change in (store.append(lease, 4, [5]), store.renew(lease)):
        with pytest.raises(SessionLost):
            await change


async def test_a_session_that_was_deleted_is_not_taken_for_lost(store: SessionStore) -> None:
    begun, lease = await leased(store)
    await store.delete("t", "s")
    for change in (store.append(lease, 3, [4]), store.renew(lease), store.restore(begun.record, lease, 0, [1, 2, 3])):
        with pytest.raises(SessionNotFound):
            await change
    # Until there is another one of the name, which fences it off.
    await leased(store)
    with pytest.raises(Fenced):
        await store.append(lease, 3, [4])


async def test_fault_27_the_owner_writes_a_lost_session_again(store: SessionStore, valkey: EmbeddedValkey) -> None:
    begun, lease = await leased(store)
    await store.append(lease, 3, [4, 5])
    before = await store.get("t", "s")
    raw(valkey).flushall()
    await store.restore(begun.record, lease, 0, [1, 2, 3, 4, 5])
    after = await store.get("t", "s")
    assert before is not None and after is not None
    assert dataclasses.replace(after, deadline=before.deadline) == before
    assert (await store.append(lease, 5, [6], FinishReason.LENGTH)).length == 6
    assert await store.read_tokens("t", "s", 0, 6) == [1, 2, 3, 4, 5, 6]
    # The same request again is the same, and another one is refused.
    assert (await store.begin(REQUEST)).outcome is BeginOutcome.FINISHED
    with pytest.raises(DuplicateRequest):
        await store.begin(asked(fingerprint="other"))


async def test_fault_23_lost_writes_are_appended_again_if_nothing_else_differs(
    store: SessionStore, valkey: EmbeddedValkey
) -> None:
    begun, lease = await leased(store)
    (log,), (session,) = raw(valkey).keys("*:log"), raw(valkey).keys("*:session")
    saved = raw(valkey).get(log), raw(valkey).hgetall(session)
    await store.append(lease, 3, [4, 5])

    def fail_over(older: int = 0) -> None:
        raw(valkey).set(log, saved[0])
        raw(valkey).hset(session, mapping={**saved[1], b"fencing_token": lease.fencing_token + older})

    for older in (0, -5):
        fail_over(older)
        with pytest.raises(DataLoss):
            await store.append(lease, 5, [6])
        await store.restore(begun.record, lease, 0, [1, 2, 3, 4, 5])
        assert (await store.append(lease, 5, [6])).length == 6
        raw(valkey).set(log, raw(valkey).get(log)[:20])
    # Only what is at hand can be written again, and only if the rest is what was committed.
    fail_over()
    raw(valkey).set(log, saved[0][:4])
    with pytest.raises(DataLoss):
        await store.restore(begun.record, lease, 2, [3, 4, 5])
    raw(valkey).set(log, b"\1\0\0\0\7\0\0\0")
    with pytest.raises(DataLoss):
        await store.restore(begun.record, lease, 0, [1, 2, 3, 4, 5])
    fail_over(older=1)
    with pytest.raises(Fenced):
        await store.restore(begun.record, lease, 0, [1, 2, 3, 4, 5])


async def test_sessions_expire(valkey: EmbeddedValkey, store: SessionStore) -> None:
    brief = SessionStore(valkey.url, ttl_s=0.05)
    _, lease = await leased(brief)
    async with asyncio.timeout(5):
        while await store.get("t", "s") is not None:
            await asyncio.sleep(0.01)
    with pytest.raises(SessionLost):
        await brief.append(lease, 3, [4])
    await brief.close()
    await leased(store)
    assert 86_000 < await store.expires_in_s("t", "s") <= 86_400


async def test_ids_cannot_name_other_keys(store: SessionStore, valkey: EmbeddedValkey) -> None:
    for session_id in ("a}:session", "{x}", "a\nb", "a:b", "*", "é" * 40):
        await leased(store, session_id=session_id)
    keys = [key.decode() for key in raw(valkey).scan_iter()]
    tags = [key[key.index("{") + 1 : key.index("}")] for key in keys]
    assert len(keys) == 12
    assert all(len(tag) == 64 and tags.count(tag) == 2 for tag in tags)
    assert derived_session_id("a", "b") != derived_session_id("a\0b", "")


async def test_two_owners_racing(store: SessionStore) -> None:
    _, first = await leased(store)
    _, second = await leased(store, takes_over=True)
    outcomes = await asyncio.gather(
        *(store.append(lease, 3, [token]) for lease, token in ((first, 8), (second, 9))), return_exceptions=True
    )
    assert isinstance(outcomes[0], Fenced)
    assert await store.read_tokens("t", "s", 3, 4) == [9]


async def test_a_restart_keeps_what_was_committed(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    server.start()
    store = SessionStore(server.url, timeout_s=0.3)
    try:
        _, lease = await leased(store)
        await store.append(lease, 3, [4])
        server.stop()
        started = time.monotonic()
        with pytest.raises(Unavailable):
            await store.append(lease, 4, [5])
        assert time.monotonic() - started < 3
        server.start()
        assert (await store.append(lease, 4, [5])).length == 5
    finally:
        await store.close()
        server.stop()


async def test_a_full_store_is_overloaded() -> None:
    with EmbeddedValkey(durable=False, max_memory_bytes=3_000_000) as server:
        store = SessionStore(server.url)
        with pytest.raises(Overloaded):
            for number in range(1000):
                await leased(store, session_id=f"s{number}", prompt=(1,) * 900)
        await store.close()


async def test_nothing_follows_the_end(store: SessionStore) -> None:
    _, lease = await leased(store)
    for _ in range(2):
        assert (await store.append(lease, 3, [4], FinishReason.STOP)).length == 4
    for change in (store.append(lease, 4, [5]), store.append(lease, 4, [], FinishReason.LENGTH)):
        with pytest.raises(Fenced):
            await change
    await store.renew(lease)
    ended = await store.get("t", "s")
    assert ended is not None
    assert (ended.committed_len, ended.finish_reason, ended.deadline) == (4, FinishReason.STOP, 0)


async def test_an_owner_that_slept_through_its_cancellation_adds_nothing(store: SessionStore) -> None:
    _, lease = await leased(store)
    await store.release(lease)
    assert await store.cancel("t", "s")
    assert await store.renew(lease)
    with pytest.raises(Fenced):
        await store.append(lease, 3, [4])
    assert (await store.append(lease, 3, [], FinishReason.CANCELLED)).length == 3
    assert await store.read_tokens("t", "s", 0, 3) == [1, 2, 3]


async def test_a_record_from_before_the_lease_is_data_loss(store: SessionStore, valkey: EmbeddedValkey) -> None:
    _, lease = await leased(store)
    (session,) = raw(valkey).keys("*:session")
    raw(valkey).hset(session, "fencing_token", lease.fencing_token - 1)
    for change in (store.append(lease, 3, [4]), store.renew(lease)):
        with pytest.raises(DataLoss):
            await change


async def test_a_log_without_its_record_is_not_continued(store: SessionStore, valkey: EmbeddedValkey) -> None:
    await leased(store)
    raw(valkey).delete(*raw(valkey).keys("*:session"))
    begun, lease = await leased(store, prompt=(8, 9))
    assert begun.outcome is BeginOutcome.NEW
    assert (await store.append(lease, 2, [7])).length == 3
    assert await store.read_tokens("t", "s", 0, 3) == [8, 9, 7]


async def test_reading_gives_all_or_an_error(store: SessionStore) -> None:
    await leased(store)
    assert await store.read_tokens("t", "s", 2, 2) == []
    with pytest.raises(DataLoss):
        await store.read_tokens("t", "s", 0, 4)
    with pytest.raises(DataLoss):
        await store.read_tokens("t", "s", 7, 9)
    assert await store.read_tokens("t", "other", 0, 1) == []


async def test_ids_that_join_to_the_same_text_are_apart(store: SessionStore) -> None:
    await leased(store, tenant="a\0b", session_id="c")
    assert await store.get("a", "b\0c") is None


async def test_a_server_that_takes_no_writes_is_unavailable(store: SessionStore, valkey: EmbeddedValkey) -> None:
    _, lease = await leased(store)
    raw(valkey).replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(Unavailable):
            await store.append(lease, 3, [4])
    finally:
        raw(valkey).replicaof("NO", "ONE")
    assert (await store.append(lease, 3, [4])).length == 4


async def test_a_hung_server_is_unavailable_within_the_bound(store: SessionStore, valkey: EmbeddedValkey) -> None:
    brief = SessionStore(valkey.url, timeout_s=0.2)
    _, lease = await leased(brief)
    os.kill(valkey.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        outcomes = await asyncio.gather(*(brief.append(lease, 3, [4]) for _ in range(100)), return_exceptions=True)
        assert time.monotonic() - started < 2
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
    finally:
        os.kill(valkey.pid, signal.SIGCONT)
    # Those that it had received it may run now: they are repetitions.
    assert (await brief.append(lease, 3, [4])).length == 4
    await brief.close()


async def test_a_crash_keeps_what_was_committed(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    server.start()
    store = SessionStore(server.url)
    try:
        _, lease = await leased(store)
        await store.append(lease, 3, [4])
        # While an earlier write is on its way to the disk, a server that syncs every second holds later ones back.
        async with asyncio.timeout(10):
            while raw(server).info("persistence")["aof_buffer_length"]:
                await asyncio.sleep(0.01)
        server.kill()
        server.start()
        assert await store.read_tokens("t", "s", 0, 4) == [1, 2, 3, 4]
        assert (await store.append(lease, 4, [5])).length == 5
    finally:
        await store.close()
        server.stop()


@pytest.mark.parametrize("is_connected", [False, True])
async def test_closing_leaves_no_connection_wherever_callers_left_their_calls(
    valkey: EmbeddedValkey, *, is_connected: bool
) -> None:
    kept = []
    for num_steps in range(25):
        closing = SessionStore(f"{valkey.url}?client_name=closing")
        if is_connected:
            await asyncio.gather(
                closing.connection.check(), closing.get("t", "s"), closing.cancel("t", "s"), return_exceptions=True
            )
        callers = [
            asyncio.create_task(call)
            for call in (closing.get("t", "s"), closing.connection.check(), closing.begin(asked()))
        ]
        for _ in range(num_steps):
            await asyncio.sleep(0)
        for caller in callers[:2]:
            caller.cancel()
        await closing.close()
        await asyncio.gather(*callers, return_exceptions=True)
        # Referred to, so that no garbage collection closes what it left open.
        kept.append(closing)
    for caller in (kept[0].connection.check(), kept[0].begin(asked())):
        with pytest.raises(Unavailable, match="closed"):
            await caller
    async with asyncio.timeout(5):
        while any(client["name"] == "closing" for client in raw(valkey).client_list()):
            await asyncio.sleep(0.01)


def test_another_server_on_the_port_is_not_taken_for_ones_own(valkey: EmbeddedValkey) -> None:
    with pytest.raises(Unavailable), EmbeddedValkey(port=valkey.port):
        pass
    assert raw(valkey).ping()


@pytest.mark.parametrize("level", list(DurabilityLevel), ids=lambda level: level.value)
async def test_a_write_counts_once_it_is_where_it_must_be(tmp_path: Path, level: DurabilityLevel) -> None:
    primary, replica = tmp_path / "primary", tmp_path / "replica"
    for folder in (primary, replica):
        folder.mkdir()
    with EmbeddedValkey(primary) as server, EmbeddedValkey(replica) as second:
        num = 0 if level is DurabilityLevel.NONE else 1
        store = SessionStore(server.url, timeout_s=1.0, durability=Durability(level, num, timeout_s=3.0))
        if num:
            hasty = SessionStore(server.url, timeout_s=1.0, durability=Durability(level, num, timeout_s=0.3))
            with pytest.raises(Unavailable, match="durable"):
                await hasty.begin(dataclasses.replace(REQUEST, session_id="alone"))
            await hasty.close()
            # By default a primary waits for further replicas for 5 s.
            raw(server).config_set("repl-diskless-sync-delay", 0)
            raw(second).config_set("masterauth", str(urlsplit(server.url).password))
            raw(second).replicaof("127.0.0.1", str(server.port))
            async with asyncio.timeout(20):
                while raw(server).info("replication").get("slave0", {}).get("state") != "online":
                    await asyncio.sleep(0.05)
        _, lease = await leased(store)
        assert (await store.append(lease, 3, [4])).length == 4
        if num:
            assert raw(second).strlen(raw(server).keys("*:log")[0]) in (12, 16)
        await store.close()


async def test_a_server_without_a_log_on_disk_cannot_promise_one() -> None:
    with EmbeddedValkey(durable=False) as server:
        store = SessionStore(server.url, durability=Durability(DurabilityLevel.DISK, timeout_s=0.2))
        with pytest.raises(Unavailable, match="appendonly"):
            await store.begin(REQUEST)
        await store.close()


@pytest.mark.parametrize(
    ("text", "level", "num"),
    [("none", "none", 0), ("disk", "disk", 0), ("disk:2", "disk", 2), ("replicas:16", "replicas", 16)],
)
def test_a_durability_says_where_and_at_how_many_replicas(text: str, level: str, num: int) -> None:
    durable = OrchestratorSettings(durability=text).durable
    assert (durable.level.value, durable.num_replicas) == (level, num)


@pytest.mark.parametrize("text", ["replicas", "replicas:0", "replicas:17", "none:1", "disk:", "disks", ""])
def test_replicas_must_be_some(text: str) -> None:
    with pytest.raises(ValueError, match="replicas:N, with N from 1 to 16"):
        OrchestratorSettings(durability=text)
