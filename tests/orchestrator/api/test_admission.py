import asyncio
from contextlib import AsyncExitStack

import pytest

from orchestrator.api.admission import Admission
from outrider.errors import Draining, Overloaded


async def test_turns_are_given_in_order_of_arrival() -> None:
    admission = Admission(1, 5, 10.0)
    order: list[int] = []

    async def take(number: int) -> None:
        async with admission.admit():
            order.append(number)

    async with admission.admit():
        tasks = [asyncio.create_task(take(number)) for number in range(3)]
        while admission.num_queued < 3:
            await asyncio.sleep(0)
        assert order == []
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]
    assert admission.num_queued == 0


async def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    admission = Admission(2, 0, 10.0)
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(admission.admit())
        with pytest.raises(Overloaded) as caught:
            async with admission.admit():
                pass
        assert caught.value.retry_after_s > 0
    async with admission.admit():
        pass


async def test_a_turn_that_does_not_come_in_time() -> None:
    admission = Admission(1, 1, 0.02)
    async with admission.admit():
        with pytest.raises(Overloaded):
            async with admission.admit():
                pass
        assert admission.num_queued == 0


async def test_who_leaves_the_queue_takes_no_place() -> None:
    admission = Admission(1, 1, 10.0)

    async def take() -> None:
        async with admission.admit():
            pass

    async with admission.admit():
        waiting = asyncio.create_task(take())
        while admission.num_queued < 1:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert admission.num_queued == 0
    async with asyncio.timeout(1), admission.admit():
        pass


async def test_a_closed_door() -> None:
    admission = Admission(1, 1, 1.0)
    admission.close()
    with pytest.raises(Draining):
        async with admission.admit():
            pass
