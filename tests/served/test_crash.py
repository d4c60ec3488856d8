"""Crashes of whole processes under a running stream: the text goes on, unchanged, no token twice and none missing."""

import itertools
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from outrider.client import (
    Accepted,
    Delta,
    DraftOptions,
    Event,
    Finished,
    GenerationRequest,
    LocalStack,
    OutriderClient,
    Speculation,
    StackOptions,
)
from outrider.client.process import ServiceProcess
from outrider.parameters import AcceptanceRule, SamplingParameters
from tests.served.stacks import until_all_in_rotation

TARGET = "markov:vocabulary=16,order=2,seed=5,step_s=0.004"
PARAMETERS = SamplingParameters(seed=9, max_tokens=300)
"""So many tokens that a process is still in use when it is killed after thirty."""
PLAIN = Speculation(disabled=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_stack() -> AsyncIterator[LocalStack]:
    options = StackOptions(
        model=TARGET,
        drafts=(DraftOptions(drafter="model", model=f"{TARGET},noise=0.2"),),
        num_targets=2,
        num_orchestrators=2,
        target_threads=1,
        target_environment={"OUTRIDER_ADAPTIVE_SPECULATION": "false"},
        orchestrator_environment={"OUTRIDER_LEASE_S": "2"},
    )
    async with LocalStack(options) as running:
        yield running


@pytest.fixture
async def stack(shared_stack: LocalStack) -> AsyncIterator[LocalStack]:
    """The stack with all processes running and in rotation; those that a test killed come back where they were."""
    yield shared_stack
    for process in shared_stack.processes:
        if not process.is_running:
            await _restart(process)
    await until_all_in_rotation(shared_stack)


async def _restart(process: ServiceProcess) -> None:
    process.restart()
    await process.wait_ready(60)


def _request(speculation: Speculation | None = None) -> GenerationRequest:
    return GenerationRequest(token_ids=(1, 2, 3), parameters=PARAMETERS, speculation=speculation or Speculation())


async def _plain(client: OutriderClient) -> list[int]:
    return (await client.complete(_request(PLAIN), timeout_s=30)).token_ids


async def _streamed(
    client: OutriderClient, request: GenerationRequest, after: int, strike: Callable[[], None]
) -> tuple[list[int], list[Event]]:
    """Returns the tokens of a stream during which `strike` is called once `after` tokens have come, and its events."""
    token_ids: list[int] = []
    events: list[Event] = []
    struck = False
    async for event in client.generate(request, timeout_s=60):
        events.append(event)
        if isinstance(event, Delta):
            assert event.offset == len(token_ids)
            token_ids += event.token_ids
        if not struck and len(token_ids) >= after:
            struck = True
            strike()
    assert struck
    return token_ids, events


async def _log(client: OutriderClient, events: list[Event]) -> list[int]:
    accepted = events[0]
    assert isinstance(accepted, Accepted)
    session = await client.get_session(accepted.session_id, with_token_ids=True)
    return list(session.token_ids)[session.prompt_len :]


async def _check(client: OutriderClient, victims: Callable[[], list[ServiceProcess]]) -> list[Event]:
    expected = await _plain(client)

    def strike() -> None:
        for victim in victims():
            victim.kill()

    token_ids, events = await _streamed(client, _request(), 30, strike)
    assert token_ids == expected
    assert await _log(client, events) == expected
    assert sum(isinstance(event, Finished) for event in events) == 1
    return events


async def test_a_killed_draft_changes_nothing(stack: LocalStack) -> None:
    async with stack.client() as client:
        events = await _check(client, lambda: stack.drafts)
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert finished.statistics.num_proposed_nodes > 0
        assert finished.statistics.num_fallbacks["draft_unavailable"] == 1
        # Without any draft, requests go on by plain decoding.
        assert (await client.complete(_request(), timeout_s=30)).token_ids == await _plain(client)


async def test_a_restarted_draft_is_used_again(stack: LocalStack) -> None:
    stack.drafts[0].kill()
    await _restart(stack.drafts[0])
    await until_all_in_rotation(stack)
    async with stack.client() as client:
        generation = await client.complete(_request(), timeout_s=30)
        assert generation.statistics.num_proposed_nodes > 0
        assert generation.token_ids == await _plain(client)


async def test_a_killed_orchestrator_is_replaced_by_another(stack: LocalStack) -> None:
    first, second = stack.orchestrators
    async with OutriderClient((first.address, second.address)) as client:
        await _check(client, lambda: [first])


async def test_a_killed_target_is_replaced_by_another(stack: LocalStack) -> None:
    async with stack.client() as client:
        expected = await _plain(client)
        # Whichever of the two serves the stream: each is killed once.
        for index in (0, 1):
            token_ids, events = await _streamed(client, _request(), 30, stack.targets[index].kill)
            assert token_ids == expected
            assert await _log(client, events) == expected
            await _restart(stack.targets[index])
            await until_all_in_rotation(stack)


async def test_resuming_by_hand_gives_the_rest(stack: LocalStack) -> None:
    first, second = stack.orchestrators
    request = _request()
    head: list[int] = []
    async with OutriderClient((first.address,)) as client:
        expected = await _plain(client)
        events = client.generate(request, timeout_s=30)
        async for event in events:
            if isinstance(event, Delta):
                head += event.token_ids
            if len(head) > 40:
                break
        await events.aclose()
    resumed = GenerationRequest(
        token_ids=request.token_ids,
        parameters=PARAMETERS,
        request_id=request.request_id,
        resume_offset=len(head),
    )
    async with OutriderClient((second.address,)) as client:
        tail = [event async for event in client.generate(resumed, timeout_s=30)]
        offsets = [event.offset for event in tail if isinstance(event, Delta)]
        rest = list(itertools.chain.from_iterable(event.token_ids for event in tail if isinstance(event, Delta)))
        assert offsets[0] == len(head)
        assert head + rest == expected
        # And again, now that it has ended: the log is replayed.
        repeated = [event async for event in client.generate(resumed, timeout_s=30)]
        again = list(itertools.chain.from_iterable(event.token_ids for event in repeated if isinstance(event, Delta)))
        assert again == rest


async def test_a_killed_orchestrator_under_the_rejection_rule_keeps_stream_and_log_equal(stack: LocalStack) -> None:
    first, second = stack.orchestrators
    request = _request(Speculation(acceptance_rule=AcceptanceRule.REJECTION))
    async with OutriderClient((first.address, second.address)) as client:
        token_ids, events = await _streamed(client, request, 30, first.kill)
        assert len(token_ids) == PARAMETERS.max_tokens
        assert await _log(client, events) == token_ids
