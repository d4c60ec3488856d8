"""Scheduling through a running engine: shared prefixes, memory that runs out, prompts beside decoding sessions."""

import asyncio
import itertools
import re
from collections.abc import Sequence

import pytest

from outrider.control.pass_times import PassTimes
from outrider.parameters import SamplingParameters
from target_service.engine.engine import Engine
from tests.target_service.conversation import Caller, target

PARAMETERS = SamplingParameters(seed=3, max_tokens=60, ignore_eos=True)
PAGE_BYTES = 64


Observed = tuple[int, Sequence[tuple[int, int]]]
"""A pass: its rows that decode, and of each part of a prompt its number of rows and its position."""


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[Observed]:
    """The passes whose times were observed, of all engines."""
    found: list[Observed] = []

    def observe(times: PassTimes, duration_s: float, num_rows: int, prompts: Sequence[tuple[int, int]] = ()) -> None:
        found.append((num_rows, prompts))
        known(times, duration_s, num_rows, prompts)

    known = PassTimes.observe
    monkeypatch.setattr(PassTimes, "observe", observe)
    return found


@pytest.fixture
def timed_by_rows(observed: list[Observed], monkeypatch: pytest.MonkeyPatch) -> list[Observed]:
    """The passes that were observed, each as if a row had taken 0.5 ms, whatever the machine took."""

    def observe(times: PassTimes, duration_s: float, num_rows: int, prompts: Sequence[tuple[int, int]] = ()) -> None:
        recorded(times, 0.0005 * (num_rows + sum(num for num, _ in prompts)), num_rows, prompts)

    recorded = PassTimes.observe
    monkeypatch.setattr(PassTimes, "observe", observe)
    return observed


def _prompt(length: int, last: int = 0) -> list[int]:
    return [*(index * 7 % 11 for index in range(length - 1)), last]


async def _expected(prompts: Sequence[Sequence[int]], parameters: SamplingParameters) -> list[list[int]]:
    async with target() as (_, caller):
        return [
            await caller.plain(index, prompt, parameters, session=f"s{index}", stop_token_ids=())
            for index, prompt in enumerate(prompts, start=1)
        ]


async def _at_once(caller: Caller, prompts: Sequence[Sequence[int]], parameters: SamplingParameters) -> list[list[int]]:
    calls = (
        caller.plain(index, prompt, parameters, session=f"s{index}", stop_token_ids=())
        for index, prompt in enumerate(prompts, start=1)
    )
    return list(await asyncio.gather(*calls))


async def _settled(engine: Engine) -> None:
    async with asyncio.timeout(10):
        while engine.num_requests:
            await asyncio.sleep(0.01)


async def test_a_common_prefix_is_run_once() -> None:
    prompts = [_prompt(800, last) for last in range(10)]
    async with target() as (engine, caller):
        assert await _at_once(caller, prompts, PARAMETERS) == await _expected(prompts, PARAMETERS)
        prefill = engine.load.num_tokens - len(prompts) * PARAMETERS.max_tokens
        assert prefill < 1.3 * 800, "ten prompts of which nearly all is shared cost about as much as one"


async def test_salts_keep_sessions_apart() -> None:
    async with target() as (engine, caller):
        rows = []
        for handle, salt in enumerate((b"a", b"b", b"a"), start=1):
            before = engine.load.num_tokens
            await caller.plain(handle, _prompt(400), PARAMETERS, cache_salt=salt, stop_token_ids=())
            rows.append(engine.load.num_tokens - before)
        assert rows[0] == rows[1] == 400 + PARAMETERS.max_tokens - 1
        assert rows[2] < rows[0] / 2


async def test_sessions_that_do_not_fit_together_take_turns_and_lose_nothing() -> None:
    prompts = [[(index * step) % 11 for index in range(90)] for step in range(1, 9)]
    # Eight sessions of 150 tokens need 80 pages; there are 24.
    async with target(kv_budget_bytes=1 << 16) as (engine, caller):
        engine._model._pool._num_pages = 24  # type: ignore[attr-defined]  # the setting's own lower bound is larger
        outputs = await asyncio.wait_for(_at_once(caller, prompts, PARAMETERS), 60)
        assert engine.load.num_preemptions > 0
        await _settled(engine)
        assert engine._model.kv_usage.num_held == 0
    assert outputs == await _expected(prompts, PARAMETERS)


async def test_a_session_that_never_fits_is_told_so() -> None:
    async with target(kv_budget_bytes=1 << 16) as (engine, caller):
        limit = (1 << 16) // PAGE_BYTES * 16
        assert engine.max_len == limit
        await caller.open(1, _prompt(limit + 1), PARAMETERS, stop_token_ids=())
        await caller.span(1, 0, _prompt(limit + 1))
        frame = await caller.receive(1)
        assert frame.refusal.reason == "INVALID_ARGUMENT"
        assert str(limit) in frame.refusal.message


