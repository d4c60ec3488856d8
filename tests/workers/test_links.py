"""A link outlives everything that its worker does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from orchestrator.settings import OrchestratorSettings
from outrider.errors import OutriderError, Overloaded
from outrider.v1 import target_pb2, worker_pb2
from outrider.workers.links import TARGET, StreamKind, WorkerLink
from tests.orchestrator.scripted import ScriptedTarget, ScriptedWorker


class Receiving:
    """Takes frames, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.frames: list[Any] = []
        self.lost: list[OutriderError] = []
        self.changed = asyncio.Event()

    def on_frame(self, frame: Any) -> None:
        if self.error:
            raise self.error
        self.frames.append(frame)
        self.changed.set()

    def on_lost(self, error: OutriderError) -> None:
        self.lost.append(error)
        self.changed.set()

    async def heard(self) -> None:
        async with asyncio.timeout(10):
            await self.changed.wait()
        self.changed.clear()


async def until(link: WorkerLink, *, up: bool) -> None:
    async with asyncio.timeout(10):
        while link.is_up != up:
            link.changed.clear()
            await link.changed.wait()


@asynccontextmanager
async def linked(worker: ScriptedWorker, kind: StreamKind = TARGET) -> AsyncIterator[WorkerLink]:
    link = WorkerLink(worker.address, kind, OrchestratorSettings(keepalive_s=1))
    task = asyncio.create_task(link.run())
    try:
        await until(link, up=True)
        yield link
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


OPEN = target_pb2.VerifyOpen(session_id="s", committed_len=3, fencing_token=1)


async def test_frames_reach_their_sessions(target: ScriptedTarget) -> None:
    async with linked(target) as link:
        one, other = Receiving(), Receiving()
        handles = [link.open(one), link.open(other)]
        handles[1].send(open=OPEN)
        await other.heard()
        assert one.frames == []
        assert other.frames[0].handle == handles[1].number
        handles[1].close(close=target_pb2.VerifyClose())
        await target.saw("close")
        assert link.num_sessions == 1


async def test_a_broken_stream_is_told_once_and_mended(target: ScriptedTarget) -> None:
    async with linked(target) as link:
        receiving = Receiving()
        link.open(receiving).send(open=OPEN)
        await receiving.heard()
        target.break_streams()
        await receiving.heard()
        assert [error.reason for error in receiving.lost] == ["UNAVAILABLE"]
        await until(link, up=True)
        assert link.num_sessions == 0


async def test_a_worker_that_takes_nothing_loses_the_stream_and_gets_another(
    target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with linked(target) as link:
        receiving = Receiving()
        handle = link.open(receiving)

        def put(*frames: Any) -> None:
            raise Overloaded("full", retry_after_s=1)

        monkeypatch.setattr(link._outbox, "put", put)
        handle.send(open=OPEN)
        await receiving.heard()
        assert len(receiving.lost) == 1
        await until(link, up=True)


async def test_a_frame_without_sense_costs_one_session_and_no_stream(target: ScriptedTarget) -> None:
    async with linked(target) as link:
        wrong, right = Receiving(ValueError("no number")), Receiving()
        wrong_handle, right_handle = link.open(wrong), link.open(right)
        wrong_handle.send(open=OPEN)
        await wrong.heard()
        assert len(wrong.lost) == 1
        right_handle.send(open=OPEN)
        await right.heard()
        assert right.lost == []
        assert link.is_up


async def test_a_worker_that_hangs_is_given_up(target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.workers.load_polling._TIMEOUT_S", 0.1)
    async with linked(target) as link:
        receiving = Receiving()
        link.open(receiving)
        target.answers_load = False
        await receiving.heard()
        assert "does not answer" in receiving.lost[0].message
        target.answers_load = True
        await until(link, up=True)


async def test_a_restart_brings_the_new_identity(target: ScriptedTarget) -> None:
    async with linked(target) as link:
        target.load.draining = True
        async with asyncio.timeout(10):
            while not link.load.draining:
                await asyncio.sleep(0.01)
        await target.die()
        await until(link, up=False)
        target.info.incarnation = "t0-2"
        target.load.draining = False
        await target.start()
        await until(link, up=True)
        assert link.info is not None
        assert link.info.incarnation == "t0-2"
        assert not link.load.draining


async def test_a_worker_whose_load_cannot_even_be_asked_for_is_given_up(
    target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is no status ended the look-out for good: a worker that hung later was never noticed."""

    def unaskable() -> None:
        raise ValueError("no question")

    async with linked(target) as link:
        receiving = Receiving()
        link.open(receiving)
        with monkeypatch.context() as patch:
            patch.setattr(worker_pb2, "GetLoadRequest", unaskable)
            await receiving.heard()
        assert "does not answer" in receiving.lost[0].message
        await until(link, up=True)


class Raising(Receiving):
    """Raises the given error."""

    def on_lost(self, error: OutriderError) -> None:
        super().on_lost(error)
        raise ValueError("cannot take that either")


async def test_a_session_that_cannot_be_told_keeps_no_other_from_being_told(target: ScriptedTarget) -> None:
    async with linked(target) as link:
        wrong, right = Raising(ValueError("no number")), Receiving()
        wrong_handle, _ = link.open(wrong), link.open(right)
        wrong_handle.send(open=OPEN)
        await wrong.heard()
        assert right.lost == []
        link.open(Raising())
        target.break_streams()
        await right.heard()
        await until(link, up=True)
