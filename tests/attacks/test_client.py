"""Attacks of any client on an orchestrator: what it holds, how often, and when it lets go."""

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from orchestrator.api.quotas import Quotas
from orchestrator.api.tenants import Tenant, Tenants
from orchestrator.store.store import SessionStore
from orchestrator.workers.replicas import Replicas
from outrider.errors import InvalidArgument, Overloaded, SessionNotFound, Unauthenticated
from outrider.serving import interceptor
from outrider.serving.server import Server
from outrider.serving.settings import ServingSettings
from outrider.serving.status import error_from_rpc, peer_errors
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationServiceStub
from outrider.v1.target_pb2_grpc import add_TargetServiceServicer_to_server
from target_service.servicer import TargetServicer
from tests.draft_service.conftest import ngram_drafter, running_draft
from tests.orchestrator.api.test_servicer import new_id, tokenizer_files
from tests.orchestrator.scripted import ScriptedTarget, continuation
from tests.orchestrator.stage import PROMPT, Orchestrator, asking, orchestrating, tokens_of
from tests.target_service.conversation import target as target_engine

TOKEN = "token-of-a-tenant"
# Without probing for bandwidth the transport holds no more than this for a reader, and its own buffers.
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 12))


@pytest.fixture
async def guarded(session_store_url: str, target: ScriptedTarget, tmp_path: Path) -> AsyncIterator[Orchestrator]:
    """An orchestrator with one tenant, who may have five streams at once."""
    file = tmp_path / "tenants.json"
    file.write_text(json.dumps({tmp_path.name: {"tokens": [TOKEN], "max_streams": 5}}))
    async with orchestrating(session_store_url, (target,), tenants_file=file) as running:
        yield running


