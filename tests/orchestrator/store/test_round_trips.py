"""Round trips to Redis until a request's first frame leaves, and answers without any target."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from orchestrator.store.record import SessionRecord
from outrider.errors import DuplicateRequest, InvalidArgument, Overloaded, Unavailable
from outrider.serving.accepting import stop_accepting
from outrider.serving.status import peer_errors
from outrider.v1 import generation_pb2 as pb
from tests.orchestrator.api.test_servicer import new_id, saying, tokenizer_files
from tests.orchestrator.scripted import ScriptedTarget, continuation
from tests.orchestrator.stage import PROMPT, Orchestrator, asking, orchestrating, text_of, tokens_of, until

WHOLE = continuation(PROMPT, 20)
TOKEN = (("authorization", "Bearer token-of-a-tenant"),)


class Gate:
    """Relays connections to a Redis, and while it is shut holds back all that is about a session or a tenant.

    What is held at one moment was sent without an answer to any of the others: it is one round trip.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._place = parts.hostname, parts.port
        self._user = parts.netloc.rpartition("@")[0]
        self._held: dict[asyncio.StreamWriter, bytes] = {}
        self._is_shut = False
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Gate"]:
        listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        self.url = f"redis://{self._user}@127.0.0.1:{port}/0"
        try:
            yield self
        finally:
            self._is_closed = True
            await stop_accepting(listener)
            listener.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def shut(self) -> None:
        self._is_shut = True

    def open(self) -> None:
        self._is_shut = False
        self.let_through()

    async def held(self, num: int) -> bytes:
        """Returns all that is held, once it is of so many connections."""
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: len(self._held) >= num)
        assert len(self._held) == num
        return b"".join(self._held.values())

    def let_through(self) -> None:
        for writer, data in self._held.items():
            writer.write(data)
        self._held.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # asyncio logs an error for a connection's task that is cancelled, and for one that fails.
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
            # One that was accepted just before the end begins after it.
            if self._is_closed:
                return
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            far_reader, far_writer = await asyncio.open_connection(*self._place)
            with contextlib.closing(far_writer):
                await asyncio.gather(self._carry(reader, far_writer, True), self._carry(far_reader, writer, False))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_up: bool) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                # Connections are made, and the store is watched, beside requests.
                if is_up and (writer in self._held or (self._is_shut and b"outrider:{" in data)):
                    async with self._changed:
                        self._held[writer] = self._held.get(writer, b"") + data
                        self._changed.notify_all()
                else:
                    writer.write(data)


@pytest.fixture
async def gate(session_store_url: str) -> AsyncIterator[Gate]:
    async with Gate(session_store_url).running() as running:
        yield running


@pytest.fixture
async def limited(gate: Gate, target: ScriptedTarget, tmp_path: Path) -> AsyncIterator[Orchestrator]:
    """An orchestrator behind the gate, with one tenant, who may have one stream; it has served a request."""
    file = tmp_path / "tenants.json"
    tenant = {"tokens": ["token-of-a-tenant"], "max_streams": 1}
    file.write_text(json.dumps({tmp_path.name: tenant}))
    async with orchestrating(gate.url, (target,), tenants_file=file, redis_timeout_s=20) as running:
        await events_of(running, asking())
        yield running
        gate.open()


