import asyncio
from collections.abc import Sequence

import grpc
import pytest

from draft_service.engine.commands import AdvanceSession, Handle, Opened, OpenSession
from draft_service.engine.engine import Engine
from draft_service.engine.load import EngineLimits
from draft_service.servicer import DraftStream
from outrider.drafters.drafter import OpenProposal
from outrider.drafters.ngram import NgramDrafter
from outrider.errors import Draining, InvalidArgument, Overloaded
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.serving.frames import MAX_FRAMES_READ, FrameOutbox
from outrider.serving.status import peer_errors
from outrider.serving.stream_handle import StreamHandle
from outrider.tokens import MAX_PROPOSAL_NODES, Base, TokenSpan
from outrider.v1 import draft_pb2, tokens_pb2, worker_pb2
from tests.draft_service.conftest import (
    LIMITS,
    TIMEOUT_S,
    RunningDraft,
    advance_frame,
    close_frame,
    ngram_drafter,
    open_frame,
    running_draft,
    terms,
)


async def test_a_session_is_opened_advanced_and_closed(ngram_draft: RunningDraft) -> None:
    client = ngram_draft.stream()
    handle, opened = await client.open()
    assert opened.opened.cached_len == 0
    assert await client.drafted(handle, [1, 2, 3, 1]) == (2, 3, 1, 2)
    assert await client.drafted(handle, [2, 9], start=4) == ()
    assert await client.drafted(handle, [1], start=6, num=2) == (2, 9)
    await client.send(close_frame(handle))
    _, opened = await client.open(fencing_token=2)
    assert opened.opened.cached_len == 7


async def test_a_proposal_names_its_base(ngram_draft: RunningDraft) -> None:
    client = ngram_draft.stream()
    handle, _ = await client.open(fencing_token=7)
    await client.send(advance_frame(handle, [1, 2, 1], fencing_token=8))
    proposal = (await client.receive(handle)).proposal
    assert (proposal.base.len, proposal.base.fencing_token) == (3, 8)
    assert proposal.complete


async def test_no_more_is_proposed_than_is_of_use(ngram_draft: RunningDraft) -> None:
    client = ngram_draft.stream()
    handle, _ = await client.open(parameters=SamplingParameters(seed=1, max_tokens=5), prompt_len=2)
    assert await client.drafted(handle, [1, 1, 1, 1, 1], num=16) == (1, 1), "max_tokens ends at position 7"
    assert await client.drafted(handle, [1, 1], start=5) == ()
    assert await client.drafted(handle, [], start=5, num=0) == ()
    handle, _ = await client.open("long", prompt_len=4000)
    assert len(await client.drafted(handle, [1, 1, 1], num=2000)) == MAX_PROPOSAL_NODES
    assert await client.drafted(handle, [1] * 4092, start=3) == (1,), "max_session_len"


async def test_a_span_beyond_what_is_known_is_refused_and_replayed(ngram_draft: RunningDraft) -> None:
    client = ngram_draft.stream()
    handle, _ = await client.open()
    assert await client.drafted(handle, [1, 2, 1]) == (2, 1, 2, 1)
    await client.send(advance_frame(handle, [5, 6], start=10))
    refusal = await client.refusal(handle)
    assert (refusal.reason, dict(refusal.metadata)) == ("KV_CACHE_MISS", {"cached_len": "3"})
    assert await client.drafted(handle, [2, 2, 5, 2, 6, 2, 5], start=3) == (2, 6, 2, 5)


async def test_older_fencing_tokens_are_refused(ngram_draft: RunningDraft) -> None:
    old, new = ngram_draft.stream(), ngram_draft.stream()
    old_handle, _ = await old.open(fencing_token=5)
    assert await old.drafted(old_handle, [1, 2, 1], fencing_token=5) == (2, 1, 2, 1)
    new_handle, opened = await new.open(fencing_token=6)
    assert opened.opened.cached_len == 3
    await old.send(advance_frame(old_handle, [9], start=3, fencing_token=5))
    assert (await old.refusal(old_handle)).reason == "FENCED"
    assert await new.drafted(new_handle, [2], start=3, fencing_token=6) == (1, 2, 1, 2)
    await new.send(advance_frame(new_handle, [1], start=4, fencing_token=5))
    assert (await new.refusal(new_handle)).reason == "FENCED"
    _, refused = await old.open(fencing_token=5)
    assert refused.refusal.reason == "FENCED"
    load = await ngram_draft.worker.GetLoad(worker_pb2.GetLoadRequest())
    assert load.num_stale_messages == 3


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        (draft_pb2.DraftRequestFrame(handle=1), "frame"),
        (open_frame(1, ""), "session_id"),
        (open_frame(1, "x" * 1000), "session_id"),
        (open_frame(1, stop_token_ids=[2**32 - 1]), "stop_token_ids"),
        (open_frame(1, parameters=SamplingParameters()), "seed"),
        (open_frame(1, prediction=[2**32 - 1]), "prediction"),
        (open_frame(1, prediction=[1] * 5000), "prediction"),
        (advance_frame(9, [1], base_len=2), "base.len"),
        (advance_frame(9, []), "base.len"),
        (advance_frame(9, [1, 2**32 - 1]), "span.token_ids"),
        (advance_frame(9, [1] * 5000), "base.len"),
        (advance_frame(9, [1], start=2**32 - 2), "base.len"),
    ],
)
async def test_garbage_is_refused_by_field_and_ends_nothing(
    ngram_draft: RunningDraft, frame: draft_pb2.DraftRequestFrame, field: str
) -> None:
    client = ngram_draft.stream()
    await client.send(open_frame(9))
    assert (await client.receive(9)).opened.cached_len == 0
    await client.send(frame, advance_frame(9, [1, 2, 1]))
    refusal = await client.refusal(frame.handle)
    assert (refusal.reason, refusal.metadata["field"]) == ("INVALID_ARGUMENT", field)
    assert len(await client.proposal(9)) == 4


