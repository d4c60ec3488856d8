"""Attacks 4 and 7: what one session causes ends that session; only a model that runs no pass any more ends an engine.

Errors are put into the models and the code behind real servicers: no request is known that causes one any more.
"""

import asyncio
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.drafters.ngram import NgramDrafter
from outrider.lm.model import SessionStep
from outrider.local.process import ProcessSpec, ServiceProcess
from outrider.parameters import SamplingParameters
from outrider.tokens import Base, NodeKind, ProposalNode
from outrider.v1 import draft_pb2_grpc
from target_service.engine.engine import Engine as TargetEngine
from target_service.engine.passes import Passes
from target_service.engine.request import Request
from target_service.engine.requests import Requests
from target_service.engine.rounds import decide_all
from tests.attacks.failing_model import FATAL
from tests.draft_service.conftest import (
    LIMITS,
    TIMEOUT_S,
    DraftClient,
    advance_frame,
    close_frame,
    open_frame,
    running_draft,
)
from tests.drafters.models import model_drafter
from tests.target_service.conversation import Caller, target

SAMPLED = SamplingParameters(seed=7, max_tokens=24, ignore_eos=True)
POISON = [1, 2, 3, 9]
"""The prompt of the session that causes an error."""
PROMPTS = {handle: [handle % 8, 3, 5] * handle for handle in range(1, 6)}

Break = Callable[[pytest.MonkeyPatch, TargetEngine], None]


def is_poison(request: Request) -> bool:
    return request.resident.token_ids[: len(POISON)] == POISON


def in_the_pass(patch: pytest.MonkeyPatch, engine: TargetEngine) -> None:
    """Sessions before the poisoned one have been run when the pass fails; those behind it have not."""
    run = engine._model._run  # type: ignore[attr-defined]

    def poisoned(step: SessionStep) -> object:
        # Its pages have been taken, and in part been written to.
        output = run(step)
        if step.span.start == 0 and list(step.span.token_ids[: len(POISON)]) == POISON:
            raise RuntimeError("device-side assert")
        return output

    patch.setattr(engine._model, "_run", poisoned)


def in_judging(patch: pytest.MonkeyPatch, engine: TargetEngine) -> None:
    def poisoned(rounds: Sequence[Any], *more: Any) -> Any:
        if any(is_poison(item.request) for item in rounds):
            raise RuntimeError("selected index k out of range")
        return decide_all(rounds, *more)

    patch.setattr("target_service.engine.passes.decide_all", poisoned)


def in_concluding(patch: pytest.MonkeyPatch, engine: TargetEngine) -> None:
    conclude = Passes._conclude

    def poisoned(self: Passes, share: Any, *more: Any) -> None:
        conclude(self, share, *more)
        if is_poison(share.request) and share.request.num_output > 3:
            raise IndexError("list index out of range")

    patch.setattr(Passes, "_conclude", poisoned)


def in_planning(patch: pytest.MonkeyPatch, engine: TargetEngine) -> None:
    is_ready = Request.is_ready

    def poisoned(self: Request, now: float) -> bool:
        if is_poison(self) and self.num_output > 3:
            raise OverflowError("math range error")
        return is_ready(self, now)

    patch.setattr(Request, "is_ready", poisoned)


def in_a_command(patch: pytest.MonkeyPatch, engine: TargetEngine) -> None:
    span = Requests.span

    def poisoned(self: Requests, request: Request, span_: Any) -> None:
        span(self, request, span_)
        if list(span_.token_ids) == POISON:
            raise KeyError("no such thing")

    patch.setattr(Requests, "span", poisoned)


async def speculated(caller: Caller, handle: int, prompt: Sequence[int], truth: Sequence[int]) -> list[int]:
    """Returns the output of a request that is given proposals with branches, of which some are right."""
    opened = await caller.open(handle, prompt, SAMPLED, num_speculative_tokens=4, stop_token_ids=())
    await caller.span(handle, opened.opened.cached_len, prompt[opened.opened.cached_len :])
    output: list[int] = []
    async for verdict in caller.verdicts(handle):
        output += verdict.token_ids
        line = [*truth[len(output) : len(output) + 3], 1]
        nodes = [ProposalNode(depth, token_id, NodeKind.GUESSED) for depth, token_id in enumerate(line)]
        nodes += [ProposalNode(0, (line[0] + 1) % 12, NodeKind.GUESSED)]
        await caller.propose(handle, Base(len(prompt) + len(output), 1), nodes)
    await caller.send(handle, close={"committed_len": len(prompt) + len(output)})
    return output


