"""Each writer has a queue of its own; the reader takes of each in turn, for a bounded time."""

import asyncio
import threading
import time

import pytest

from outrider.serving.inbox import Inbox, ReadBudget


def all_of(inbox: Inbox[int]) -> list[int]:
    """Returns everything that waits."""
    items: list[int] = []
    inbox.read(items.append)
    return items


async def test_the_items_of_a_writer_come_in_order() -> None:
    inbox: Inbox[int] = Inbox(max_items=3)
    for number in range(3):
        await inbox.put("a", number)
    inbox.put_now("a", 3)
    assert len(inbox) == 4
    assert all_of(inbox) == [0, 1, 2, 3]
    assert all_of(inbox) == []
    inbox.wait(timeout_s=0.01)


async def test_writers_are_read_in_turn() -> None:
    inbox: Inbox[int] = Inbox()
    for number in range(100):
        await inbox.put("a", number)
    await inbox.put("b", 1000)
    await inbox.put("b", 1001)
    assert all_of(inbox)[:5] == [0, 1000, 1, 1001, 2]
    # However few are taken at a time.
    for writer in [*range(10)] * 10:
        await inbox.put(writer, writer)
    taken: list[int] = []
    while len(taken) < 20:
        inbox.read(taken.append, ReadBudget(1, 1))
    assert sorted(taken) == sorted([*range(10)] * 2)


async def test_a_read_ends_in_time() -> None:
    inbox: Inbox[float] = Inbox()
    for _ in range(50):
        await inbox.put("a", 0.005)
    inbox.read(time.sleep, ReadBudget(1000, 0.02))
    assert 30 <= len(inbox) < 50


async def test_a_read_takes_no_more_than_it_may() -> None:
    inbox: Inbox[int] = Inbox()
    for number in range(100):
        await inbox.put("a", number)
    inbox.read(lambda number: None, ReadBudget(20, 10))
    assert len(inbox) == 80
    # Of 20 ms with 2 sessions; and what a very short pass leaves.
    assert ReadBudget.beside(0.02, 2) == ReadBudget(160, 0.02)
    assert ReadBudget.beside(0.0, 0) == ReadBudget(64, 0.01)


async def test_what_is_not_wanted_now_keeps_its_place() -> None:
    inbox: Inbox[int] = Inbox()
    for number in (2, 4, 5, 6):
        await inbox.put("a", number)
    await inbox.put("b", 7)
    await inbox.put("c", 8)
    taken: list[int] = []
    inbox.read(taken.append, is_wanted=lambda number: number % 2 == 0)
    assert taken == [2, 8, 4]
    assert sorted(all_of(inbox)) == [5, 6, 7]


async def test_writers_wait_for_room_and_none_is_forgotten() -> None:
    inbox: Inbox[int] = Inbox(max_items=2)
    taken: list[int] = []

    def read() -> None:
        while len(taken) < 100:
            inbox.wait()
            assert len(inbox) <= 2
            inbox.read(taken.append, ReadBudget(1, 1))

    reader = threading.Thread(target=read)
    reader.start()
    async with asyncio.timeout(10):
        await asyncio.gather(*(inbox.put("a", number) for number in range(100)))
    await asyncio.to_thread(reader.join)
    assert sorted(taken) == list(range(100))


async def test_bytes_are_bounded_too() -> None:
    inbox: Inbox[int] = Inbox(max_bytes=10)
    await inbox.put("a", 1, num_bytes=9)
    await inbox.put("a", 2, num_bytes=1000)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(inbox.put("a", 3, num_bytes=1), 0.01)
    await asyncio.wait_for(inbox.put("b", 4, num_bytes=1), 1)
    waiting = asyncio.create_task(inbox.put("a", 3, num_bytes=1))
    await asyncio.sleep(0)
    assert all_of(inbox) == [1, 4, 2]
    await waiting
    assert all_of(inbox) == [3]


async def test_a_close_ends_the_wait() -> None:
    inbox: Inbox[int] = Inbox()
    waiting = asyncio.create_task(asyncio.to_thread(inbox.wait))
    await asyncio.sleep(0)
    inbox.close()
    await waiting
    assert inbox.closed


async def test_a_loop_that_ended_while_waiting_does_not_break_the_reader() -> None:
    inbox: Inbox[int] = Inbox(max_items=1)

    async def overfill() -> None:
        await inbox.put("a", 1)
        await asyncio.wait_for(inbox.put("a", 2), 0.01)

    def run() -> None:
        with pytest.raises(TimeoutError):
            asyncio.run(overfill())

    await asyncio.to_thread(run)
    assert all_of(inbox) == [1]
