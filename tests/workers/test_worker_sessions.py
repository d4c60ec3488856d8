"""What a request waits for on a worker is bounded, and what fails on the way is noticed at once."""

import asyncio
from typing import Any

import pytest

from orchestrator.workers.target_session import TargetSession
from outrider.errors import OutriderError
from outrider.tokens import TokenSpan
from outrider.v1 import draft_pb2, target_pb2
from outrider.workers.draft_session import DraftSession, SpeculationChoice
from outrider.workers.links import DRAFT
from tests.orchestrator.scripted import ScriptedDraft, ScriptedTarget, continuation
from tests.orchestrator.stage import PROMPT, asking, orchestrating, tokens_of
from tests.workers.test_links import linked


class Mute(ScriptedDraft):
    """Takes everything, and never opens a session."""

    def _take(self, outbox: Any, frame: Any) -> None:
        return


async def test_a_draft_that_never_opens_a_session_is_replaced(
    session_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.workers.draft_session._ANSWER_S", 0.1)
    async with (
        ScriptedTarget() as target,
        Mute() as mute,
        ScriptedDraft("d1") as draft,
        orchestrating(session_store_url, (target,), (mute, draft)) as orchestrator,
    ):
        target.run_len = 10
        running = asyncio.create_task(orchestrator.events(asking(max_tokens=40)))
        await mute.saw("open")
        target.allow(10)
        while not draft.of("open"):
            # Each verdict has the request look for a draft, once the first one is given up.
            await asyncio.sleep(0.05)
            target.allow(1)
        target.allow(None)
        assert tokens_of(await asyncio.wait_for(running, 10)) == continuation(PROMPT, 40)


async def test_a_draft_whose_tokens_cannot_be_read_is_given_up(draft: ScriptedDraft) -> None:
    """An error without a name left the session open for ever, and nothing proposed."""
    lost: asyncio.Queue[OutriderError] = asyncio.Queue()

    async def tokens_from(start: int) -> tuple[int, ...]:
        raise ValueError("no such position")

    async with linked(draft, DRAFT) as link:
        choice = SpeculationChoice(num_speculative_tokens=3, drafter="", max_nodes=0, lookahead=0, max_wait_s=1.0)
        session = DraftSession(
            link,
            choice,
            lambda _: None,
            lambda: None,
            lambda _, error: lost.put_nowait(error),
            lambda layers, start: None,
            tokens_from,
        )
        session.open(draft_pb2.DraftOpen(session_id="s", fencing_token=1), committed_len=3)
        error = await asyncio.wait_for(lost.get(), 10)
    assert error.reason == "UNAVAILABLE"


async def test_a_span_that_cannot_be_read_again_is_an_error_at_once(target: ScriptedTarget) -> None:
    """It was waited for until the stall limit, of minutes."""
    target.misses = 1
    errors: asyncio.Queue[OutriderError] = asyncio.Queue()
    num_reads = 0

    async def tokens_from(start: int) -> tuple[int, ...]:
        nonlocal num_reads
        num_reads += 1
        if num_reads > 1:
            raise ValueError("no such position")
        return (1, 2, 3)[start:]

    async with linked(target) as link:
        target.caches["s"] = [1, 2]
        session = TargetSession(link, lambda _: None, errors.put_nowait, lambda _: None, lambda _: None, tokens_from)
        await session.open(target_pb2.VerifyOpen(session_id="s", prompt_len=3, committed_len=3, fencing_token=1))
        error = await asyncio.wait_for(errors.get(), 10)
    assert error.reason == "UNAVAILABLE"


@pytest.mark.parametrize("is_reading", [False, True], ids=["caught-up", "while-its-tokens-are-read"])
async def test_a_new_target_gets_a_new_tree_from_a_draft_that_lacks_its_last_token(
    draft: ScriptedDraft, *, is_reading: bool
) -> None:
    """Without a token that it has, a draft would continue a tree of which the new target has no node."""
    tokens, may_read, ready = [5, 6, 7], asyncio.Event(), asyncio.Event()

    async def tokens_from(start: int) -> tuple[int, ...]:
        await may_read.wait()
        return tuple(tokens[start:])

    async with linked(draft, DRAFT) as link:
        choice = SpeculationChoice(num_speculative_tokens=3, drafter="", max_nodes=0, lookahead=8, max_wait_s=1.0)
        session = DraftSession(
            link, choice, lambda _: None, ready.set, lambda *_: None, lambda layers, start: None, tokens_from
        )
        session.open(draft_pb2.DraftOpen(session_id="s", fencing_token=1), committed_len=3)
        if not is_reading:
            may_read.set()
            await draft.saw("advance")
            await asyncio.wait_for(ready.wait(), 10)
            # The verdict with this token came from a target that was gone before it was sent on.
            tokens.append(8)
        else:
            async with asyncio.timeout(10):
                while session._replay is None:
                    await asyncio.sleep(0.01)
        session.restart(TokenSpan(len(tokens) - 1, (tokens[-1],)))
        may_read.set()
        first, second = (await draft.saw("advance", 2))[:2]
        session.close()
    assert (first.span.start, list(first.span.token_ids)) == (0, [5, 6, 7])
    assert second.span.start == 2 < first.base.len and second.base.len == len(tokens)
    assert list(second.span.token_ids) == tokens[2:]