@pytest.mark.parametrize("broken", [in_the_pass, in_judging, in_concluding, in_planning, in_a_command])
async def test_attack_04_an_exception_of_one_session_ends_that_session(
    broken: Break, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with target(adaptive_speculation=False) as (engine, caller):
        truth = {
            handle: await caller.plain(handle, prompt, SAMPLED, stop_token_ids=()) for handle, prompt in PROMPTS.items()
        }
        broken(monkeypatch, engine)

        async def poisoned() -> str:
            await caller.open(99, POISON, SAMPLED, stop_token_ids=())
            await caller.span(99, 0, POISON)
            while (frame := await caller.receive(99)).WhichOneof("frame") == "verdict":
                pass
            return frame.refusal.reason

        for turn in range(2):
            first = 100 * (turn + 1)
            reason, *outputs = await asyncio.gather(
                poisoned(),
                *(speculated(caller, first + number, prompt, truth[number]) for number, prompt in PROMPTS.items()),
            )
            assert reason == "REQUEST_FAILED"
            assert outputs == list(truth.values())
        assert engine.host.loop.is_alive
        monkeypatch.undo()
        assert len(await caller.plain(1000, POISON, SAMPLED, stop_token_ids=())) == 24
        await idle(engine)
        # No page is held by anyone, and none has two holders.
        assert engine._model.kv_usage.num_held == 0
    failures = [record for record in caplog.records if record.message == "a request failed"]
    assert len(failures) == 1
    assert failures[0].exc_info


async def idle(engine: TargetEngine) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while engine.num_requests:
            await asyncio.sleep(0.005)


async def test_attack_04_a_pass_that_is_too_large_is_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with target() as (engine, caller):
        truth = [await caller.plain(handle, prompt, SAMPLED, stop_token_ids=()) for handle, prompt in PROMPTS.items()]
        forward = engine._model.forward
        sizes: list[int] = []

        def limited(steps: Sequence[SessionStep]) -> object:
            sizes.append(len(steps))
            if len(steps) > 2:
                raise MemoryError
            return forward(steps)

        monkeypatch.setattr(engine._model, "forward", limited)
        outputs = await asyncio.gather(
            *(caller.plain(100 + number, prompt, SAMPLED, stop_token_ids=()) for number, prompt in PROMPTS.items())
        )
        assert outputs == truth
        assert max(sizes) > 2


async def test_attack_04_a_device_that_fails_ends_the_engine_and_blames_no_session() -> None:
    async with target() as (engine, caller):
        for handle, prompt in PROMPTS.items():
            await caller.open(handle, prompt, SAMPLED.replace(max_tokens=10_000), stop_token_ids=())
            await caller.span(handle, 0, prompt)
        await caller.receive(1)

        def fails(steps: Sequence[SessionStep]) -> object:
            raise RuntimeError("an illegal memory access was encountered")

        engine._model.forward = fails  # type: ignore[method-assign]
        async with asyncio.timeout(TIMEOUT_S):
            while engine.host.loop.is_alive:
                await asyncio.sleep(0.005)
        for handle in PROMPTS:
            frames = [await caller.receive(handle) for _ in range(caller.num_waiting(handle))]
            assert not [frame for frame in frames if frame.WhichOneof("frame") == "refusal"]


async def test_attack_07_an_advance_without_tokens_is_no_news() -> None:
    async with running_draft(model_drafter()) as running:
        client = running.stream()
        await client.open(parameters=SAMPLED, prompt_len=1)
        other, _ = await client.open("other", parameters=SAMPLED, prompt_len=1)
        for start, token_ids in ((0, [1, 2]), (2, [])):
            frame = advance_frame(1, token_ids, start)
            frame.advance.lookahead = 16
            await client.send(frame)
            assert (await client.receive(1)).WhichOneof("frame") == "proposal"
        assert len(await client.drafted(other, [1, 2])) == 4
        assert running.engine.loop.is_alive


class Poisoned(NgramDrafter):
    """Raises where a session of the name `poison` is concerned, in the method `where`; or in every one."""

    where = ""
    is_broken = False

    def _check(self, where: str, session_id: str) -> None:
        if self.is_broken or (session_id == "poison" and where == self.where):
            raise ZeroDivisionError(where)

    def resume(self, session_id: str) -> int:
        self._check("resume", session_id)
        return super().resume(session_id)

    def step(self, proposals: Sequence[Any]) -> int:
        for proposal in proposals:
            self._check("step", proposal.session_id)
        return super().step(proposals)

    def truncate(self, session_id: str, length: int) -> None:
        self._check("truncate", session_id)
        super().truncate(session_id, length)

    def advance(self, proposal: Any, token_ids: Sequence[int]) -> bool:
        self._check("advance", proposal.session_id)
        return super().advance(proposal, token_ids)

    def end(self, proposal: Any) -> None:
        self._check("end", proposal.session_id)
        super().end(proposal)

    def forget(self, session_id: str) -> None:
        self._check("forget", session_id)
        super().forget(session_id)


def poisoned_drafter() -> Poisoned:
    return Poisoned(shortest=1, longest=3, budget_bytes=1 << 24, max_session_len=4096)


@pytest.mark.parametrize("where", ["resume", "step", "truncate", "advance", "end", "forget"])
async def test_attack_07_an_exception_of_one_session_ends_that_session(where: str) -> None:
    drafter = poisoned_drafter()
    drafter.where = where
    limits = dataclasses.replace(LIMITS, idle_ttl_s=0.01)
    async with running_draft(drafter, limits) as running:
        client = running.stream()
        other, _ = await client.open("other")
        for fencing_token in (1, 2):
            await client.send(
                open_frame(50, "poison", fencing_token=fencing_token),
                *(advance_frame(50, [1, 2, 1], start, fencing_token=fencing_token) for start in (0, 3, 1)),
            )
            assert await client.drafted(other, [1, 2, 3, 1]) == (2, 3, 1, 2)
            assert await client.drafted(other, [5], 1) == ()
            await client.send(close_frame(50))
        async with asyncio.timeout(TIMEOUT_S):
            while running.engine.load.num_cached_sessions > 1:
                await asyncio.sleep(0.01)
        refusals = [frame for frame in client._frames[50] if frame.WhichOneof("frame") == "refusal"]
        assert bool(refusals) == (where in ("resume", "step", "truncate", "advance"))
        assert running.engine.loop.is_alive


async def test_attack_07_a_drafter_that_fails_ends_the_engine_and_blames_no_session() -> None:
    drafter = poisoned_drafter()
    async with running_draft(drafter) as running:
        client = running.stream()
        handle, _ = await client.open()
        await client.drafted(handle, [1, 2, 3, 1])
        drafter.is_broken = True
        await client.send(advance_frame(handle, [1], 4))
        async with asyncio.timeout(TIMEOUT_S):
            while running.engine.loop.is_alive:
                await asyncio.sleep(0.005)
        assert not client._frames[handle]


async def fail(address: str, name: str) -> None:
    """Has a worker run the token at which its device breaks, and waits for the end of its stream."""
    async with grpc.aio.insecure_channel(address) as channel:
        if name == "draft":
            client = DraftClient(draft_pb2_grpc.DraftServiceStub(channel).Draft())
            handle, _ = await client.open()
            await client.send(advance_frame(handle, [1, FATAL]))
            with pytest.raises((grpc.aio.AioRpcError, AssertionError)):
                await client.receive(handle)
        else:
            caller = Caller(channel)
            await caller.open(1, [1, FATAL], SAMPLED)
            await caller.span(1, 0, [1, FATAL])
            # It is not closed from here: that would end it without an error, if it came first.
            with pytest.raises(grpc.aio.AioRpcError):
                await caller.ended()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft", "target"])
async def test_attack_07_a_process_whose_device_fails_ends_with_an_error(name: str, tmp_path: Path) -> None:
    """So that Kubernetes starts it again, and nobody takes it for one that was told to end."""
    model = "markov:vocabulary=12,order=2,seed=3"
    environment = {"OUTRIDER_MODEL": model, "OUTRIDER_DRAFTER": "model", "OUTRIDER_ADDRESS": "127.0.0.1:0"}
    process = ServiceProcess(ProcessSpec(name, f"tests.attacks.failing_{name}", environment), tmp_path)
    process.start()
    try:
        await process.wait_ready(60)
        await fail(process.address, name)
        await process.wait_ended()
        assert process.exit_code == os.EX_SOFTWARE
    finally:
        process.kill()
