"""Faults 16 to 19: an orchestrator is lost, or two have one session; the log decides."""

import asyncio
from dataclasses import replace

from orchestrator.store.record import derived_session_id
from outrider.client import Speculation
from outrider.errors import Fenced, SessionBusy
from outrider.parameters import AcceptanceRule
from tests.faults.history import check, monitored, read_log, watch
from tests.faults.scene import NUM_TOKENS, Scene, asking, plain


async def test_fault_16_killed_between_verdict_and_commit(scene: Scene) -> None:
    first, second = scene.stack.orchestrators
    request = asking()
    await scene.learn(request)

    async def strike() -> None:
        # Verdicts keep coming, and no commit gets through.
        await scene.stack.to_redis.set_blackhole(up=True)
        await asyncio.sleep(0.2)
        first.kill()
        await scene.stack.to_redis.set_blackhole(up=False)

    async with (
        monitored(scene.stack.redis.url) as commits,
        scene.stack.client(first.address, second.address) as client,
    ):
        record = await watch(client, request, after=30, strike=strike)
    commits.check()
    await scene.stack.heal()
    assert record.error is None, record.error
    await read_log(scene.client, record)
    check([record], plain)


async def test_fault_16_under_rejection_stream_and_log_are_equal(scene: Scene) -> None:
    """The text follows no draft there, so it is the log that the stream must equal."""
    first, second = scene.stack.orchestrators
    request = asking(speculation=Speculation(acceptance_rule=AcceptanceRule.REJECTION))
    async with scene.stack.client(first.address, second.address) as client:
        record = await watch(client, request, after=30, strike=first.kill)
    await scene.stack.heal()
    assert record.error is None, record.error
    await read_log(scene.client, record)
    assert len(record.token_ids) == NUM_TOKENS and record.log == record.token_ids


async def test_fault_17_killed_between_commit_and_emit(scene: Scene) -> None:
    first, second = scene.stack.orchestrators
    to_first = scene.stack.to_orchestrators[0]
    request = asking()
    await scene.learn(request)

    async def strike() -> None:
        # Commits go on, and nothing of it reaches the client.
        await to_first.set_blackhole(down=True)
        await asyncio.sleep(0.2)
        first.kill()
        to_first.is_refusing = True
        to_first.reset()

    async with scene.stack.client(to_first.address, second.address) as client:
        record = await watch(client, request, after=30, strike=strike)
    await scene.stack.heal()
    assert record.error is None, record.error
    await read_log(scene.client, record)
    check([record], plain)


async def test_fault_18_two_orchestrators_on_one_session(scene: Scene) -> None:
    first, second = scene.stack.orchestrators
    # So long that it still runs when another one has been refused, and it is asked for anew.
    request = asking(num_tokens=900)
    await scene.learn(request)
    async with (
        monitored(scene.stack.redis.url) as commits,
        scene.stack.client(first.address, max_attempts=1) as one,
        scene.stack.client(second.address, max_attempts=1) as two,
    ):
        begun = asyncio.Event()
        older = asyncio.create_task(watch(one, request, after=30, strike=begun.set))
        await asyncio.wait_for(begun.wait(), 20)
        # Another request does not get in; the same one, resumed, takes over.
        session_id = derived_session_id("default", request.request_id)
        busy = await watch(two, asking(seed=1, session_id=session_id))
        assert isinstance(busy.error, SessionBusy)
        newer = await watch(two, replace(request, resume_offset=0))
        broken = await older
    commits.check()
    assert isinstance(broken.error, Fenced)
    assert newer.num_terminal == 1
    await read_log(scene.client, newer)
    check([newer, broken], plain)


async def test_fault_19_the_client_resumes_at_another_one_with_its_offset(scene: Scene) -> None:
    first, second = scene.stack.orchestrators
    request = asking()
    await scene.learn(request)
    async with (
        scene.stack.client(first.address, max_attempts=1) as one,
        scene.stack.client(second.address) as two,
    ):
        record = await watch(one, request, after=50, strike=first.kill)
        assert record.error is not None
        rest = await watch(two, replace(request, resume_offset=len(record.token_ids)))
    assert rest.deltas[0][0] == len(record.token_ids)
    await scene.stack.heal()
    await scene.resumed(record)
    assert record.token_ids + rest.token_ids == list(plain(request))
