"""The budget of a pass: prompts get what does not hold up others for long."""

from target_service.pass_budget import PassBudget


def _measure(budget: PassBudget, *, base_s: float, row_s: float) -> None:
    for num_rows in (4, 8, 16, 32, 64, 128, 256):
        budget.observe(num_rows, base_s + row_s * num_rows)


def test_without_decoding_sessions_a_pass_is_as_large_as_it_can_be() -> None:
    assert PassBudget(1.5, 1024).prefill_rows(0) == 1024


def test_the_unknown_is_approached_from_below() -> None:
    budget = PassBudget(1.5, 1024)
    assert budget.prefill_rows(1) == 4
    budget.observe(4, 0.010)
    assert budget.prefill_rows(1) == 7
    budget.observe(8, 0.010)
    assert budget.prefill_rows(1) == 15


def test_rows_that_cost_nothing_are_used_and_dear_ones_are_not() -> None:
    budget = PassBudget(1.5, 1024)
    _measure(budget, base_s=0.010, row_s=0.0001)
    assert budget.prefill_rows(1) == 31  # 32 rows take 13 ms, 64 take 16: more than 1.5 times 10.4 ms
    assert budget.prefill_rows(16) == 48  # 64 rows against the 11.6 ms of 16
    assert PassBudget(1.5, 24).prefill_rows(0) == 24


def test_a_few_rows_always_advance() -> None:
    budget = PassBudget(1.5, 64)
    _measure(budget, base_s=0.0, row_s=0.01)
    assert budget.prefill_rows(8) == 4
    assert budget.prefill_rows(64) == 4


def test_one_disturbed_measurement_does_not_bar_a_size_for_good() -> None:
    budget = PassBudget(1.5, 1024)
    budget.observe(4, 0.010)
    budget.observe(8, 0.030)
    asked = [budget.prefill_rows(1) for _ in range(200)]
    assert asked[0] == 4
    assert asked[-1] > 4
