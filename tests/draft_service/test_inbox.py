import asyncio
import threading

import pytest

from draft_service.inbox import Inbox


async def test_items_come_in_order_and_all_at_once() -> None:
    inbox: Inbox[int] = Inbox(limit=3)
    for number in range(3):
        await inbox.put(number)
    inbox.put_now(3)
    assert inbox.take(wait=True) == [0, 1, 2, 3]
    assert inbox.take(wait=False) == []
    assert inbox.take(wait=True, timeout_s=0.01) == []


async def test_writers_wait_for_room_and_none_is_forgotten() -> None:
    inbox: Inbox[int] = Inbox(limit=2)
    taken: list[int] = []

    def read() -> None:
        while len(taken) < 100:
            items = inbox.take(wait=True)
            assert len(items) <= 2
            taken.extend(items)

    reader = threading.Thread(target=read)
    reader.start()
    async with asyncio.timeout(10):
        await asyncio.gather(*(inbox.put(number) for number in range(100)))
    await asyncio.to_thread(reader.join)
    assert sorted(taken) == list(range(100))


async def test_a_close_ends_the_wait() -> None:
    inbox: Inbox[int] = Inbox(limit=1)
    waiting = asyncio.create_task(asyncio.to_thread(inbox.take, wait=True))
    await asyncio.sleep(0)
    inbox.close()
    assert await waiting == []
    assert inbox.closed


async def test_a_loop_that_ended_while_waiting_does_not_break_the_reader() -> None:
    inbox: Inbox[int] = Inbox(limit=1)

    async def overfill() -> None:
        await inbox.put(1)
        await asyncio.wait_for(inbox.put(2), 0.01)

    def run() -> None:
        with pytest.raises(TimeoutError):
            asyncio.run(overfill())

    await asyncio.to_thread(run)
    assert inbox.take(wait=False) == [1]