async def test_no_pages_stay_held_when_sessions_are_left() -> None:
    async with target() as (engine, caller):
        for round_ in range(5):
            prompts = [_prompt(40 + index, index % 11) for index in range(20)]
            await _at_once(caller, prompts, SamplingParameters(seed=round_, max_tokens=5, ignore_eos=True))
        await _settled(engine)
        usage = engine._model.kv_usage
        assert usage.num_held == 0
        assert usage.num_reusable > 0


async def test_a_long_prompt_does_not_stop_others() -> None:
    # 1 ms a row: the whole prompt would take 4 s, during which the other session must go on.
    async with target() as (engine, caller):
        engine._model.options = type(engine._model.options)(vocabulary=12, order=2, row_s=0.001)  # type: ignore[attr-defined]
        parameters = SamplingParameters(seed=3, max_tokens=300, ignore_eos=True)
        short = asyncio.create_task(caller.plain(1, _prompt(8), parameters, stop_token_ids=()))
        async with asyncio.timeout(10):
            while engine.load.num_passes < 20:
                await asyncio.sleep(0.001)
        opened = await caller.open(2, _prompt(4000), parameters, stop_token_ids=())
        await caller.span(2, opened.opened.cached_len, _prompt(4000))
        assert len(await asyncio.wait_for(short, 20)) == 300
        (request,) = (item for item in engine.requests.open_ones if item.handle.number == 2)
        assert 300 < request.resident.cache.cached_len < 4000, "both went on, the long prompt in small parts"


async def test_prompts_that_come_before_any_pass_was_measured_are_not_held_back() -> None:
    """Else every pass would have a part of a prompt, and what one takes without would stay unknown."""
    async with target() as (engine, caller):
        engine._model.options = type(engine._model.options)(vocabulary=12, order=2, step_s=0.01)  # type: ignore[attr-defined]
        # At four rows a pass the prompt would not be through before the other session has ended.
        decoding = asyncio.create_task(
            caller.plain(1, _prompt(8), PARAMETERS.replace(max_tokens=150), stop_token_ids=())
        )
        num_passes = engine.load.num_passes
        await caller.plain(2, _prompt(4000), SamplingParameters(seed=3, max_tokens=1), stop_token_ids=())
        assert engine.load.num_passes - num_passes < 75
        assert not decoding.done(), "rows of the prompt came with those of the session that decodes"
        await decoding


async def test_the_parts_of_a_prompt_that_cost_little_double(observed: list[Observed]) -> None:
    async with target() as (engine, caller):
        # A pass takes as long with any number of rows.
        engine._model.options = type(engine._model.options)(vocabulary=12, order=2, step_s=0.005)  # type: ignore[attr-defined]
        decoding = asyncio.create_task(
            caller.plain(1, _prompt(8), PARAMETERS.replace(max_tokens=200), stop_token_ids=())
        )
        async with asyncio.timeout(10):
            while engine.load.num_passes < 20:
                await asyncio.sleep(0.001)
        await caller.plain(2, _prompt(2000), PARAMETERS.replace(max_tokens=1), stop_token_ids=())
        await decoding
    parts = [num for num_rows, prompts in observed if num_rows for num, _ in prompts]
    assert sum(parts) == 2000 and max(parts) >= 128
    assert all(later <= 2 * before for before, later in itertools.pairwise(parts))


async def test_now_and_then_a_pass_shows_what_it_takes_without_prompts(timed_by_rows: list[Observed]) -> None:
    async with target() as (engine, caller):
        # The session must still decode when the prompt is through; it is timed as if a row took as long as a pass.
        engine._model.options = type(engine._model.options)(vocabulary=12, order=2, row_s=0.0002)  # type: ignore[attr-defined]
        decoding = asyncio.create_task(
            caller.plain(1, _prompt(8), PARAMETERS.replace(max_tokens=400), stop_token_ids=())
        )
        async with asyncio.timeout(10):
            while not any(num_rows and not prompts for num_rows, prompts in timed_by_rows):
                await asyncio.sleep(0.001)
        await caller.plain(2, _prompt(400), PARAMETERS.replace(max_tokens=1), stop_token_ids=())
        await decoding
    passes = " ".join(f"{'d' if num_rows else ''}{'p' if prompts else ''}" for num_rows, prompts in timed_by_rows)
    assert re.fullmatch(r"p (d )+((dp ){16}d ){2,}(dp )*d.*", passes), passes
