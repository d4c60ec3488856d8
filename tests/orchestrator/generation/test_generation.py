"""The loop of a request, with scripted workers behind real sockets and a real Redis-protocol server."""

import asyncio
import itertools
import uuid
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import pytest
import redis

from outrider.errors import (
    DataLoss,
    Draining,
    Fenced,
    InvalidArgument,
    KVCacheMiss,
    Overloaded,
    RuleUnsupported,
    SessionNotFound,
    Unavailable,
)
from outrider.local.valkey import EmbeddedValkey
from outrider.serving.status import peer_errors
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import tokens_pb2
from tests.orchestrator.scripted import EOS, ScriptedDraft, ScriptedTarget, continuation, counting
from tests.orchestrator.stage import PROMPT, Orchestrator, asking, orchestrating, tokens_of

WHOLE = continuation(PROMPT, 20)


def new_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def orchestrator(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> AsyncIterator[Orchestrator]:
    async with orchestrating(session_store_url, (target,), (draft,)) as running:
        yield running


class Streaming:
    """A request whose events are read one by one."""

    def __init__(self, orchestrator: Orchestrator, request: pb.GenerateRequest) -> None:
        self.call = orchestrator.stub.Generate(request, timeout=20)
        self.events: list[pb.GenerateResponse] = []

    async def until(self, num_tokens: int) -> list[int]:
        """Reads until so many tokens have come."""
        with peer_errors():
            while len(tokens_of(self.events)) < num_tokens:
                event = await self.call.read()
                if event is grpc.aio.EOF:
                    raise AssertionError("the stream has ended")
                self.events.append(event)
        return tokens_of(self.events)

    async def rest(self) -> list[pb.GenerateResponse]:
        """Reads to the end; returns all events."""
        with peer_errors():
            while (event := await self.call.read()) is not grpc.aio.EOF:
                self.events.append(event)
        return self.events


async def until_released(orchestrator: Orchestrator, session_id: str) -> None:
    async with asyncio.timeout(10):
        while (await orchestrator.session(session_id)).leased:
            await asyncio.sleep(0.01)


async def test_a_request_from_its_acceptance_to_its_end(orchestrator: Orchestrator, target: ScriptedTarget) -> None:
    session_id = new_id()
    events = await orchestrator.events(asking(session_id=session_id, seed=9))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["accepted", *["delta"] * (len(kinds) - 2), "finished"]
    accepted, finished = events[0].accepted, events[-1].finished
    assert (accepted.session_id, accepted.seed, accepted.num_prompt_tokens, accepted.session_len) == (
        session_id,
        9,
        len(PROMPT),
        0,
    )
    assert tokens_of(events) == WHOLE
    assert finished.finish_reason == tokens_pb2.FINISH_REASON_LENGTH
    assert finished.num_output_tokens == 20
    session = await orchestrator.session(session_id)
    assert list(session.token_ids) == PROMPT + WHOLE
    assert not session.leased
    (close,) = await target.saw("close")
    assert close.committed_len == len(PROMPT) + 20


async def test_proposals_are_verified_and_counted(
    orchestrator: Orchestrator, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    target.allow(1)
    streaming = Streaming(orchestrator, asking())
    await streaming.until(1)
    await target.saw("proposal")
    target.allow(None)
    statistics = (await streaming.rest())[-1].finished.statistics
    assert tokens_of(streaming.events) == WHOLE
    # But for what the last proposal of three has beyond the end: how far it leads depends on when the draft was open.
    assert 0 <= statistics.num_draft_tokens - statistics.num_accepted_tokens < 3 <= statistics.num_accepted_tokens
    assert sum(statistics.num_accepted_tokens_per_pos) == statistics.num_accepted_tokens
    assert statistics.num_target_passes < 20
    await draft.saw("close")
    assert draft.num_open == 0


async def test_accepted_tokens_name_their_drafters(
    orchestrator: Orchestrator, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    # Two places each: the target's own token, which ends every verdict, never takes both.
    draft.drafters = [name for name in ("eagle3", "suffix", "eagle3+suffix", "") for _ in range(2)]
    target.allow(1)
    streaming = Streaming(orchestrator, asking())
    await streaming.until(1)
    await target.saw("proposal")
    target.allow(None)
    events = await streaming.rest()
    counted: Counter[str] = Counter()
    for delta in (event.delta for event in events if event.HasField("delta")):
        accepted = [origin == tokens_pb2.TOKEN_ORIGIN_ACCEPTED for origin in delta.origins]
        start = len(PROMPT) + delta.offset
        names = [draft.drafters[position % 8] for position in range(start, start + len(accepted))]
        expected = [name if is_accepted else "" for name, is_accepted in zip(names, accepted, strict=True)]
        assert list(delta.drafters) == (expected if any(expected) else [])
        counted.update(filter(None, delta.drafters))
    assert len(counted) == 3
    assert events[-1].finished.statistics.num_accepted_tokens_by_drafter == counted
    name = "outrider_spec_decode_num_accepted_tokens_by_drafter_total"
    assert {key: orchestrator.registry.get_sample_value(name, {"drafter": key}) for key in counted} == counted


async def test_of_one_drafter_nothing_is_named(orchestrator: Orchestrator, target: ScriptedTarget) -> None:
    target.allow(1)
    streaming = Streaming(orchestrator, asking())
    await streaming.until(1)
    await target.saw("proposal")
    target.allow(None)
    events = await streaming.rest()
    assert events[-1].finished.statistics.num_accepted_tokens > 0
    assert not events[-1].finished.statistics.num_accepted_tokens_by_drafter
    assert not any(event.delta.drafters for event in events)


async def test_a_lying_draft_changes_nothing(session_store_url: str, target: ScriptedTarget) -> None:
    async with (
        ScriptedDraft(next_token=lambda tokens: (counting(tokens) + 1) % 900) as liar,
        orchestrating(session_store_url, (target,), (liar,)) as orchestrator,
    ):
        assert tokens_of(await orchestrator.events(asking())) == WHOLE


async def test_without_speculation_no_draft_is_asked(orchestrator: Orchestrator, draft: ScriptedDraft) -> None:
    events = await orchestrator.events(asking(plain=True))
    assert tokens_of(events) == WHOLE
    assert draft.frames == []
    assert events[-1].finished.statistics.num_drafts == 0


async def test_a_second_turn_continues_the_session(orchestrator: Orchestrator, target: ScriptedTarget) -> None:
    session_id = new_id()
    await orchestrator.events(asking(session_id=session_id))
    await target.saw("close")
    events = await orchestrator.events(asking([8, 9], session_id=session_id))
    assert events[0].accepted.session_len == 23
    assert tokens_of(events) == continuation([*PROMPT, *WHOLE, 8, 9], 20)
    spans = target.of("span")
    # Only what the target lacks is sent.
    assert [span.start for span in spans] == [0, 23]


async def test_the_window_bounds_how_far_the_target_runs(session_store_url: str, target: ScriptedTarget) -> None:
    async with orchestrating(session_store_url, (target,), window=4) as orchestrator:
        assert tokens_of(await orchestrator.events(asking())) == WHOLE
    (opening,) = target.of("open")
    assert opening.window_end == opening.committed_len + 4
    windows = target.of("window")
    assert windows
    assert all(window.window_end == window.committed_len + 4 for window in windows)


async def test_a_wide_window_is_moved_now_and_then(session_store_url: str, target: ScriptedTarget) -> None:
    async with orchestrating(session_store_url, (target,), window=16) as orchestrator:
        assert tokens_of(await orchestrator.events(asking())) == WHOLE
    (opening,) = target.of("open")
    told = [opening.committed_len, *(window.committed_len for window in target.of("window"))]
    assert len(told) > 1
    assert all(later - earlier >= 4 for earlier, later in itertools.pairwise(told))


@pytest.mark.parametrize("numerics", ["cpu float32 invariant", "cpu float32 varying"])
async def test_a_result_says_whether_numerics_vary(
    session_store_url: str, target: ScriptedTarget, numerics: str
) -> None:
    target.info.numerics = numerics
    async with orchestrating(session_store_url, (target,)) as orchestrator:
        events = await orchestrator.events(asking())
    assert events[-1].finished.statistics.varying_numerics == numerics.endswith("varying")


async def test_targets_that_embed_an_engine_get_its_rule_and_their_drafts_propose_likeliest_tokens(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    target.info.acceptance_rules[:] = ["engine"]
    async with orchestrating(session_store_url, (target,), (draft,)) as orchestrator:
        events = await orchestrator.events(asking(temperature=0.7, min_p=0.1))
        refused = asking(temperature=0.7)
        refused.speculation.acceptance_rule = tokens_pb2.ACCEPTANCE_RULE_COUPLED
        with pytest.raises(RuleUnsupported, match="noise of their own"):
            await orchestrator.events(refused)
    assert events[-1].finished.statistics.acceptance_rule == tokens_pb2.ACCEPTANCE_RULE_ENGINE
    (opened,) = target.of("open")
    assert (opened.acceptance_rule, opened.parameters.temperature) == (tokens_pb2.ACCEPTANCE_RULE_ENGINE, 0.7)
    (drafting,) = draft.of("open")
    assert (drafting.acceptance_rule, drafting.parameters.temperature) == (tokens_pb2.ACCEPTANCE_RULE_COUPLED, 0)
    assert drafting.parameters.min_p == 0.1


async def test_a_result_says_whether_targets_of_other_numerics_took_part(session_store_url: str) -> None:
    async with (
        ScriptedTarget("a") as one,
        ScriptedTarget("b") as other,
        orchestrating(session_store_url, (one, other)) as orchestrator,
    ):
        one.info.numerics, other.info.numerics = "cpu invariant", "cuda invariant"
        for target in (one, other):
            await target.die()
            await target.start()
            target.allow(6)
        streaming = Streaming(orchestrator, asking())
        await streaming.until(6)
        used, spare = (one, other) if one.of("open") else (other, one)
        await used.die()
        spare.allow(None)
        assert tokens_of(events := await streaming.rest()) == WHOLE
    assert events[-1].finished.statistics.varying_numerics


async def test_end_of_text_and_stop_ids_end_at_the_target(session_store_url: str) -> None:
    def next_token(tokens: list[int]) -> int:
        return EOS if len(tokens) == 8 else counting(tokens)

    async with (
        ScriptedTarget(next_token=next_token) as target,
        orchestrating(session_store_url, (target,)) as orchestrator,
    ):
        events = await orchestrator.events(asking())
        assert tokens_of(events) == continuation(PROMPT, 6, next_token)
        assert events[-1].finished.finish_reason == tokens_pb2.FINISH_REASON_STOP
        # Ignored, it is a token like others.
        events = await orchestrator.events(asking(ignore_eos=True))
        assert tokens_of(events) == continuation(PROMPT, 20, next_token)
        events = await orchestrator.events(asking(stop_token_ids=[WHOLE[2]]))
        assert tokens_of(events) == WHOLE[:3]


async def test_cancelling_gives_the_terminal_event(orchestrator: Orchestrator, target: ScriptedTarget) -> None:
    target.allow(5)
    session_id = new_id()
    streaming = Streaming(orchestrator, asking(session_id=session_id))
    await streaming.until(5)
    # The target sends nothing, so only the call itself can end the request.
    answer = await orchestrator.stub.CancelGeneration(pb.CancelGenerationRequest(session_id=session_id))
    assert answer.cancelled
    events = await streaming.rest()
    assert events[-1].finished.finish_reason == tokens_pb2.FINISH_REASON_CANCELLED
    assert tokens_of(events) == WHOLE[:5]
    await target.saw("close")
    session = await orchestrator.session(session_id)
    assert session.finish_reason == tokens_pb2.FINISH_REASON_CANCELLED
    assert not (await orchestrator.stub.CancelGeneration(pb.CancelGenerationRequest(session_id=session_id))).cancelled


async def test_cancelling_at_another_orchestrator(session_store_url: str, target: ScriptedTarget) -> None:
    target.allow(5)
    session_id = new_id()
    async with (
        orchestrating(session_store_url, (target,), lease_s=0.6) as first,
        orchestrating(session_store_url, (target,)) as second,
    ):
        streaming = Streaming(first, asking(session_id=session_id))
        await streaming.until(5)
        await second.stub.CancelGeneration(pb.CancelGenerationRequest(session_id=session_id))
        # The next renewal brings the news.
        events = await streaming.rest()
    assert events[-1].finished.finish_reason == tokens_pb2.FINISH_REASON_CANCELLED


async def test_a_client_that_leaves_can_resume_elsewhere(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    session_id, request_id = new_id(), new_id()
    async with (
        orchestrating(session_store_url, (target,), (draft,)) as first,
        orchestrating(session_store_url, (target,), (draft,)) as second,
    ):
        target.allow(7)
        streaming = Streaming(first, asking(session_id=session_id, request_id=request_id))
        got = await streaming.until(7)
        streaming.call.cancel()
        # Both workers are freed, and the lease is given back.
        await target.saw("close")
        await draft.saw("close")
        await until_released(second, session_id)
        target.allow(None)
        events = await second.events(asking(session_id=session_id, request_id=request_id, resume_offset=5))
        assert got[:5] + tokens_of(events) == WHOLE
        assert events[1].delta.offset == 5
        # Finished, it is repeated from the log, from any offset, by anyone.
        repeated = await first.events(asking(session_id=session_id, request_id=request_id))
        assert tokens_of(repeated) == WHOLE
        again = await first.events(asking(session_id=session_id, request_id=request_id, resume_offset=20))
        assert [event.WhichOneof("event") for event in again] == ["accepted", "finished"]


async def test_a_takeover_fences_whoever_still_runs(session_store_url: str, target: ScriptedTarget) -> None:
    session_id, request_id = new_id(), new_id()
    async with (
        orchestrating(session_store_url, (target,), lease_s=0.6) as first,
        orchestrating(session_store_url, (target,)) as second,
    ):
        target.allow(7)
        older = Streaming(first, asking(session_id=session_id, request_id=request_id))
        await older.until(7)
        newer = Streaming(second, asking(session_id=session_id, request_id=request_id, resume_offset=7))
        await target.saw("open", 2)
        with pytest.raises(Fenced):
            await older.rest()
        target.allow(None)
        assert tokens_of(await newer.rest()) == WHOLE[7:]
        assert list((await second.session(session_id)).token_ids) == PROMPT + WHOLE


async def test_a_deleted_session_ends_its_request(orchestrator: Orchestrator, target: ScriptedTarget) -> None:
    target.allow(3)
    session_id = new_id()
    streaming = Streaming(orchestrator, asking(session_id=session_id))
    await streaming.until(3)
    await orchestrator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))
    target.allow(None)
    with pytest.raises(SessionNotFound):
        await streaming.rest()
    await target.saw("close")
    assert len(target.of("forget")) == 1, "it forgets the session as soon as the request is closed"


async def test_the_lease_is_renewed_while_nothing_is_committed(session_store_url: str, target: ScriptedTarget) -> None:
    session_id = new_id()
    async with orchestrating(session_store_url, (target,), lease_s=1.5) as orchestrator:
        target.allow(2)
        streaming = Streaming(orchestrator, asking(session_id=session_id))
        await streaming.until(2)
        async with asyncio.timeout(5):
            record = await orchestrator.store.get("default", session_id)
            assert record is not None
            deadline = record.deadline
            while record is not None and record.deadline < deadline + 1_500_000:
                assert await orchestrator.store.is_leased(record)
                await asyncio.sleep(0.05)
                record = await orchestrator.store.get("default", session_id)
        target.allow(None)
        assert tokens_of(await streaming.rest()) == WHOLE
        assert not (await orchestrator.session(session_id)).leased


# Workers that fail.


async def test_a_dead_draft_brings_plain_decoding(
    orchestrator: Orchestrator, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    target.allow(4)
    streaming = Streaming(orchestrator, asking())
    await streaming.until(4)
    await draft.die()
    await orchestrator.until_drafts(0)
    target.allow(None)
    events = await streaming.rest()
    assert tokens_of(events) == WHOLE
    assert events[-1].finished.statistics.num_fallbacks["draft_unavailable"] == 1
    assert tokens_of(await orchestrator.events(asking([1, 2]))) == continuation([1, 2], 20)


async def test_a_draft_that_is_back_drafts_again_in_the_same_request(
    orchestrator: Orchestrator, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    target.allow(4)
    streaming = Streaming(orchestrator, asking(max_tokens=400))
    await streaming.until(4)
    num_before = len(await draft.saw("open"))
    draft.break_streams()
    await orchestrator.until_drafts(0)
    await orchestrator.until_drafts(1)
    async with asyncio.timeout(10):
        while len(draft.of("open")) == num_before:
            target.allow(1)
            await streaming.until(len(tokens_of(streaming.events)) + 1)
            await asyncio.sleep(0.02)
    target.allow(None)
    events = await streaming.rest()
    assert tokens_of(events) == continuation(PROMPT, 400)
    assert target.of("speculation")[-1].num_speculative_tokens == 3


async def test_a_draft_that_refuses_or_misses_its_cache(
    orchestrator: Orchestrator, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    draft.refusals.append(Overloaded("full", retry_after_s=1))
    events = await orchestrator.events(asking())
    assert tokens_of(events) == WHOLE
    draft.misses = 2
    await orchestrator.until_drafts(1)
    assert tokens_of(await orchestrator.events(asking(max_tokens=100))) == continuation(PROMPT, 100)
    # A draft that misses its cache again and again is dropped.
    draft.misses = 1 << 30
    assert tokens_of(await orchestrator.events(asking(max_tokens=100))) == continuation(PROMPT, 100)
    assert draft.misses > (1 << 30) - 1000


async def test_a_draft_with_another_tokenizer_is_kept_out_and_shown(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    draft.info.tokenizer_fingerprint = "other"
    async with orchestrating(session_store_url, (target,), (draft,)) as orchestrator:
        assert tokens_of(await orchestrator.events(asking())) == WHOLE
        async with asyncio.timeout(10):
            while not orchestrator.replicas.drafts[0].is_up:
                await asyncio.sleep(0.01)
        listed = await orchestrator.stub.ListModels(pb.ListModelsRequest())
    in_rotation = {worker.info.replica: worker.in_rotation for worker in listed.workers}
    assert in_rotation == {"t0": True, "d0": False}
    reason = next(worker.reason for worker in listed.workers if not worker.in_rotation)
    assert "tokenizer other" in reason
    assert "target's t" in reason
    assert draft.frames == []


def made_of_features(target: ScriptedTarget, draft: ScriptedDraft) -> None:
    target.info.hidden_size = draft.info.hidden_size = 1
    target.info.num_layers = 4
    draft.info.feature_layers.append(2)


async def test_features_go_from_target_to_draft_once(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    made_of_features(target, draft)
    target.allow(1)
    async with orchestrating(session_store_url, (target,), (draft,)) as orchestrator:
        asked = asyncio.create_task(orchestrator.events(asking()))
        await draft.saw("features")
        target.allow(None)
        events = await asked
    assert tokens_of(events) == WHOLE
    statistics = events[-1].finished.statistics
    assert statistics.num_accepted_tokens > 0
    # Of every position but the last, two bytes.
    assert statistics.feature_bytes == 2 * (len(PROMPT) + len(WHOLE) - 1)
    (request,) = target.of("features")
    assert (list(request.layers), request.start) == ([2], 0)


async def test_no_features_are_asked_for_by_drafts_that_need_none(
    orchestrator: Orchestrator, target: ScriptedTarget
) -> None:
    events = await orchestrator.events(asking())
    assert events[-1].finished.statistics.feature_bytes == 0
    assert target.of("features") == []


async def test_lost_features_are_sent_again(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    made_of_features(target, draft)
    draft.features_lost = 2
    target.allow(1)
    async with orchestrating(session_store_url, (target,), (draft,)) as orchestrator:
        asked = asyncio.create_task(orchestrator.events(asking()))
        await draft.saw("features")
        target.allow(None)
        events = await asked
    assert tokens_of(events) == WHOLE
    assert set(events[-1].finished.statistics.num_fallbacks) <= {"no_proposal"}
    assert events[-1].finished.statistics.num_accepted_tokens > 0
    assert [request.start for request in target.of("features")] in ([0, 0], [0, 0, 0])


async def test_a_draft_that_keeps_no_features_is_given_up(session_store_url: str, target: ScriptedTarget) -> None:
    async with ScriptedDraft() as draft:
        made_of_features(target, draft)
        draft.keeps_features = False
        target.allow(1)
        async with orchestrating(session_store_url, (target,), (draft,), draft_retry_s=30) as orchestrator:
            asked = asyncio.create_task(orchestrator.events(asking()))
            await draft.saw("features")
            target.allow(None)
            events = await asked
    assert tokens_of(events) == WHOLE
    assert events[-1].finished.statistics.num_fallbacks["draft_unavailable"] == 1


async def test_a_target_that_takes_over_sends_what_is_missing(session_store_url: str, draft: ScriptedDraft) -> None:
    async with ScriptedTarget("a") as one, ScriptedTarget("b") as other:
        made_of_features(one, draft)
        other.info.hidden_size, other.info.num_layers = 1, 4
        async with orchestrating(session_store_url, (one, other), (draft,)) as orchestrator:
            for target in (one, other):
                target.allow(6)
            streaming = Streaming(orchestrator, asking(session_id=new_id()))
            await streaming.until(6)
            used, spare = (one, other) if one.of("open") else (other, one)
            await draft.saw("features")
            await used.die()
            spare.allow(None)
            assert tokens_of(await streaming.rest()) == WHOLE
        # What the draft has it is not sent again.
        (asked,) = spare.of("features")
        assert asked.start >= len(PROMPT) - 1


async def test_a_draft_for_another_target_is_kept_out_and_shown(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    draft.info.target_fingerprint = "another"
    async with orchestrating(session_store_url, (target,), (draft,)) as orchestrator:
        assert tokens_of(await orchestrator.events(asking())) == WHOLE
        async with asyncio.timeout(10):
            while not orchestrator.replicas.drafts[0].is_up:
                await asyncio.sleep(0.01)
        listed = await orchestrator.stub.ListModels(pb.ListModelsRequest())
    reason = next(worker.reason for worker in listed.workers if not worker.in_rotation)
    assert "made for target another, not for w" in reason
    assert draft.frames == []


async def test_a_dead_target_is_replaced(session_store_url: str, draft: ScriptedDraft) -> None:
    async with (
        ScriptedTarget("a") as one,
        ScriptedTarget("b") as other,
        orchestrating(session_store_url, (one, other), (draft,)) as orchestrator,
    ):
        for target in (one, other):
            target.allow(6)
        session_id = new_id()
        streaming = Streaming(orchestrator, asking(session_id=session_id))
        await streaming.until(6)
        used, spare = (one, other) if one.of("open") else (other, one)
        await used.die()
        spare.allow(None)
        assert tokens_of(await streaming.rest()) == WHOLE
        (span,) = spare.of("span")
        assert (span.start, len(span.token_ids)) == (0, len(PROMPT) + 6)
        record = await orchestrator.store.get("default", session_id)
        assert record is not None
        assert record.target == spare.info.replica


@pytest.mark.parametrize("error", [Draining("bye"), Overloaded("full", retry_after_s=1)])
async def test_a_refusing_target_is_asked_again_after_others(
    session_store_url: str, target: ScriptedTarget, error: Draining | Overloaded
) -> None:
    target.refusals += [error] * 4
    async with orchestrating(session_store_url, (target,)) as orchestrator:
        assert tokens_of(await orchestrator.events(asking())) == WHOLE
    assert len(target.of("open")) == 5


async def test_a_target_that_refuses_for_ever_ends_the_request_in_time(
    session_store_url: str, target: ScriptedTarget
) -> None:
    target.refusals += [Draining("bye")] * 1000
    async with orchestrating(session_store_url, (target,), failover_timeout_s=0.5) as orchestrator:
        async with asyncio.timeout(5):
            with pytest.raises(Draining):
                await orchestrator.events(asking())
    assert len(target.of("open")) < 12


async def test_all_targets_gone_leaves_the_session_resumable(session_store_url: str, target: ScriptedTarget) -> None:
    session_id, request_id = new_id(), new_id()
    async with orchestrating(session_store_url, (target,), failover_timeout_s=0.5) as orchestrator:
        target.allow(6)
        streaming = Streaming(orchestrator, asking(session_id=session_id, request_id=request_id))
        await streaming.until(6)
        await target.die()
        async with asyncio.timeout(5):
            with pytest.raises(Unavailable):
                await streaming.rest()
        await until_released(orchestrator, session_id)
        await target.start()
        target.allow(None)
        async with asyncio.timeout(10):
            while not orchestrator.replicas.targets[0].is_up:
                await asyncio.sleep(0.01)
        events = await orchestrator.events(asking(session_id=session_id, request_id=request_id, resume_offset=6))
    assert tokens_of(streaming.events) + tokens_of(events) == WHOLE


async def test_an_evicted_cache_gets_an_earlier_span(orchestrator: Orchestrator, target: ScriptedTarget) -> None:
    session_id = new_id()
    await orchestrator.events(asking(session_id=session_id))
    await target.saw("close")
    target.misses = 1
    events = await orchestrator.events(asking([8, 9], session_id=session_id))
    assert tokens_of(events) == continuation([*PROMPT, *WHOLE, 8, 9], 20)
    assert [span.start for span in target.of("span")] == [0, 23, 0]


async def test_a_hung_target_is_noticed_by_its_silence(session_store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.workers.load_polling._TIMEOUT_S", 0.2)
    async with (
        ScriptedTarget("a") as one,
        ScriptedTarget("b") as other,
        orchestrating(session_store_url, (one, other)) as orchestrator,
    ):
        for target in (one, other):
            target.allow(3)
        streaming = Streaming(orchestrator, asking())
        await streaming.until(3)
        used, spare = (one, other) if one.of("open") else (other, one)
        used.answers_load = False
        spare.allow(None)
        assert tokens_of(await streaming.rest()) == WHOLE


async def test_a_target_that_owes_a_verdict_for_too_long_is_replaced(
    session_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.generation.worker_pair._STALL_S", 0.3)
    async with (
        ScriptedTarget("a") as one,
        ScriptedTarget("b") as other,
        orchestrating(session_store_url, (one, other)) as orchestrator,
    ):
        for target in (one, other):
            target.allow(3)
        streaming = Streaming(orchestrator, asking())
        await streaming.until(3)
        (other if one.of("open") else one).allow(None)
        assert tokens_of(await streaming.rest()) == WHOLE


async def test_a_target_that_is_out_of_step_is_given_the_session_anew(
    session_store_url: str, target: ScriptedTarget
) -> None:
    target.out_of_step = 1
    async with orchestrating(session_store_url, (target,)) as orchestrator:
        assert tokens_of(await orchestrator.events(asking())) == WHOLE
    assert (target.out_of_step, len(target.of("open"))) == (0, 2)


async def test_a_refusal_that_every_target_would_give_is_passed_on(
    orchestrator: Orchestrator, target: ScriptedTarget
) -> None:
    target.refusals.append(InvalidArgument("top_k is odd", "top_k"))
    with pytest.raises(InvalidArgument) as caught:
        await orchestrator.events(asking())
    assert caught.value.field == "top_k"
    assert len(target.of("open")) == 1


async def test_a_miss_about_nothing_is_no_reason_to_resend(orchestrator: Orchestrator, target: ScriptedTarget) -> None:
    target.refusals.append(KVCacheMiss("odd", 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orchestrator.workers.target_session._ANSWER_S", 1.0)
        assert tokens_of(await orchestrator.events(asking())) == WHOLE
    assert len(target.of("open")) == 2


@pytest.mark.parametrize("loss", ["everything", "last-writes"])
async def test_fault_27_a_store_that_loses_a_running_session_is_given_it_again(
    target: ScriptedTarget, loss: str
) -> None:
    with EmbeddedValkey(durable=False) as server, redis.Redis.from_url(server.url) as raw:
        async with orchestrating(server.url, (target,)) as orchestrator:
            target.allow(4)
            stream = orchestrator.stub.Generate(asking(session_id="s", max_tokens=40), timeout=20)
            events = [await anext(aiter(stream))]
            saved: tuple[bytes, dict[bytes, bytes]] = (b"", {})
            async for event in stream:
                events.append(event)
                num = len(tokens_of(events))
                (log,), (session,) = raw.keys("*:log"), raw.keys("*:session")
                if num == 4 and loss == "everything":
                    raw.flushall()
                    target.allow(None)
                elif num == 4:
                    saved = raw.get(log), raw.hgetall(session)
                    target.allow(5)
                elif num == 9:
                    raw.set(log, saved[0])
                    raw.hset(session, mapping=saved[1])
                    target.allow(None)
            assert tokens_of(events) == continuation(PROMPT, 40)
            assert events[-1].finished.statistics.num_fallbacks["session_restored"] == 1
            stored = await orchestrator.session("s")
            assert list(stored.token_ids) == PROMPT + continuation(PROMPT, 40)


async def test_fault_23_what_the_client_has_seen_and_the_log_has_not_is_data_loss(target: ScriptedTarget) -> None:
    with EmbeddedValkey(durable=False) as server, redis.Redis.from_url(server.url) as raw:
        async with orchestrating(server.url, (target,)) as orchestrator:
            target.allow(6)
            stream = orchestrator.stub.Generate(asking(session_id="s", request_id="r", max_tokens=40), timeout=20)
            events = []
            async for event in stream:
                events.append(event)
                if len(tokens_of(events)) == 6:
                    break
            stream.cancel()
            (log,), (session,) = raw.keys("*:log"), raw.keys("*:session")
            async with asyncio.timeout(10):
                while raw.hget(session, "deadline") != b"0":
                    await asyncio.sleep(0.01)
            raw.setrange(log, 0, b"")
            raw.set(log, raw.get(log)[: 4 * (len(PROMPT) + 2)])
            raw.hset(session, "committed_len", len(PROMPT) + 2)
            with pytest.raises(DataLoss):
                await orchestrator.events(asking(session_id="s", request_id="r", resume_offset=6, max_tokens=40))
            # Nothing was lost for good: from what the log has, the same text is made again.
            target.allow(None)
            events = await orchestrator.events(asking(session_id="s", request_id="r", resume_offset=2, max_tokens=40))
            assert tokens_of(events) == continuation(PROMPT, 40)[2:]


async def test_what_is_asked_of_drafts_and_targets_is_what_the_request_says(
    orchestrator: Orchestrator, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    request = asking(max_tokens=40)
    request.speculation.lookahead = 21
    request.speculation.draft_min = 2
    request.speculation.draft_p_min = 0.25
    assert tokens_of(await _drafted(orchestrator, target, draft, request)) == continuation(PROMPT, 40)
    assert draft.of("open")[-1].draft_p_min == 0.25
    assert draft.of("advance")[0].lookahead == 21
    settings = [*(opened.speculation for opened in target.of("open")), *target.of("speculation")]
    told = [item for item in settings if item.num_speculative_tokens]
    assert told and all((item.lookahead, item.draft_min) == (21, 2) for item in told)


async def _drafted(
    orchestrator: Orchestrator, target: ScriptedTarget, draft: ScriptedDraft, request: pb.GenerateRequest
) -> list[pb.GenerateResponse]:
    """Return a request's events; its target, which takes no time, waits until the draft has a request."""
    target.allow(1)
    running = asyncio.create_task(orchestrator.events(request))
    await draft.saw("advance")
    await target.saw("speculation")
    target.allow(None)
    return await running


async def test_a_bound_on_proposals_leaves_it_open_whether_drafts_wait(
    orchestrator: Orchestrator, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    request = asking(max_tokens=40)
    request.speculation.max_nodes = 3
    await _drafted(orchestrator, target, draft, request)
    first, *_ = draft.of("advance")
    assert (first.max_nodes, first.lookahead) == (3, 64)


async def test_drafts_made_of_features_wait_for_verdicts_and_targets_know(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    made_of_features(target, draft)
    request = asking(max_tokens=40)
    request.speculation.lookahead = 21
    async with orchestrating(session_store_url, (target,), (draft,)) as orchestrator:
        assert tokens_of(await _drafted(orchestrator, target, draft, request)) == continuation(PROMPT, 40)
    assert {advance.lookahead for advance in draft.of("advance")} == {0}
    told = [item for item in target.of("speculation") if item.num_speculative_tokens]
    assert told and {item.lookahead for item in told} == {0}


async def test_a_target_that_drafts_for_itself_needs_no_draft(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    target.info.drafter = "model"
    async with orchestrating(session_store_url, (target,), (draft,)) as orchestrator:
        request = asking()
        request.speculation.draft_at = "target"
        request.speculation.max_nodes, request.speculation.draft_p_min = 5, 0.25
        events = await orchestrator.events(request)
        assert tokens_of(events) == WHOLE
        assert not draft.of("open")
        told = target.of("open")[-1].speculation
        assert told.own_draft and (told.max_nodes, told.draft_p_min) == (5, 0.25)
        request = asking()
        request.speculation.drafter = "ngram"
        await orchestrator.events(request)
        assert not target.of("open")[-1].speculation.own_draft


async def test_a_request_may_insist_on_a_draft_service_or_on_the_target(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    target.info.drafter = draft.info.drafter
    async with orchestrating(session_store_url, (target,), (draft,)) as orchestrator:
        for place in ("service", "target", "service"):
            request = asking()
            request.speculation.draft_at = place
            assert tokens_of(await orchestrator.events(request)) == WHOLE
            assert target.of("open")[-1].speculation.own_draft is (place == "target")
        assert len(draft.of("open")) == 2
        request = asking()
        request.speculation.draft_at = "elsewhere"
        with pytest.raises(InvalidArgument, match="draft_at is 'elsewhere', must be one of service, target"):
            await orchestrator.events(request)


async def test_a_draft_is_asked_for_nothing_while_its_target_decodes_plainly(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    async with orchestrating(session_store_url, (target,), (draft,)) as orchestrator:
        for is_plain in (True, False):
            target.is_plain = is_plain
            before = len(draft.of("advance"))
            # Not done before its draft is open.
            target.allow(1)
            streaming = Streaming(orchestrator, asking())
            first = (await draft.saw("advance", before + 1))[before]
            target.allow(None)
            await streaming.rest()
            assert tokens_of(streaming.events) == WHOLE
            # It knows the tokens all the same, for when a verdict requests a proposal.
            assert first.span.token_ids[: len(PROMPT)] == PROMPT
            assert bool(first.num_speculative_tokens) is not is_plain


async def test_where_both_can_draft_requests_try_both(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    target.info.drafter = draft.info.drafter
    async with orchestrating(session_store_url, (target,), (draft,)) as orchestrator:
        for _ in range(4):
            assert tokens_of(await orchestrator.events(asking())) == WHOLE
        opened = target.of("open")
        assert [item.speculation.own_draft for item in opened].count(True) == len(draft.of("open")) == 2
        # Plain requests show nothing about drafts, and take no turn.
        for _ in range(3):
            request = asking()
            request.speculation.disabled = True
            assert tokens_of(await orchestrator.events(request)) == WHOLE
        assert not any(item.speculation.own_draft for item in target.of("open")[4:])
        await orchestrator.events(asking())
        assert target.of("open")[-1].speculation.own_draft


async def test_a_target_that_drafts_for_itself_gets_the_prediction_only_where_it_uses_it(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    target.info.drafter = "suffix"
    async with orchestrating(session_store_url, (target,), (draft,)) as orchestrator:
        request = asking()
        request.predicted_token_ids.token_ids.extend(WHOLE)
        assert tokens_of(await orchestrator.events(request)) == WHOLE
        assert target.of("open")[-1].speculation.own_draft
        assert list(target.of("open")[-1].prediction) == WHOLE