async def test_wrong_parameters_are_refused(ngram_draft: RunningDraft) -> None:
    client = ngram_draft.stream()
    frame = open_frame(1)
    frame.open.parameters.temperature = float("nan")
    await client.send(frame)
    assert (await client.refusal(1)).metadata["field"] == "temperature"
    frame = open_frame(2)
    frame.open.acceptance_rule = 77  # type: ignore[assignment]
    await client.send(frame)
    assert (await client.refusal(2)).metadata["field"] == "acceptance_rule"


async def test_frames_for_a_handle_that_is_not_open(ngram_draft: RunningDraft) -> None:
    client = ngram_draft.stream()
    await client.send(close_frame(3), advance_frame(3, [1]))
    assert (await client.refusal(3)).reason == "SESSION_NOT_FOUND"
    handle, _ = await client.open()
    await client.send(open_frame(handle, "other"))
    assert (await client.refusal(handle)).metadata["field"] == "handle"
    assert await client.drafted(handle, [1, 1], num=1) == (1,)


async def test_rejection_gets_the_law_that_was_sampled_from(ngram_draft: RunningDraft) -> None:
    client = ngram_draft.stream()
    handle, _ = await client.open(rule=AcceptanceRule.REJECTION)
    await client.send(advance_frame(handle, [4, 5, 4], num=1))
    [node] = await client.proposal(handle)
    assert node.draft_distribution is not None
    assert node.draft_distribution.token_ids == (5,)


async def test_the_end_of_a_stream_frees_its_sessions(ngram_draft: RunningDraft) -> None:
    broken, finished = ngram_draft.stream(), ngram_draft.stream()
    for client in (broken, finished):
        for number in range(5):
            await client.open(f"{id(client)}-{number}")
    assert ngram_draft.engine.load.num_active_sessions == 10
    broken.call.cancel()
    await ngram_draft.until(lambda: ngram_draft.engine.load.num_active_sessions == 5)
    await finished.call.done_writing()
    async with asyncio.timeout(TIMEOUT_S):
        assert await finished.call.read() is grpc.aio.EOF
    assert await finished.call.code() is grpc.StatusCode.OK
    await ngram_draft.until(lambda: ngram_draft.engine.load.num_active_sessions == 0)
    assert ngram_draft.engine.load.num_cached_sessions == 10


async def test_what_was_asked_before_the_end_of_a_stream_is_answered(ngram_draft: RunningDraft) -> None:
    client = ngram_draft.stream()
    await client.send(open_frame(1), advance_frame(7, [1]))
    await client.call.done_writing()
    assert (await client.receive(1)).WhichOneof("frame") == "opened"
    assert (await client.refusal(7)).reason == "SESSION_NOT_FOUND"


async def test_sessions_are_bounded() -> None:
    limits = EngineLimits(max_sessions=2, max_cached_sessions=2, idle_ttl_s=60)
    async with running_draft(ngram_drafter(), limits) as running:
        client = running.stream()
        handles = [(await client.open(name))[0] for name in "ab"]
        _, refused = await client.open("c")
        assert (refused.refusal.reason, "retry_after_s" in refused.refusal.metadata) == ("OVERLOADED", True)
        await client.send(close_frame(handles[0]))
        _, opened = await client.open("c")
        assert opened.WhichOneof("frame") == "opened"


async def test_a_draining_draft_opens_nothing_and_ends_its_streams() -> None:
    async with running_draft(ngram_drafter(), patience_s=2.0) as running:
        client = running.stream()
        handle, _ = await client.open()
        stopping = asyncio.create_task(running.server.stop())
        await running.until(lambda: running.engine.loop.is_draining)
        _, refused = await client.open("new")
        assert refused.refusal.reason == "DRAINING"
        assert await client.drafted(handle, [1, 1], num=1) == (1,)
        with pytest.raises(Draining), peer_errors():
            await client.receive(77)
        await stopping


