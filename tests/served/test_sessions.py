"""Sessions through the served API: turns on a warm cache, many at once, repetitions, cancellation, deletion."""

import asyncio
import dataclasses

import grpc
import pytest

from outrider.client import (
    Delta,
    Finished,
    Generation,
    GenerationRequest,
    LocalStack,
    Notice,
    OutriderClient,
    Speculation,
)
from outrider.errors import DeadlineExceeded, DuplicateRequest, SessionBusy
from outrider.parameters import FinishReason, SamplingParameters
from outrider.v1 import worker_pb2
from outrider.v1.worker_pb2_grpc import WorkerServiceStub

PARAMETERS = SamplingParameters(seed=2, max_tokens=30, ignore_eos=True)
ENDLESS = SamplingParameters(seed=2, max_tokens=20_000, ignore_eos=True)
PLAIN = Speculation(disabled=True)


async def _load(address: str) -> worker_pb2.GetLoadResponse:
    async with grpc.aio.insecure_channel(address) as channel:
        return await WorkerServiceStub(channel).GetLoad(worker_pb2.GetLoadRequest(), timeout=10)


async def _until_idle(stack: LocalStack) -> None:
    async with asyncio.timeout(10):
        for process in (*stack.targets, *stack.drafts):
            while (await _load(process.address)).num_active_sessions:
                await asyncio.sleep(0.02)


async def test_a_second_turn_runs_only_what_is_new(shared_stack: LocalStack, client: OutriderClient) -> None:
    first = await client.complete(
        GenerationRequest(token_ids=(1, 2) * 200, parameters=PARAMETERS, speculation=PLAIN), timeout_s=30
    )
    before = (await _load(shared_stack.targets[0].address)).num_tokens
    turn = GenerationRequest(token_ids=(3, 4), parameters=PARAMETERS, speculation=PLAIN, session_id=first.session_id)
    second = await client.complete(turn, timeout_s=30)
    # The last token of the first turn, the two new ones, and a row for each output token but the last.
    assert (await _load(shared_stack.targets[0].address)).num_tokens - before == 3 + 29
    whole = GenerationRequest(
        token_ids=((1, 2) * 200 + tuple(first.token_ids) + (3, 4)), parameters=PARAMETERS, speculation=PLAIN
    )
    assert (await client.complete(whole, timeout_s=30)).token_ids == second.token_ids


async def test_many_at_once_give_what_one_at_a_time_does(client: OutriderClient) -> None:
    requests = [
        GenerationRequest(token_ids=(number % 16, 3), parameters=PARAMETERS.replace(seed=number, max_tokens=12))
        for number in range(40)
    ]
    together = await asyncio.gather(*(client.complete(request, timeout_s=60) for request in requests))
    for request, generation in zip(requests, together, strict=True):
        alone = dataclasses.replace(request, request_id=f"alone-{request.request_id}", speculation=PLAIN)
        assert (await client.complete(alone, timeout_s=30)).token_ids == generation.token_ids


async def test_a_repeated_request_is_answered_from_the_log(shared_stack: LocalStack, client: OutriderClient) -> None:
    request = GenerationRequest(token_ids=(7,), parameters=PARAMETERS)
    first = await client.complete(request, timeout_s=30)
    before = (await _load(shared_stack.targets[0].address)).num_passes
    assert (await client.complete(request, timeout_s=30)).token_ids == first.token_ids
    assert (await _load(shared_stack.targets[0].address)).num_passes == before
    with pytest.raises(DuplicateRequest):
        await client.complete(dataclasses.replace(request, token_ids=(8,)), timeout_s=30)


async def test_the_same_request_twice_at_once_generates_once(client: OutriderClient) -> None:
    request = GenerationRequest(token_ids=(9,), parameters=PARAMETERS)
    outcomes = await asyncio.gather(*(client.complete(request, timeout_s=30) for _ in range(2)), return_exceptions=True)
    done = [outcome for outcome in outcomes if isinstance(outcome, Generation)]
    assert done
    assert all(isinstance(outcome, Generation | SessionBusy) for outcome in outcomes)
    session = await client.get_session(done[0].session_id, with_token_ids=True)
    assert list(session.token_ids) == [9, *done[0].token_ids]


async def test_cancelling_ends_the_stream_and_frees_the_workers(
    shared_stack: LocalStack, client: OutriderClient
) -> None:
    token_ids: list[int] = []
    session_id, last = "", None
    async for event in client.generate(GenerationRequest(token_ids=(1, 2), parameters=ENDLESS), timeout_s=60):
        last = event
        if isinstance(event, Delta):
            token_ids += event.token_ids
            if len(token_ids) > 50:
                await client.cancel(session_id)
        elif not isinstance(event, Finished):
            session_id = event.session_id
    assert isinstance(last, Finished)
    assert last.finish_reason is FinishReason.CANCELLED
    assert last.num_output_tokens == len(token_ids)
    await _until_idle(shared_stack)


async def test_a_deadline_frees_the_workers_and_leaves_the_session_resumable(
    shared_stack: LocalStack, client: OutriderClient
) -> None:
    request = GenerationRequest(token_ids=(1, 2), parameters=ENDLESS, session_id="deadline")
    with pytest.raises(DeadlineExceeded):
        await client.complete(request, timeout_s=2)
    await _until_idle(shared_stack)
    # Workers are told first.
    async with asyncio.timeout(10):
        while (session := await client.get_session("deadline")).leased:
            await asyncio.sleep(0.02)
    assert not session.finish_reason
    assert session.committed_len > 2


async def test_workers_forget_a_deleted_session(shared_stack: LocalStack, client: OutriderClient) -> None:
    await _until_idle(shared_stack)
    # The other draft has another tokenizer, and never a session.
    workers = (shared_stack.targets[0], shared_stack.drafts[0])
    before = [(await _load(worker.address)).num_cached_sessions for worker in workers]
    await client.complete(GenerationRequest(token_ids=(1, 2), parameters=PARAMETERS, session_id="gone"), timeout_s=30)
    await _until_idle(shared_stack)
    assert [(await _load(worker.address)).num_cached_sessions for worker in workers] == [num + 1 for num in before]
    await client.delete_session("gone")
    async with asyncio.timeout(5):
        while [(await _load(worker.address)).num_cached_sessions for worker in workers] != before:
            await asyncio.sleep(0.02)


async def test_a_deleted_session_leaves_nothing_behind(client: OutriderClient) -> None:
    first = GenerationRequest(token_ids=(1, 2, 3), parameters=PARAMETERS, session_id="again", speculation=PLAIN)
    await client.complete(first, timeout_s=30)
    await client.delete_session("again")
    second = GenerationRequest(token_ids=(4, 5, 6, 7), parameters=PARAMETERS, session_id="again", speculation=PLAIN)
    elsewhere = dataclasses.replace(second, session_id="elsewhere", request_id="elsewhere")
    outputs = [(await client.complete(request, timeout_s=30)).token_ids for request in (second, elsewhere)]
    assert outputs[0] == outputs[1]


async def test_a_long_prompt_tells_how_much_of_it_was_read(client: OutriderClient) -> None:
    prompt = [number % 15 for number in range(2500)]
    parameters, speculation = SamplingParameters(max_tokens=2), Speculation(report=True)
    request = GenerationRequest(token_ids=prompt, parameters=parameters, speculation=speculation)
    done = [event.num_tokens async for event in client.generate(request) if isinstance(event, Notice)]
    assert done == sorted(set(done))
    assert done[0] < 1000
    assert done[-1] < len(prompt)
