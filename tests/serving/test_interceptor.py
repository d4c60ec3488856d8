"""Errors of every kind of call, over a real socket."""

import asyncio
import logging

import grpc
import pytest

from outrider.errors import Fenced, KVCacheMiss, OutriderError
from outrider.serving.status import error_from_rpc, peer_errors
from outrider.v1 import draft_pb2, draft_pb2_grpc, worker_pb2, worker_pb2_grpc

LOGGER = "outrider.serving.interceptor"


async def messages(*handles: int):
    for handle in handles:
        yield draft_pb2.DraftRequest(frames=[draft_pb2.DraftRequestFrame(handle=handle)])


async def test_a_server_stream_breaks_with_the_error_after_what_it_sent(worker, channel):
    async def miss():
        raise KVCacheMiss("too far", 3)

    worker.behaviour = miss
    names = []
    with pytest.raises(KVCacheMiss) as caught, peer_errors():
        async for part in worker_pb2_grpc.WorkerServiceStub(channel).GetTokenizer(worker_pb2.GetTokenizerRequest()):
            names.append(part.name)
    assert names == ["first"]
    assert caught.value.cached_len == 3


async def test_a_bidirectional_stream_breaks_with_the_error(draft, channel):
    async def fenced():
        raise Fenced("a newer lease")

    async def one_message():
        # To a caller that still writes when the stream breaks, gRPC may only say that its write failed.
        try:
            async for message in messages(1):
                yield message
            await is_broken.wait()
        finally:
            has_ended.set()

    is_broken, has_ended = asyncio.Event(), asyncio.Event()
    draft.behaviour = fenced
    handles = []
    with pytest.raises(Fenced), peer_errors():
        async for response in draft_pb2_grpc.DraftServiceStub(channel).Draft(one_message()):
            handles += [frame.handle for frame in response.frames]
    is_broken.set()
    await has_ended.wait()
    assert handles == [1]


async def test_streams_pass_unchanged(worker, draft, channel):
    parts = worker_pb2_grpc.WorkerServiceStub(channel).GetTokenizer(worker_pb2.GetTokenizerRequest())
    assert [part.name async for part in parts] == ["first", "second"]
    responses = draft_pb2_grpc.DraftServiceStub(channel).Draft(messages(1, 2))
    assert [frame.handle async for response in responses for frame in response.frames] == [1, 2]


@pytest.mark.parametrize("error", [RuntimeError("the prompt"), OutriderError("the prompt")])
async def test_an_unnamed_error_is_internal_logged_once_and_silent(error, worker, channel, caplog):
    async def fail():
        raise error

    worker.behaviour = fail
    with caplog.at_level(logging.ERROR, LOGGER), pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "prompt" not in repr(caught.value)
    assert [record.name for record in caplog.records] == [LOGGER]
    assert type(error_from_rpc(caught.value)) is OutriderError


async def test_a_cancelled_error_of_the_servicer_does_not_leave_the_client_waiting(worker, channel):
    async def await_something_cancelled():
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    worker.behaviour = await_something_cancelled
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_a_client_that_gives_up_cancels_the_servicer_in_silence(worker, channel, caplog):
    cancelled = asyncio.Event()

    async def wait_forever():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    worker.behaviour = wait_forever
    await channel.channel_ready()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(cancelled.wait(), 5)
    assert not caplog.records


async def test_a_servicers_own_abort_passes(channel, caplog):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker_pb2_grpc.WorkerServiceStub(channel).GetLoad(worker_pb2.GetLoadRequest())
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not caplog.records
