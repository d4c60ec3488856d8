import random

import pytest

from outrider.drafters.node_values import NodeValues, least_value


def test_values_fall_with_depth_and_rank() -> None:
    values = NodeValues.of_one_session()
    for _ in range(200):
        values.observe(1, [0.5] * 4, 1)
        values.observe(1, [0.5] * 4, None)
    assert values.value(1, 1, 0.5) == pytest.approx(0.5, abs=0.05)
    assert values.value(1, 2, 0.5) < 0.05
    assert values.value(1, 1, 0.4) < values.value(1, 1, 0.5) < values.value(1, 1, 0.6), "the draft's probability counts"
    assert least_value(values.ranks, 0, 4) > least_value(values.ranks, 0, 16) > least_value(values.ranks, 0, 64) > 0


def _mislead(values: NodeValues) -> None:
    """Observe outcomes of two choices: when the first is right, the draft is less sure of it."""
    draws = random.Random(3)
    for _ in range(300):
        is_first = draws.random() < 0.7
        values.observe(1, [0.6, 0.4] if is_first else [0.95, 0.05], 1 if is_first else 2)


def test_probabilities_that_mislead_stop_counting() -> None:
    values = NodeValues.of_all_sessions()
    _mislead(values)
    assert values.value(1, 2, 0.05) == values.value(1, 2, 0.4) == pytest.approx(0.3, abs=0.06)


def test_in_one_session_they_always_count() -> None:
    """Under `rejection`, whose trees must not depend on more than is known."""
    values = NodeValues.of_one_session()
    _mislead(values)
    assert values.value(1, 2, 0.05) < values.value(1, 2, 0.4)


def test_values_keep_the_measured_mean() -> None:
    values, draws = NodeValues.of_all_sessions(), random.Random(5)
    pairs = [(p, 1 - p) for p in (draws.uniform(0.5, 1.0) for _ in range(400))]
    for pair in pairs:
        values.observe(1, pair, 1 if draws.random() < pair[0] else 2)
    for rank in (1, 2):
        mean = sum(values.value(1, rank, pair[rank - 1]) for pair in pairs) / len(pairs)
        assert mean == pytest.approx(values.ranks(1)[rank - 1], rel=0.05)
