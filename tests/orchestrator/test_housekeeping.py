"""Housekeeping with a real store and scripted workers that have a real list of sessions."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from orchestrator.housekeeping import Housekeeper
from tests.orchestrator.election.candidate import until
from tests.orchestrator.scripted import ScriptedDraft, ScriptedTarget
from tests.orchestrator.stage import Orchestrator, asking, orchestrating


@asynccontextmanager
async def keeping_house(orchestrator: Orchestrator, interval_s: float = 0.05) -> AsyncIterator[Housekeeper]:
    settings = orchestrator.settings.model_copy(update={"housekeeping_interval_s": interval_s})
    housekeeper = Housekeeper(orchestrator.store, orchestrator.replicas, settings, orchestrator.metrics)
    await housekeeper.start()
    try:
        yield housekeeper
    finally:
        await housekeeper.stop()


def reading(orchestrator: Orchestrator, name: str) -> float:
    return orchestrator.registry.get_sample_value(f"outrider_{name}") or 0.0


async def test_workers_forget_a_session_that_is_deleted(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    async with orchestrating(session_store_url, (target,), (draft,)) as orchestrator:
        kept, deleted = uuid.uuid4().hex, uuid.uuid4().hex
        for session_id in (kept, deleted):
            await orchestrator.events(asking(session_id=session_id))
        names = {session_id: await worker_key(orchestrator, session_id) for session_id in (kept, deleted)}
        foreign = "named-by-somebody-else"
        for worker in (target, draft):
            worker.idle = [*names.values(), foreign]
        await orchestrator.store.delete("default", deleted)
        async with keeping_house(orchestrator):
            await until(lambda: all(worker.idle == [names[kept], foreign] for worker in (target, draft)))
            assert reading(orchestrator, "is_housekeeper") == 1
            await until(lambda: reading(orchestrator, "sessions_forgotten_total") == 2)
        assert reading(orchestrator, "is_housekeeper") == 0


async def test_a_session_that_was_made_anew_is_another_one(session_store_url: str, target: ScriptedTarget) -> None:
    async with orchestrating(session_store_url, (target,)) as orchestrator:
        session_id = uuid.uuid4().hex
        await orchestrator.events(asking(session_id=session_id, plain=True))
        before = await worker_key(orchestrator, session_id)
        await orchestrator.store.delete("default", session_id)
        await orchestrator.events(asking(session_id=session_id, plain=True))
        now = await worker_key(orchestrator, session_id)
        target.idle = [before, now]
        housekeeper = Housekeeper(
            orchestrator.store, orchestrator.replicas, orchestrator.settings, orchestrator.metrics
        )
        assert await housekeeper.round() == 1
        assert target.idle == [now]
        assert await housekeeper.round() == 0


async def test_of_two_orchestrators_one_keeps_house(session_store_url: str, target: ScriptedTarget) -> None:
    async with (
        orchestrating(session_store_url, (target,)) as one,
        orchestrating(session_store_url, (target,)) as other,
        keeping_house(one),
    ):
        await until(lambda: reading(one, "is_housekeeper") == 1)
        async with keeping_house(other):
            num_looks = target.num_looks
            await until(lambda: target.num_looks > num_looks + 3)
            assert reading(other, "is_housekeeper") == 0


async def test_a_worker_that_does_not_know_how_is_left_alone(session_store_url: str, target: ScriptedTarget) -> None:
    target.idle = None
    async with orchestrating(session_store_url, (target,)) as orchestrator, keeping_house(orchestrator):
        await until(lambda: target.num_looks > 2)
        assert reading(orchestrator, "is_housekeeper") == 1


async def worker_key(orchestrator: Orchestrator, session_id: str) -> str:
    record = await orchestrator.store.get("default", session_id)
    assert record is not None
    return record.worker_key


async def test_a_worker_that_goes_while_it_is_asked_ends_nothing(
    session_store_url: str, target: ScriptedTarget
) -> None:
    target.is_asked_in_vain = True
    async with orchestrating(session_store_url, (target,)) as orchestrator:
        housekeeper = Housekeeper(
            orchestrator.store, orchestrator.replicas, orchestrator.settings, orchestrator.metrics
        )
        await until(lambda: orchestrator.replicas.targets[0].is_up)
        asked = asyncio.create_task(housekeeper.round())
        await until(lambda: target.num_looks == 1)
        target.break_streams()
        assert await asked == 0
        target.is_asked_in_vain = False
        await until(lambda: orchestrator.replicas.targets[0].is_up)
        target.idle = ["named-by-somebody-else"]
        assert await housekeeper.round() == 0
        assert target.num_looks == 2