async def test_info_and_load_and_no_tokenizer(ngram_draft: RunningDraft) -> None:
    info = await ngram_draft.worker.GetInfo(worker_pb2.GetInfoRequest())
    assert (info.role, info.drafter, info.model) == (worker_pb2.WORKER_ROLE_DRAFT, "ngram", "ngram")
    assert (info.replica, info.tokenizer_fingerprint, info.model_fingerprint) == ("draft-0", "", "")
    assert list(info.acceptance_rules) == ["coupled", "rejection"]
    assert info.incarnation and info.version
    client = ngram_draft.stream()
    handle, _ = await client.open()
    await client.drafted(handle, [1, 1, 1])
    load = await ngram_draft.worker.GetLoad(worker_pb2.GetLoadRequest())
    assert (load.num_active_sessions, load.num_cached_sessions, load.num_passes, load.num_tokens) == (1, 1, 1, 4)
    assert load.kv_used_bytes > 0
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ngram_draft.worker.GetTokenizer(worker_pb2.GetTokenizerRequest()).read()
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_many_sessions_on_one_stream_do_not_disturb_each_other(ngram_draft: RunningDraft) -> None:
    client = ngram_draft.stream()
    handles = range(100, 150)
    await client.send(*(open_frame(handle, f"s{handle}") for handle in handles))
    await client.send(*(advance_frame(handle, [handle, 1, handle, 2, handle]) for handle in handles))
    for handle in handles:
        assert (await client.receive(handle)).WhichOneof("frame") == "opened"
        assert [node.token_id for node in await client.proposal(handle)] == [2, handle, 2, handle]


async def test_a_message_of_too_many_frames_ends_its_stream_only(ngram_draft: RunningDraft) -> None:
    flood, other = ngram_draft.stream(), ngram_draft.stream()
    await flood.open("flood")
    frames = [draft_pb2.DraftRequestFrame()] * (MAX_FRAMES_READ + 1)
    await flood.send(*frames)
    with pytest.raises(InvalidArgument), peer_errors():
        await flood.receive(7)
    handle, _ = await other.open("other")
    assert await other.drafted(handle, [1, 1], num=1) == (1,)
    await ngram_draft.until(lambda: ngram_draft.engine.load.num_active_sessions == 1)


async def test_a_reader_that_is_too_slow_loses_its_stream() -> None:
    outbox = FrameOutbox(lambda frames: draft_pb2.DraftResponse(frames=frames), max_pending=2)
    stream = DraftStream(outbox)
    await asyncio.to_thread(stream.post, [Opened(1, 0), Opened(2, 0)])
    await asyncio.to_thread(stream.post, [Opened(3, 0)])
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        async for _ in outbox.messages():
            pass
    stream.post([Opened(4, 0)])
    assert len(outbox) == 0


async def test_an_engine_that_fails_says_so_and_does_not_keep_a_drain_waiting() -> None:
    failed = asyncio.Event()
    loop = asyncio.get_running_loop()

    class _Broken(NgramDrafter):
        def step(self, proposals: Sequence[OpenProposal]) -> int:
            raise ZeroDivisionError

    class _Nowhere:
        def post(self, replies: object) -> None:
            pass

        def end(self) -> None:
            pass

    handle: Handle = StreamHandle(_Nowhere(), 1)
    drafter = _Broken(shortest=1, longest=3, budget_bytes=1 << 24, max_session_len=4096)
    engine = Engine(drafter, LIMITS, lambda: loop.call_soon_threadsafe(failed.set))
    engine.loop.start()
    for command in (
        OpenSession(handle, "s", 1, terms()),
        AdvanceSession(handle, Base(1, 1), TokenSpan(0, (1,)), 1),
    ):
        await engine.loop.submit(handle.stream, command)
    async with asyncio.timeout(TIMEOUT_S):
        await failed.wait()
        await asyncio.wrap_future(engine.loop.drain())
    engine.loop.stop()


async def test_a_session_that_is_gone_is_forgotten_once_it_is_closed(ngram_draft: RunningDraft) -> None:
    client = ngram_draft.stream()
    handles = {}
    for session_id in ("open", "gone", "kept"):
        handles[session_id], _ = await client.open(session_id)
        await client.drafted(handles[session_id], [1, 2, 3, 1])
        if session_id != "open":
            await client.send(close_frame(handles[session_id]))
    gone = [tokens_pb2.ForgetSession(session_id=name) for name in ("gone", "open", "nobody")]
    await client.send(*(draft_pb2.DraftRequestFrame(forget=item) for item in gone))
    await ngram_draft.until(lambda: ngram_draft.engine.load.num_cached_sessions == 2)
    assert await client.drafted(handles["open"], [1, 2, 3, 1, 2]), "it drafts as long as it is open"
    await client.send(close_frame(handles["open"]))
    await ngram_draft.until(lambda: ngram_draft.engine.load.num_cached_sessions == 1)
    known = {name: (await client.open(name, fencing_token=2))[1].opened.cached_len for name in handles}
    assert known == {"open": 0, "gone": 0, "kept": 4}
