"""Remote drafts behind a fake of vLLM's engine: real streams to scripted drafts, which may be slow, wrong or dead."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic, sleep
from typing import Any

import pytest

from outrider.v1 import draft_pb2
from outrider.vllm.draft_thread import DraftThread
from outrider.vllm.remote_drafts import RemoteDrafts
from outrider.vllm.settings import DraftingSettings
from tests.orchestrator.scripted import VOCABULARY_SIZE, ScriptedDraft, continuation
from tests.vllm.fakes import FakeEngine, FakeRequest

_NUM = 4


@asynccontextmanager
async def drafting(*drafts: ScriptedDraft, fingerprint: str = "t", **settings: Any) -> AsyncIterator[RemoteDrafts]:
    """A source whose drafts are connected."""
    values = {"drafts": tuple(draft.address for draft in drafts), "draft_retry_s": 0.05, "draft_max_wait_s": 5.0}
    thread = DraftThread(DraftingSettings(**values | settings), VOCABULARY_SIZE, fingerprint)
    source = RemoteDrafts(
        thread,
        num_speculative_tokens=_NUM,
        vocabulary_size=VOCABULARY_SIZE,
        fingerprint=fingerprint,
        session_prefix="vllm-test",
        max_wait_s=5.0,
    )
    await asyncio.to_thread(thread.start)
    try:
        yield source
    finally:
        await asyncio.to_thread(source.close)


async def until(holds: Callable[[], bool]) -> None:
    """Return once something holds."""
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


def resting(source: RemoteDrafts) -> Callable[[], None]:
    """Return a pause that lets an answer to the last tokens arrive, as a step of a large model would."""
    seen = 0

    def pause() -> None:
        nonlocal seen
        until = monotonic() + 0.5
        while source.thread.ready and source.counts.num_proposed == seen and monotonic() < until:
            sleep(0.001)
        seen = source.counts.num_proposed

    return pause


async def ran(source: RemoteDrafts, *requests: FakeRequest, **more: Any) -> FakeEngine:
    """Run requests to their end in a thread of their own, after their drafts have opened them."""
    engine = await asyncio.to_thread(FakeEngine, source, requests, **more)
    await until(lambda: all(request.request_id in source.thread.ready for request in requests))
    await asyncio.wait_for(asyncio.to_thread(engine.run, resting(source)), 30)
    return engine


async def test_what_drafts_propose_is_verified_and_saves_steps(draft: ScriptedDraft) -> None:
    async with drafting(draft) as source:
        await until(lambda: source.thread.num_connected == 1)
        requests = [FakeRequest(f"r{number}", (5, 6, 7 + number)) for number in range(3)]
        engine = await ran(source, *requests)
    for request in requests:
        assert request.output == continuation(list(request.prompt_token_ids or ()), 40)
    assert engine.num_steps < 20
    assert source.counts.num_accepted == source.counts.num_verified > 60
    assert source.counts.num_steps == engine.num_steps


async def test_a_draft_is_asked_for_its_likeliest_tokens_with_the_penalties_of_the_request(
    draft: ScriptedDraft,
) -> None:
    async with drafting(draft) as source:
        await until(lambda: source.thread.num_connected == 1)
        request = FakeRequest("r", cache_salt="tenant")
        request.sampling_params.presence_penalty = 0.5
        await ran(source, request)
        opened: draft_pb2.DraftOpen = (await draft.saw("open"))[0]
    assert opened.parameters.temperature == 0
    assert opened.parameters.presence_penalty == 0.5
    assert opened.parameters.max_tokens == 40
    assert opened.prompt_len == 3
    assert list(opened.stop_token_ids) == [2]
    assert len(opened.cache_salt) == 32


@pytest.mark.parametrize("wrong", ["wrong tokens", "outside the vocabulary", "no proposals"])
async def test_a_draft_of_no_use_changes_no_text(draft: ScriptedDraft, wrong: str) -> None:
    tokens = {"wrong tokens": lambda text: 3, "outside the vocabulary": lambda text: VOCABULARY_SIZE}
    draft.next_token = tokens.get(wrong, draft.next_token)
    draft.is_silent = wrong == "no proposals"
    async with drafting(draft, draft_max_wait_s=0.05) as source:
        await until(lambda: source.thread.num_connected == 1)
        request = FakeRequest("r")
        engine = await asyncio.to_thread(FakeEngine, source, [request])
        await draft.saw("open")
        await asyncio.wait_for(asyncio.to_thread(engine.run), 30)
    assert request.output == continuation([5, 6, 7], 40)
    assert source.counts.num_accepted == 0


async def test_a_draft_that_is_always_late_is_sent_tokens_in_some_rounds_only_and_found_again(
    draft: ScriptedDraft,
) -> None:
    draft.is_silent = True
    async with drafting(draft) as source:
        await until(lambda: source.thread.num_connected == 1)
        request = FakeRequest("r", max_tokens=400)
        engine = await asyncio.to_thread(FakeEngine, source, [request])
        await until(lambda: "r" in source.thread.ready)
        late = 250
        for _ in range(late):
            await asyncio.to_thread(engine.step)
        await until(lambda: draft.of("advance")[-1].num_speculative_tokens == 0)
        assert 60 < len(draft.of("advance")) < 80
        assert request.num_tokens == 3 + late
        draft.is_silent = False
        await asyncio.wait_for(asyncio.to_thread(engine.run, resting(source)), 30)
    assert request.output == continuation([5, 6, 7], 400)
    assert source.counts.num_accepted > 60
    assert engine.num_steps < 350


async def test_a_draft_that_dies_is_replaced_and_comes_back(draft: ScriptedDraft) -> None:
    async with ScriptedDraft("other") as other, drafting(draft, other) as source:
        await until(lambda: source.thread.num_connected == 2)
        request = FakeRequest("r", max_tokens=200)
        engine = await asyncio.to_thread(FakeEngine, source, [request])
        await until(lambda: "r" in source.thread.ready)
        first = draft if draft.of("open") else other
        second = other if first is draft else draft
        for _ in range(5):
            await asyncio.to_thread(engine.step)
        await first.die()
        await until(lambda: "r" not in source.thread.ready or bool(second.of("open")))
        await second.saw("open")
        await until(lambda: "r" in source.thread.ready)
        await asyncio.wait_for(asyncio.to_thread(engine.run, resting(source)), 30)
        await first.start()
        await until(lambda: source.thread.num_connected == 2)
    assert request.output == continuation([5, 6, 7], 200)
    assert source.counts.num_accepted > 50
    assert source.thread.counts.num_lost >= 1


async def test_a_draft_with_another_tokenizer_is_not_used_and_warned_of_once(
    draft: ScriptedDraft, caplog: pytest.LogCaptureFixture
) -> None:
    async with drafting(draft, fingerprint="another") as source:
        engine = await asyncio.to_thread(FakeEngine, source, [FakeRequest("r")])
        await until(lambda: "tokenizer" in caplog.text)
        await asyncio.wait_for(asyncio.to_thread(engine.run), 30)
        assert source.thread.num_connected == 0
        assert not draft.of("open")
    assert caplog.text.count("its tokenizer t is not vLLM's another") == 1


async def test_requests_that_a_draft_cannot_follow_are_decoded_plainly(draft: ScriptedDraft) -> None:
    """A text-only draft has not what an image says, and a prompt of embeddings has no token ids."""
    async with drafting(draft) as source:
        await until(lambda: source.thread.num_connected == 1)
        requests = [FakeRequest("image", mm_features=("an image",)), FakeRequest("pooled", sampling_params=None)]
        engine = await asyncio.to_thread(FakeEngine, source, requests)
        await asyncio.wait_for(asyncio.to_thread(engine.run), 30)
        assert not any(engine.proposals)
        assert not draft.of("open")


async def test_a_request_that_ends_is_closed_on_its_draft(draft: ScriptedDraft) -> None:
    async with drafting(draft) as source:
        await until(lambda: source.thread.num_connected == 1)
        await asyncio.to_thread(source.add, FakeRequest("r"))
        await until(lambda: "r" in source.thread.ready)
        await asyncio.to_thread(source.remove, "r")
        await draft.saw("close")
        assert not source.thread.ready