def bearing(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def until(condition: object) -> None:
    """Returns once the condition holds, within 10 s."""
    async with asyncio.timeout(10):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_attack_02_streams_that_never_read_lose_their_places(
    session_store_url: str, target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptor, "_READER_TIMEOUT_S", 0.3)
    target.info.max_session_len = 100_000
    async with (
        orchestrating(session_store_url, (target,), max_active_requests=3, max_queued_requests=0) as orchestrator,
        grpc.aio.insecure_channel(orchestrator.address, NARROW) as channel,
    ):
        endless = [asking(request_id=new_id(), max_tokens=60_000) for _ in range(3)]
        calls = [GenerationServiceStub(channel).Generate(request) for request in endless]
        events = [aiter(call) for call in calls]
        accepted = [await anext(event) for event in events]
        with pytest.raises(Overloaded):
            await orchestrator.events(asking())
        running = orchestrator.registry
        await until(lambda: running.get_sample_value("outrider_num_requests_running") == 0)
        assert running.get_sample_value("outrider_requests_total", {"outcome": "OVERLOADED"}) == 4
        # Others have the places, the targets are free of the sessions, and no lease is left.
        assert tokens_of(await orchestrator.events(asking())) == continuation(PROMPT, 20)
        await target.saw("close", 4)
        for event in accepted:
            session_id = event.accepted.session_id
            async with asyncio.timeout(10):
                while (await orchestrator.session(session_id)).leased:
                    await asyncio.sleep(0.01)
        # Whoever reads on gets what had been sent, the name of the error, and by its offset the rest.
        late, error = await drained(events[0])
        assert isinstance(error, Overloaded)
        begun = tokens_of(late)
        assert 0 < len(begun) < 60_000
        resumed = asking(request_id=endless[0].request_id, max_tokens=60_000, resume_offset=len(begun))
        rest = orchestrator.stub.Generate(resumed)
        await rest.read()
        delta = (await rest.read()).delta
        assert delta.offset == len(begun)
        assert [*begun, *delta.token_ids] == continuation(PROMPT, len(begun) + len(delta.token_ids))
        for call in (*calls, rest):
            call.cancel()


async def drained(rest: AsyncIterator[pb.GenerateResponse]) -> tuple[list[pb.GenerateResponse], Exception]:
    events = []
    try:
        async for event in rest:
            events.append(event)
    except grpc.aio.AioRpcError as error:
        return events, error_from_rpc(error)
    raise AssertionError("the stream ended well")


async def test_attack_02_a_reader_that_is_slow_keeps_its_stream(
    session_store_url: str, target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptor, "_READER_TIMEOUT_S", 1.0)
    target.info.max_session_len = 100_000
    async with (
        orchestrating(session_store_url, (target,)) as orchestrator,
        grpc.aio.insecure_channel(orchestrator.address, NARROW) as channel,
    ):
        call = GenerationServiceStub(channel).Generate(asking(max_tokens=4_000))
        events = []
        async for event in call:
            events.append(event)
            if len(events) % 250 == 0:
                await asyncio.sleep(0.1)
        assert len(tokens_of(events)) == 4_000


@pytest.mark.parametrize("seed", range(3))
async def test_attack_05_streams_cancelled_at_any_moment_are_counted_no_more(guarded: Orchestrator, seed: int) -> None:
    rng = random.Random(seed)
    calls = []
    for _ in range(60):
        calls.append(guarded.stub.Generate(asking(session_id=new_id()), metadata=bearing(TOKEN)))
        await asyncio.sleep(rng.random() * 0.004)
        calls[rng.randrange(len(calls))].cancel()
    for call in calls:
        call.cancel()
    # All five places are free at once, not when the counts expire after a minute.
    async with asyncio.timeout(5):
        while True:
            running = [guarded.stub.Generate(asking(), metadata=bearing(TOKEN)) for _ in range(5)]
            results = await asyncio.gather(*(drained_well(call) for call in running))
            if all(results):
                break
            await asyncio.sleep(0.05)


async def drained_well(call: "grpc.aio.UnaryStreamCall") -> bool:
    try:
        return len(tokens_of([event async for event in call])) == 20
    except grpc.aio.AioRpcError as error:
        assert isinstance(error_from_rpc(error), Overloaded)
        return False


async def test_attack_05_a_cancel_while_a_place_is_being_taken(session_store_url: str) -> None:
    store = SessionStore(session_store_url)
    quotas, tenant = Quotas(store.connection, 100), Tenant(name=new_id(), max_streams=1)
    for num_turns in range(12):

        async def hold() -> None:
            async with quotas.stream(tenant, "session"):
                await asyncio.Event().wait()

        holder = asyncio.create_task(hold())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        holder.cancel()
        await asyncio.wait((holder,))
        await quotas.settle()
        async with quotas.stream(tenant, "session"):
            pass
    await store.close()


async def test_attack_05_a_cancel_while_a_session_is_being_leased(
    session_store_url: str, target: ScriptedTarget
) -> None:
    async with orchestrating(session_store_url, (target,), lease_s=60) as orchestrator:
        for number in range(30):
            session_id = new_id()
            call = orchestrator.stub.Generate(asking(session_id=session_id))
            await asyncio.sleep(number * 0.0002)
            call.cancel()
            async with asyncio.timeout(5):
                with contextlib.suppress(SessionNotFound):
                    while (await orchestrator.session(session_id)).leased:
                        await asyncio.sleep(0.005)


BAD = {"garbage": b"\xff" * 40, "truncated": b"\x0a\xff\xff\xff\xff\x0f", "no UTF-8": b"\x12\x02\xff\xfe"}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
async def test_attack_06_malformed_messages_are_named_behind_the_token(
    guarded: Orchestrator, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    service = "/outrider.v1.GenerationService"
    async with grpc.aio.insecure_channel(guarded.address) as channel:
        for _ in range(20):
            for name in ("GetSession", "CancelGeneration", "DeleteSession"):
                call = channel.unary_unary(f"{service}/{name}")
                if data == BAD["no UTF-8"]:
                    data = b"\x0a\x02\xff\xfe"
                with pytest.raises(Unauthenticated), peer_errors():
                    await call(data, timeout=5)
                with pytest.raises(InvalidArgument) as caught, peer_errors():
                    await call(data, timeout=5, metadata=bearing(TOKEN))
                assert caught.value.field == "request"
                assert "Error" not in caught.value.message
            with pytest.raises(InvalidArgument), peer_errors():
                await channel.unary_unary("/grpc.health.v1.Health/Check")(data, timeout=5)
        generate = channel.unary_stream(f"{service}/Generate")
        with pytest.raises(Unauthenticated), peer_errors():
            await generate(data, timeout=5).read()
        with pytest.raises(InvalidArgument), peer_errors():
            await generate(data, timeout=5, metadata=bearing(TOKEN)).read()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize("data", [b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f"], ids=["garbage", "truncated"])
async def test_attack_06_malformed_messages_end_the_stream_of_a_worker_with_a_name(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with target_engine() as (engine, _), running_draft(ngram_drafter()) as drafting:
        server = Server(ServingSettings(drain_budget_s=1.0), name="target")
        server.register(
            add_TargetServiceServicer_to_server,
            TargetServicer(engine.host, engine.max_len),
            "outrider.v1.TargetService",
        )
        async with grpc.aio.insecure_channel(await server.start()) as channel:
            for workers, method in (
                (channel, "/outrider.v1.TargetService/Verify"),
                (drafting.channel, "/outrider.v1.DraftService/Draft"),
            ):
                for _ in range(5):
                    # The second message: a stream that has begun.
                    call = workers.stream_stream(method)(iter([b"", data]), timeout=5)
                    with pytest.raises(InvalidArgument) as caught, peer_errors():
                        await call.read()
                    assert caught.value.field == "request"
            with pytest.raises(InvalidArgument), peer_errors():
                await drafting.channel.unary_unary("/outrider.v1.WorkerService/GetInfo")(data, timeout=5)
        await server.stop()
    # One for each server.
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 2


async def test_attack_17_nothing_is_told_without_a_token(guarded: Orchestrator) -> None:
    for bad_id in ("session", "no id at all"):
        for method, request in (
            (guarded.stub.GetSession, pb.GetSessionRequest(session_id=bad_id)),
            (guarded.stub.DeleteSession, pb.DeleteSessionRequest(session_id=bad_id)),
            (guarded.stub.CancelGeneration, pb.CancelGenerationRequest(session_id=bad_id)),
        ):
            with pytest.raises(Unauthenticated), peer_errors():
                await method(request)


async def test_attack_17_reflection_is_answered_where_the_settings_want_it() -> None:
    for wanted in (False, True):
        server = Server(ServingSettings(reflection=wanted), name="reflecting")
        async with grpc.aio.insecure_channel(await server.start()) as channel:
            reflect = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
            if wanted:
                assert await reflect(iter([b""])).read()
            else:
                # Nothing is sent: gRPC calls it INTERNAL where a call is answered while its request is being written.
                assert await reflect().code() is grpc.StatusCode.UNIMPLEMENTED
        await server.stop()


@pytest.mark.parametrize("content", ["{}", '{"acme": {}}', '{"acme": {"tokens": []}}'])
def test_attack_17_a_tenants_file_without_a_token_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tenants.json"
    file.write_text(content)
    with pytest.raises(InvalidArgument, match="no tenant with a token") as caught:
        Tenants(file)
    assert caught.value.field == "tenants_file"


async def test_a_slow_tokenizer_fetch_holds_up_only_those_who_need_it(
    session_store_url: str, target: ScriptedTarget
) -> None:
    target.files = tokenizer_files()
    async with orchestrating(session_store_url, (target,)) as orchestrator:
        replicas: Replicas = orchestrator.replicas
        await orchestrator.events(asking())
        (link,) = replicas.targets
        # Another tokenizer, which no target sends.
        target.is_tokenizer_silent = True
        link.info.tokenizer_fingerprint = "other"
        waiting = [asyncio.create_task(replicas.tokenizer(link)) for _ in range(3)]
        await until(lambda: target.num_fetches == 2)
        link.info.tokenizer_fingerprint = "t"
        async with asyncio.timeout(1):
            assert tokens_of(await orchestrator.events(asking())) == continuation(PROMPT, 20)
        # One caller that gives up leaves the others waiting, who share one fetch.
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        target.is_tokenizer_silent = False
        assert len({id(tokenizer) for tokenizer in await asyncio.gather(*waiting[1:])}) == 1
        assert target.num_fetches == 2
