from math import inf

import pytest

from target_service.kv_blocks.costs import RestoreCosts


def measured(answer_s: float, seconds: float, num_bytes: int = 1_000_000) -> RestoreCosts:
    costs = RestoreCosts()
    costs.observe_answer(answer_s)
    costs.observe_restore(num_bytes, seconds)
    return costs


def test_nothing_is_restored_while_nothing_was_measured() -> None:
    costs = RestoreCosts()
    costs.observe_answer(0.001)
    costs.observe_restore(0, 1.0)
    assert costs.restore_s(1) == inf
    assert costs.bytes_per_s == 0
    assert not costs.pays(1, 100.0)
    assert not costs.pays(1, inf)


def test_an_answer_and_its_bytes() -> None:
    costs = measured(0.002, 0.012)
    assert costs.bytes_per_s == pytest.approx(1e8)
    assert costs.restore_s(2_000_000) == pytest.approx(0.022)
    assert costs.pays(2_000_000, 0.03)
    assert not costs.pays(2_000_000, 0.023)
    assert costs.pays(2_000_000, inf)


def test_it_follows_what_is_measured() -> None:
    costs = measured(0.002, 0.012)
    for _ in range(30):
        costs.observe_restore(1_000_000, 0.102)
    assert costs.bytes_per_s == pytest.approx(1e7, rel=0.01)
    for _ in range(30):
        costs.observe_answer(0.05)
    assert costs.restore_s(0) == pytest.approx(0.05, rel=0.01)


def test_bytes_that_took_no_longer_than_an_answer_cost_nothing() -> None:
    costs = measured(0.02, 0.01)
    assert costs.bytes_per_s == inf
    assert costs.restore_s(10**9) == pytest.approx(0.02)