async def events_of(orchestrator: Orchestrator, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    with peer_errors():
        return [event async for event in orchestrator.stub.Generate(request, timeout=20, metadata=TOKEN)]


async def until_free(orchestrator: Orchestrator) -> None:
    """Returns once the tenant's one stream is free again, and another request has had it."""
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(Overloaded):
                await events_of(orchestrator, asking(max_tokens=1))
                return


async def until_unleased(orchestrator: Orchestrator, tenant: str, session_id: str) -> SessionRecord | None:
    """Returns the session's record, if it has one, once nobody holds its lease."""
    store = orchestrator.store
    async with asyncio.timeout(10):
        while (record := await store.get(tenant, session_id)) and await store.is_leased(record):
            await asyncio.sleep(0.01)
    return record


async def begun(
    orchestrator: Orchestrator, target: ScriptedTarget, tenant: str, kind: str
) -> tuple[pb.GenerateRequest, list[int]]:
    """Returns a request, and the tokens that must come of it."""
    session_id, request_id = new_id(), new_id()
    if kind == "new session":
        return asking(session_id=session_id), WHOLE
    if kind == "further turn":
        await events_of(orchestrator, asking(session_id=session_id))
        return asking([8, 9], session_id=session_id), continuation([*PROMPT, *WHOLE, 8, 9], 20)
    target.allow(7)
    call = orchestrator.stub.Generate(asking(session_id=session_id, request_id=request_id), metadata=TOKEN)
    events = []
    while len(tokens_of(events)) < 7:
        events.append(await call.read())
    call.cancel()
    target.allow(None)
    await until_free(orchestrator)
    # The lease is released beside that.
    await until_unleased(orchestrator, tenant, session_id)
    return asking(session_id=session_id, request_id=request_id, resume_offset=5), WHOLE[5:]


@pytest.mark.parametrize("kind", ["new session", "further turn", "resumed"])
async def test_two_round_trips_lead_to_the_first_frame(
    gate: Gate, limited: Orchestrator, target: ScriptedTarget, tmp_path: Path, kind: str
) -> None:
    request, expected = await begun(limited, target, tmp_path.name, kind)
    num_before = len(target.of("open"))
    gate.shut()
    running = asyncio.create_task(events_of(limited, request))
    first = await gate.held(2)
    assert b"HGETALL" in first and b":streams" in first
    gate.let_through()
    await gate.held(1)
    assert len(target.of("open")) == num_before
    gate.let_through()
    # Redis answers no call from here on.
    await target.saw("open", num_before + 1)
    gate.open()
    assert tokens_of(await running) == expected


@pytest.mark.parametrize("num_passed", [0, 1])
async def test_attack_05_a_client_that_leaves_at_either_round_trip_leaves_nothing(
    gate: Gate, limited: Orchestrator, tmp_path: Path, num_passed: int
) -> None:
    session_id = new_id()
    gate.shut()
    call = limited.stub.Generate(asking(session_id=session_id), metadata=TOKEN)
    await gate.held(2)
    if num_passed:
        gate.let_through()
        await gate.held(1)
    call.cancel()
    # On the same connection, so the server has heard of the cancellation before.
    await limited.stub.ListModels(pb.ListModelsRequest(), metadata=TOKEN)
    gate.open()
    await until_free(limited)
    record = await until_unleased(limited, tmp_path.name, session_id)
    assert (record is not None) == (num_passed == 1)


@pytest.mark.parametrize("files", [{}, tokenizer_files()], ids=["token ids", "text"])
async def test_a_finished_request_is_repeated_without_a_target(session_store_url: str, files: dict[str, bytes]) -> None:
    async with (
        ScriptedTarget(next_token=saying("one 🙂 two. END of it. ")) as target,
        orchestrating(session_store_url, (target,), failover_timeout_s=0.3) as orchestrator,
        orchestrating(session_store_url, (target,), failover_timeout_s=0.3) as stranger,
    ):
        target.files = files
        request = asking(request_id=new_id(), max_tokens=23)
        events = await orchestrator.events(request)
        await target.die()
        await until(lambda: not any(one.replicas.targets[0].is_up for one in (orchestrator, stranger)))
        again = await orchestrator.events(request)
        assert again[0] == events[0]
        assert (tokens_of(again), text_of(again)) == (tokens_of(events), text_of(events))
        assert again[-1].finished.finish_reason == events[-1].finished.finish_reason
        request.resume_offset = 20
        assert tokens_of(await orchestrator.events(request)) == tokens_of(events)[20:]
        request.resume_offset = 24
        with pytest.raises(InvalidArgument):
            await orchestrator.events(request)
        with pytest.raises(DuplicateRequest):
            await orchestrator.events(asking([1], request_id=request.request_id, max_tokens=23))
        # What is not finished needs a target; so does a text whose tokenizer was never fetched here.
        request.resume_offset = 20
        for one, wanted in ((orchestrator, asking()), (stranger, request)):
            with pytest.raises(Unavailable, match="no target is available"):
                await one.events(wanted)


async def test_requests_that_come_together_are_spread_over_the_targets(session_store_url: str) -> None:
    async with (
        ScriptedTarget("a") as one,
        ScriptedTarget("b") as other,
        orchestrating(session_store_url, (one, other)) as orchestrator,
    ):
        await until(lambda: all(link.is_up for link in orchestrator.replicas.targets))
        for target in (one, other):
            target.allow(0)
        running = [asyncio.create_task(orchestrator.events(asking())) for _ in range(6)]
        opened = [len(await target.saw("open", 3)) for target in (one, other)]
        assert opened == [3, 3]
        for target in (one, other):
            target.allow(None)
        assert [tokens_of(events) for events in await asyncio.gather(*running)] == [WHOLE] * 6
