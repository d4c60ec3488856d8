"""The budget of a pass: prompts get what does not hold up others for long."""

from math import inf

import pytest

from outrider.control.pass_times import PassTimes
from target_service.engine.pass_budget import PassBudget

ROW_S, POSITION_S = 0.0005, 1e-6


def _duration(decode: int, prefill: list[tuple[int, int]]) -> float:
    rows = sum(num * (ROW_S + POSITION_S * (start + num / 2)) for num, start in prefill)
    return 0.010 + rows


def _taught() -> PassTimes:
    times = PassTimes()
    for decode, prefill in [
        (1, []),
        (1, []),
        (0, [(512, 0)]),
        (0, [(512, 512)]),
        (1, [(8, 0)]),
        (1, [(8, 1500), (4, 30)]),
        (1, [(16, 700)]),
    ]:
        times.observe(_duration(decode, prefill), decode, prefill)
    return times


def test_without_decoding_sessions_nothing_is_held_back() -> None:
    budget = PassBudget(1.5, PassTimes())
    assert budget.allowance_s(0) == inf
    assert budget.rows_within(inf, 0, 512) == 512


def test_what_is_not_known_yet_is_not_risked() -> None:
    times = PassTimes()
    budget = PassBudget(1.5, times)
    assert budget.allowance_s(1) == 0
    for _ in range(2):
        times.observe(0.010, 1)
    assert budget.allowance_s(1) == pytest.approx(0.005)
    assert budget.rows_within(budget.allowance_s(1), 0, 512) == 0


def test_rows_far_into_a_prompt_are_fewer() -> None:
    budget = PassBudget(1.5, _taught())
    allowance_s = budget.allowance_s(1)
    assert allowance_s == pytest.approx(0.005)
    budget.observe(8)
    assert budget.rows_within(allowance_s, 0, 512) == 9
    assert budget.rows_within(allowance_s, 2000, 512) == 1
    assert budget.rows_within(allowance_s, 0, 3) == 3


def test_the_pass_without_prompts_is_that_of_its_size() -> None:
    times = _taught()
    budget = PassBudget(1.5, times)
    for _ in range(100):
        times.observe(0.040, 32)
        times.observe(0.010, 1)
    assert budget.allowance_s(30) == pytest.approx(0.020, rel=0.02)
    assert budget.allowance_s(2) == pytest.approx(0.005, rel=0.02)


def test_rows_grow_step_by_step_where_they_seem_to_cost_nothing() -> None:
    times = PassTimes()
    for decode, prefill in [(1, []), (0, [(64, 0)]), (1, [(8, 0)])]:
        times.observe(0.010, decode, prefill)
    budget = PassBudget(1.5, times)
    rows = []
    for _ in range(4):
        rows.append(budget.rows_within(0.005, 100, 512))
        budget.observe(rows[-1])
    assert rows == [8, 16, 32, 64]
    budget.observe(1)
    assert budget.rows_within(0.005, 100, 512) == 8
