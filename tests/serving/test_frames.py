"""Coalescing, bounds, and writers in other threads."""

import asyncio
import threading

import grpc
import pytest

from outrider.errors import Fenced, Overloaded
from outrider.serving.frames import FrameOutbox
from outrider.v1.draft_pb2 import DraftRequest, DraftRequestFrame, DraftResponse, DraftResponseFrame, WorkerRefusal
from outrider.v1.draft_pb2_grpc import DraftServiceStub


def frame(handle: int, text: str = "") -> DraftResponseFrame:
    return DraftResponseFrame(handle=handle, refusal=WorkerRefusal(message=text))


def new_outbox(**limits: int) -> FrameOutbox[DraftResponseFrame, DraftResponse]:
    return FrameOutbox(lambda frames: DraftResponse(frames=frames), **limits)


async def drain(outbox) -> list[list[int]]:
    return [[frame.handle for frame in message.frames] async for message in outbox.messages()]


async def test_whatever_is_pending_leaves_as_one_message():
    outbox = new_outbox()
    reader = asyncio.create_task(drain(outbox))
    outbox.put(frame(1), frame(2))
    outbox.put(frame(3))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    outbox.put(frame(4))
    outbox.close()
    assert await reader == [[1, 2, 3], [4]]


async def test_messages_are_bounded_by_frames():
    outbox = new_outbox(max_frames_per_message=2)
    outbox.put(*(frame(handle) for handle in range(5)))
    outbox.close()
    assert await drain(outbox) == [[0, 1], [2, 3], [4]]


async def test_messages_are_bounded_by_bytes_and_a_larger_frame_goes_alone():
    outbox = new_outbox(max_message_bytes=100)
    outbox.put(frame(1, "x" * 40), frame(2, "x" * 40), frame(3, "x" * 200), frame(4))
    outbox.close()
    assert await drain(outbox) == [[1, 2], [3], [4]]


async def test_overflow_is_named_and_adds_nothing():
    outbox = new_outbox(max_pending=3)
    outbox.put(frame(1), frame(2))
    with pytest.raises(Overloaded):
        outbox.put(frame(3), frame(4))
    with pytest.raises(Overloaded):
        outbox.put_threadsafe(frame(3), frame(4))
    assert len(outbox) == 2
    outbox.close()
    assert await drain(outbox) == [[1, 2]]


async def test_an_error_ends_the_stream_at_once():
    outbox = new_outbox()
    outbox.put(frame(1))
    outbox.close(Fenced("a newer lease"))
    with pytest.raises(Fenced):
        await drain(outbox)


async def test_what_is_put_after_close_is_dropped():
    outbox = new_outbox()
    outbox.close()
    outbox.put(frame(1))
    outbox.put_threadsafe(frame(1))
    assert await drain(outbox) == []


async def test_frames_of_several_threads_arrive_all_and_in_each_threads_order():
    num_threads, num_frames = 4, 500
    outbox = new_outbox(max_pending=num_threads * num_frames)

    def write(thread: int) -> None:
        for number in range(num_frames):
            outbox.put_threadsafe(frame(thread * num_frames + number))

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(num_threads)]
    reader = asyncio.create_task(drain(outbox))
    for thread in threads:
        thread.start()
    await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
    outbox.close()
    handles = [handle for message in await asyncio.wait_for(reader, 10) for handle in message]
    assert sorted(handles) == list(range(num_threads * num_frames))
    for thread in range(num_threads):
        own = [handle for handle in handles if handle // num_frames == thread]
        assert own == sorted(own)


def test_a_thread_may_put_after_the_loop_has_ended():
    async def make():
        return new_outbox()

    outbox = asyncio.run(make())
    for number in range(3):
        outbox.put_threadsafe(frame(number))
    assert len(outbox) == 1, "none is kept behind the first, which found out"


async def test_an_outbox_feeds_a_real_stream(channel):
    outbox = FrameOutbox(lambda frames: DraftRequest(frames=frames))
    call = DraftServiceStub(channel).Draft(outbox.messages())
    outbox.put(DraftRequestFrame(handle=7))
    first = await call.read()
    assert [frame.handle for frame in first.frames] == [7]
    outbox.put(DraftRequestFrame(handle=8), DraftRequestFrame(handle=9))
    outbox.close()
    second = await call.read()
    assert [frame.handle for frame in second.frames] == [8, 9]
    assert await call.read() is grpc.aio.EOF
