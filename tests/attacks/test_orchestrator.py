"""Attacks on workers as orchestrators see them: what one request may cost, and what one frame may."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from orchestrator.workers.target_session import TargetSession
from outrider.errors import InvalidArgument, OutriderError, RequestFailed, Unavailable
from outrider.local.valkey import EmbeddedValkey
from outrider.v1 import target_pb2
from outrider.workers.draft_session import DraftSession
from tests.orchestrator.scripted import ScriptedDraft, ScriptedTarget, continuation
from tests.orchestrator.stage import PROMPT, Orchestrator, asking, orchestrating, tokens_of


@pytest.fixture(scope="module")
def store_url() -> Iterator[str]:
    """One Valkey for all tests: they differ in their session ids."""
    with EmbeddedValkey(durable=False) as valkey:
        yield valkey.url


class Fragile(ScriptedTarget):
    """Cuts the stream, as a process does that ends, when it comes to run a request of this prompt length."""

    fatal_len = len(PROMPT) + 1

    def _take(self, outbox: Any, frame: target_pb2.VerifyRequestFrame) -> None:
        if frame.WhichOneof("frame") == "span" and frame.span.start + len(frame.span.token_ids) == self.fatal_len:
            self.frames.append(frame)
            self.break_streams()
        else:
            super()._take(outbox, frame)


@asynccontextmanager
async def fleet(
    url: str, make: Callable[[str], ScriptedTarget], num: int = 3
) -> AsyncIterator[tuple[Orchestrator, list[ScriptedTarget]]]:
    """Runs an orchestrator with several targets."""
    async with AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(make(f"t{number}")) for number in range(num)]
        yield await stack.enter_async_context(orchestrating(url, tuple(targets))), targets


async def failure_of(orchestrator: Orchestrator, *prompt: int, **parameters: object) -> OutriderError:
    """Returns the error that ends a request."""
    with pytest.raises(OutriderError) as caught:
        await orchestrator.events(asking(list(prompt or PROMPT), **parameters))
    return caught.value


async def test_attack_04_logprobs_beyond_the_vocabulary_are_refused(store_url: str) -> None:
    target = ScriptedTarget()
    target.info.vocabulary_size = 16
    async with target, orchestrating(store_url, (target,)) as orchestrator:
        error = await failure_of(orchestrator, 1, 2, logprobs=20)
    assert isinstance(error, InvalidArgument)
    assert error.field == "logprobs"
    assert not target.opened


async def test_attack_04_a_request_that_fails_by_itself_costs_two_targets(store_url: str) -> None:
    async with fleet(store_url, ScriptedTarget) as (orchestrator, targets):
        for target in targets:
            target.refusals += [RequestFailed("the request failed on this target")]
        error = await failure_of(orchestrator)
        assert isinstance(error, RequestFailed)
        assert "2 targets" in error.message
        assert sum(not target.refusals for target in targets) == 2
        # Its place, its lease and the targets are free again.
        for target in targets:
            target.refusals.clear()
        assert tokens_of(await orchestrator.events(asking())) == continuation(PROMPT, 20)


async def test_attack_04_a_lone_target_is_not_asked_again_and_again(store_url: str) -> None:
    async with fleet(store_url, ScriptedTarget, 1) as (orchestrator, [target]):
        target.refusals += [RequestFailed("the request failed on this target")] * 50
        assert isinstance(await failure_of(orchestrator), RequestFailed)
        assert len(target.refusals) == 48


async def test_attack_04_a_request_that_ends_targets_ends_two(store_url: str) -> None:
    async with fleet(store_url, Fragile) as (orchestrator, targets):
        error = await failure_of(orchestrator, *PROMPT, 9)
        assert isinstance(error, Unavailable)
        assert "2 targets" in error.message
        assert sum(bool(target.of("span")) for target in targets) == 2


async def test_attack_04_one_that_goes_on_outlives_any_number_of_targets(store_url: str) -> None:
    async with fleet(store_url, ScriptedTarget) as (orchestrator, targets):
        for target in targets:
            target.run_len = 40
        tokens: list[int] = []
        num_lost = 0
        async for event in orchestrator.stub.Generate(asking(max_tokens=200), timeout=20):
            tokens += event.delta.token_ids
            if len(tokens) == 40 * (num_lost + 1) < 200:
                num_lost += 1
                for target in targets:
                    if target.run_len == 0:
                        target.run_len = 40
                        target.break_streams()
        assert num_lost == 4
        assert tokens == continuation(PROMPT, 200)


async def test_attack_07_a_request_that_its_draft_cannot_serve_takes_no_draft_from_others(
    store_url: str,
) -> None:
    """A client can choose what a draft refuses; drafts that rest for that would be lost to all."""
    draft = ScriptedDraft()
    for error in (RequestFailed("drafting failed"), InvalidArgument("is 99, the vocabulary has 16", "logit_bias")):
        async with (
            ScriptedTarget() as target,
            draft,
            orchestrating(store_url, (target,), (draft,)) as orchestrator,
        ):
            draft.refusals = [error] * 9
            assert tokens_of(await orchestrator.events(asking(max_tokens=100))) == continuation(PROMPT, 100)
            assert len(draft.refusals) == 8
            assert [orchestrator.replicas.draft_problem(link) for link in orchestrator.replicas.drafts] == [""]


async def test_attack_11_a_worker_with_an_endless_name_is_out_of_rotation(store_url: str) -> None:
    async with ScriptedTarget() as named:
        named.info.replica = "r" * 100_000
        async with orchestrating(store_url, (named,), failover_timeout_s=0.3) as orchestrator:
            assert "replica" in (await failure_of(orchestrator)).message


@pytest.mark.parametrize("kind", [TargetSession, DraftSession])
async def test_attack_12_an_error_about_one_frame_ends_one_session(
    store_url: str,
    kind: type,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a session makes of its worker's frame raises, and so does what it makes of that."""
    on_frame = kind.on_frame
    poisoned: list[Any] = []

    def broken(self: Any, frame: Any) -> None:
        if (poisoned and poisoned[0] is self) or (not poisoned and frame.WhichOneof("frame") != "opened"):
            poisoned[:] = [self]
            raise ZeroDivisionError
        on_frame(self, frame)

    async with (
        ScriptedTarget() as target,
        ScriptedDraft() as draft,
        orchestrating(store_url, (target,), (draft,)) as orchestrator,
    ):
        links = [*orchestrator.replicas.targets, *orchestrator.replicas.drafts]
        # From the first request on there are streams to both workers.
        await orchestrator.events(asking(max_tokens=60))
        calls = [link._call for link in links]
        assert all(calls)
        monkeypatch.setattr(kind, "on_frame", broken)
        assert tokens_of(await orchestrator.events(asking(max_tokens=60))) == continuation(PROMPT, 60)
        assert poisoned
        assert [link._call for link in links] == calls
    records = [record for record in caplog.records if record.message == "invalid frame"]
    assert len(records) == 1
    assert records[0].exc_info
