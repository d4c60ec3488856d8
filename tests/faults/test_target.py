"""Faults 11 to 15: another target continues from the committed log; no token is lost, and none comes twice."""

import asyncio
from dataclasses import replace

import pytest

from outrider.errors import Fenced, Unavailable
from outrider.local.process import ServiceProcess
from tests.faults.history import check, monitored, read_log, watch
from tests.faults.scene import Scene, asking, load_of, plain
from tests.faults.stack import resume, stop


# In the middle in every run; everywhere in `make faults`.
@pytest.mark.parametrize("after", [37, *(pytest.param(after, marks=pytest.mark.slow) for after in (0, 1, 118))])
async def test_fault_11_killed_before_during_and_after_a_verification(scene: Scene, after: int) -> None:
    async def strike() -> None:
        try:
            async with asyncio.timeout(0.5 if is_near_end else None):
                (await scene.serving())[1].kill()
        except TimeoutError:
            # The target, which runs ahead, may be done already; but only near the end.
            assert is_near_end

    is_near_end = after > 100
    # Elsewhere so long a request that the target is not done before it has been found.
    request = asking() if is_near_end else asking(num_tokens=600)
    async with monitored(scene.stack.redis.url) as commits:
        record = await scene.survive(strike, after=after, request=request)
    commits.check()
    assert record.longest_gap_s < 5


@pytest.mark.slow
async def test_fault_12_stopped_then_returns_as_a_zombie(scene: Scene) -> None:
    async def strike() -> None:
        victim = (await scene.serving())[1]
        stop(victim)

        async def rise() -> None:
            # Long after it should have been found out.
            await asyncio.sleep(8.0)
            resume(victim)

        rising.append(asyncio.create_task(rise()))

    rising: list[asyncio.Task[None]] = []
    # Long enough for the zombie to be back, and to say what it has to, while the stream goes on elsewhere.
    request = asking(num_tokens=1800)
    async with monitored(scene.stack.redis.url) as commits:
        record = await scene.survive(strike, request=request, within_s=40)
    await asyncio.gather(*rising)
    commits.check()
    assert 1.0 < record.longest_gap_s < 6


async def test_fault_12_a_partitioned_owner_is_fenced_off_by_the_worker_too(scene: Scene) -> None:
    """Two orchestrators open one session on one target: the one with the older lease is refused there."""
    target = scene.stack.targets[0]
    async with (
        scene.stack.another(OUTRIDER_TARGETS=target.address) as other,
        scene.stack.client(other.address) as second,
        scene.stack.another(OUTRIDER_TARGETS=target.address) as one,
        scene.stack.client(one.address, max_attempts=1) as first,
    ):
        request = asking(num_tokens=400)
        await scene.learn(request)
        older = asyncio.create_task(watch(first, request, timeout_s=20))
        async with asyncio.timeout(10):
            while not (await load_of(target)).num_active_sessions:
                await asyncio.sleep(0.01)
        newer = await watch(second, replace(request, resume_offset=0), timeout_s=20)
        assert isinstance((await older).error, Fenced)
        check([newer], plain)


@pytest.mark.slow
async def test_fault_13_draining_during_a_rolling_update(scene: Scene) -> None:
    drained: list[ServiceProcess] = []

    async def strike() -> None:
        drained.append((await scene.serving())[1])
        drained[0].terminate()

    # Longer than the drain waits, so that it is handed over.
    request = asking(num_tokens=1200)
    await scene.learn(request)
    record = await watch(scene.client, request, after=30, strike=strike)
    await drained[0].wait_ended()
    assert drained[0].exit_code == 0
    await scene.stack.heal()
    await read_log(scene.client, record)
    check([record], plain)
    assert record.longest_gap_s < 2


@pytest.mark.slow
async def test_fault_14_kv_memory_exhausted(scene: Scene) -> None:
    # All sessions together take twice the pages that a target has.
    requests = [asking(seed=100 + number, num_tokens=200) for number in range(24)]
    await scene.learn(*requests)
    records = await asyncio.gather(*(watch(scene.client, request) for request in requests))
    for record in records:
        await read_log(scene.client, record)
    check(records, plain)
    assert all(record.num_terminal == 1 for record in records)
    loads = [await load_of(process) for process in scene.stack.targets]
    assert sum(load.num_preemptions for load in loads) > 0
    assert all(load.kv_used_bytes == 0 for load in loads)


async def test_fault_15_all_gone_then_resumable(scene: Scene) -> None:
    def strike() -> None:
        for process in scene.stack.targets:
            process.kill()

    request = asking()
    await scene.learn(request)
    client = scene.stack.client(scene.stack.orchestrators[0].address, max_attempts=1)
    async with client:
        record = await watch(client, request, after=30, strike=strike, timeout_s=30)
    assert isinstance(record.error, Unavailable)
    assert 30 <= len(record.token_ids) < 120
    await scene.stack.heal()
    await scene.resumed(record)
