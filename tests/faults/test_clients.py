"""Faults 34 to 37: clients that ask twice, go away, read slowly, or are too many."""

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest

from outrider.client import Delta, OutriderClient
from outrider.errors import DeadlineExceeded, DuplicateRequest, Overloaded, SessionBusy
from outrider.parameters import SamplingParameters
from tests.faults.history import check, read_log, watch
from tests.faults.scene import Scene, asking, plain


async def test_fault_34_the_same_request_id_again(scene: Scene) -> None:
    request = asking()
    await scene.learn(request)
    first = await watch(scene.client, request)
    second = await watch(scene.client, request)
    await read_log(scene.client, second)
    check([first, second], plain)
    other = replace(request, parameters=SamplingParameters(seed=10, max_tokens=120))
    assert isinstance((await watch(scene.client, other)).error, DuplicateRequest)


async def test_fault_34_the_same_request_id_at_once(scene: Scene) -> None:
    request = asking(seed=21)
    await scene.learn(request)
    one, two = scene.stack.orchestrators
    async with (
        scene.stack.client(one.address, max_attempts=1) as first,
        scene.stack.client(two.address, max_attempts=1) as second,
    ):
        records = await asyncio.gather(*(watch(client, request) for client in (first, second, first, second)))
    won = [record for record in records if record.error is None]
    assert won
    assert all(isinstance(record.error, SessionBusy) for record in records if record.error)
    for record in won:
        await read_log(scene.client, record)
    check(records, plain)


@pytest.mark.parametrize("how", ["cancel", "close", "deadline"])
async def test_fault_35_cancel_and_deadline_free_the_kv_cache_on_both_workers(scene: Scene, how: str) -> None:
    request = asking(num_tokens=1500, session_id=f"freed-{how}")
    began = asyncio.Event()

    async def follow() -> None:
        async with aclosing(scene.client.generate(request, timeout_s=1.0 if how == "deadline" else 30)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    began.set()
                    if how == "close":
                        return

    task = asyncio.create_task(follow())
    await asyncio.wait_for(began.wait(), 10)
    if how == "cancel":
        assert await scene.client.cancel(f"freed-{how}")
    if how == "deadline":
        with pytest.raises(DeadlineExceeded):
            await task
    else:
        await asyncio.wait_for(task, 10)
    await scene.freed()
    session = await scene.client.get_session(f"freed-{how}")
    assert 0 < session.committed_len - session.prompt_len < 1500


@pytest.mark.slow
async def test_fault_36_a_slow_reader_holds_up_itself_and_nobody_else(scene: Scene) -> None:
    # Log-probabilities make deltas of a kilobyte, so that what the transport holds is soon full.
    slow = replace(
        asking(num_tokens=1800, session_id="slow"),
        parameters=SamplingParameters(seed=9, max_tokens=1800, logprobs=16),
    )
    # Without probing for bandwidth the transport holds 64 kB, as over a link that is no faster than that.
    narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
    addresses = [proxy.address for proxy in scene.stack.to_orchestrators]
    async with (
        OutriderClient(addresses, connect=lambda address: grpc.aio.insecure_channel(address, narrow)) as client,
        aclosing(client.generate(slow, timeout_s=60)) as stream,
    ):
        await anext(stream)
        lengths = [-1, 0]
        async with asyncio.timeout(20):
            while lengths[-1] != lengths[-2]:
                await scene.survive_beside(asking())
                lengths.append((await scene.client.get_session("slow")).committed_len)
        # It stands still, far from its end; it is not lost: whoever reads on gets the rest.
        assert 0 < lengths[-1] < 1200
        num = 0
        async for event in stream:
            num += len(event.token_ids) if isinstance(event, Delta) else 0
            if num > lengths[-1] + 200:
                break
    await scene.freed()


async def test_fault_37_overload(scene: Scene) -> None:
    async with (
        scene.stack.another(
            OUTRIDER_MAX_ACTIVE_REQUESTS="2", OUTRIDER_MAX_QUEUED_REQUESTS="3", OUTRIDER_MAX_QUEUE_S="20"
        ) as process,
        scene.stack.client(process.address, max_attempts=1) as client,
    ):
        requests = [asking(seed=50 + number, num_tokens=60) for number in range(12)]
        await scene.learn(*requests)
        began = time.monotonic()
        records = await asyncio.gather(*(watch(client, request) for request in requests))
        assert time.monotonic() - began < 20
        refused = [record for record in records if record.error is not None]
        assert len(refused) == 12 - 5
        for record in refused:
            assert isinstance(record.error, Overloaded)
            assert record.error.retry_after_s > 0
        check(records, plain)
    # A client that minds what it is told gets through.
    async with (
        scene.stack.another(OUTRIDER_MAX_ACTIVE_REQUESTS="2", OUTRIDER_MAX_QUEUED_REQUESTS="0") as process,
        scene.stack.client(process.address) as patient,
    ):
        records = await asyncio.gather(*(watch(patient, replace(item, request_id="")) for item in requests[:5]))
        assert all(record.error is None for record in records)
        check(records, plain)
