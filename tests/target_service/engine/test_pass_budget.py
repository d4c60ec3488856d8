"""The budget of a pass: prompts get what does not hold up others for long."""

from math import inf

import pytest

from target_service.engine.pass_budget import PassBudget

ROW_S, POSITION_S = 0.0005, 1e-6


def _duration(decode: int, prefill: list[tuple[int, int]]) -> float:
    rows = sum(num * (ROW_S + POSITION_S * (start + num / 2)) for num, start in prefill)
    return 0.010 * (decode > 0) + rows


def _taught() -> PassBudget:
    budget = PassBudget(1.5)
    for decode, prefill in [
        (1, []),
        (0, [(512, 0)]),
        (0, [(512, 512)]),
        (1, [(8, 0)]),
        (1, [(8, 1500), (4, 30)]),
        (1, [(16, 700)]),
    ]:
        budget.observe(decode, prefill, _duration(decode, prefill))
    return budget


def test_without_decoding_sessions_nothing_is_held_back() -> None:
    budget = PassBudget(1.5)
    assert budget.allowance_s(0) == inf
    assert budget.rows_within(inf, 0, 512) == 512


def test_what_is_not_known_yet_is_not_risked() -> None:
    budget = PassBudget(1.5)
    assert budget.allowance_s(1) == 0
    budget.observe(1, [], 0.010)
    assert budget.allowance_s(1) == pytest.approx(0.005)
    assert budget.rows_within(budget.allowance_s(1), 0, 512) == 0


def test_the_two_costs_of_a_row_are_told_apart() -> None:
    budget = _taught()
    for num, start in ((10, 0), (10, 3000), (200, 100)):
        assert budget.cost_s(num, start) == pytest.approx(num * (ROW_S + POSITION_S * (start + num / 2)), rel=0.01)


def test_rows_far_into_a_prompt_are_fewer() -> None:
    budget = _taught()
    allowance_s = budget.allowance_s(1)
    assert allowance_s == pytest.approx(0.005)
    assert budget.rows_within(allowance_s, 0, 512) == 9
    assert budget.rows_within(allowance_s, 2000, 512) == 1
    assert budget.rows_within(allowance_s, 0, 3) == 3


def test_the_pass_without_prompts_is_that_of_the_nearest_size() -> None:
    budget = _taught()
    budget.observe(32, [], 0.040)
    assert budget.allowance_s(30) == pytest.approx(0.020)
    assert budget.allowance_s(64) == pytest.approx(0.020)
    assert budget.allowance_s(2) == pytest.approx(0.005)


def test_old_observations_fade() -> None:
    budget = _taught()
    for _ in range(100):
        budget.observe(1, [(8, 0)], 0.010 + 8 * 0.002)
        budget.observe(1, [(8, 1000)], 0.010 + 8 * 0.004)
    assert budget.cost_s(8, 0) == pytest.approx(8 * 0.002, rel=0.1)
    assert budget.cost_s(8, 1000) == pytest.approx(8 * 0.004, rel=0.1)
