"""Measured acceptance rates: they follow the observations at each depth, and start at the prior."""

import random

import pytest

from outrider.speculation.acceptance import MAX_DEPTH, MAX_RANK, AcceptanceRates


def test_nothing_is_known_at_first_but_what_is_usual() -> None:
    rates = AcceptanceRates()
    values = rates.values(1)
    assert len(values) == MAX_RANK and values == sorted(values, reverse=True)
    assert 0.5 < values[0] < 0.9 and sum(values) < 1
    assert rates.value(1, MAX_RANK + 1) < 1e-3


def test_values_become_the_frequencies() -> None:
    draw, rates = random.Random(1), AcceptanceRates()
    for _ in range(2000):
        depth = draw.choice([1, 2])
        shares = {1: 0.8, 2: 0.1} if depth == 1 else {1: 0.4, 2: 0.3}
        outcome = draw.random()
        matched = 1 if outcome < shares[1] else 2 if outcome < shares[1] + shares[2] else None
        rates.observe(depth, [0.0] * 3, matched)
    assert rates.value(1, 1) == pytest.approx(0.8, abs=0.12)
    assert rates.value(2, 1) == pytest.approx(0.4, abs=0.15)
    assert rates.value(2, 2) > rates.value(1, 2)
    assert rates.value(1, 3) < 0.05
    assert rates.value(MAX_DEPTH + 5, 1) == rates.value(MAX_DEPTH, 1), "of depths never seen all that is known counts"


def test_old_outcomes_fade() -> None:
    rates = AcceptanceRates()
    for matched in (1, None):
        for _ in range(300):
            rates.observe(1, [0.0], matched)
    assert rates.value(1, 1) < 0.1


def test_the_drafts_probabilities_weigh_rates_that_all_sessions_share() -> None:
    common = AcceptanceRates()
    sessions = [AcceptanceRates(common) for _ in range(2)]
    draw = random.Random(2)
    for _ in range(200):
        sure = draw.random() < 0.5
        sessions[0].of("model").observe(
            1, [0.9 if sure else 0.3, 0.05], 1 if draw.random() < (0.9 if sure else 0.3) else 2
        )
    for rates in sessions:
        of_model = rates.of("model")
        assert of_model.value(1, 1, 0.9) == pytest.approx(0.9, abs=0.1)
        assert of_model.value(2, 1, 0.3) == pytest.approx(0.3, abs=0.1)
        assert of_model.value(1, 1, 0.3) < of_model.value(1, 1) < of_model.value(1, 1, 0.9)
        # Nothing is known about the probabilities of others.
        assert rates.value(1, 1, 0.9) == rates.value(1, 1) and rates.of("suffix").value(1, 1, 0.1) > 0.6
        assert of_model.value(1, MAX_RANK + 1, 0.9) < 1e-3


def test_the_difficulty_of_a_sessions_text_counts_once() -> None:
    common, draw = AcceptanceRates.of_all_sessions(), random.Random(3)
    sessions = {probability: AcceptanceRates(common) for probability in (0.7, 0.4)}
    for _ in range(100):
        for probability, rates in sessions.items():
            rates.observe(1, [probability], 1 if draw.random() < probability else None)
    for probability, rates in sessions.items():
        assert rates.value(1, 1, probability) == pytest.approx(probability, abs=0.08)


def test_chance_in_one_session_does_not_move_values_by_probability() -> None:
    common, draw = AcceptanceRates.of_all_sessions(), random.Random(4)
    for _ in range(20):
        rates = AcceptanceRates(common)
        for _ in range(50):
            rates.observe(1, [0.5, 0.1], 1 if draw.random() < 0.5 else 2 if draw.random() < 0.2 else None)
    unlucky = AcceptanceRates(common)
    for _ in range(12):
        unlucky.observe(1, [0.5, 0.1], None)
    assert unlucky.value(1, 1, 0.5) > 0.4 and unlucky.value(1, 2, 0.1) > 0.07
    assert unlucky.value(1, 1) < 0.1, "without a probability the session's own rate is all that tells its text"


def test_probabilities_that_mislead_one_session_count_in_none() -> None:
    common = AcceptanceRates.of_all_sessions()
    misled, other = AcceptanceRates(common), AcceptanceRates(common)
    for probability, matched in [(0.1, 1), (0.9, None)] * 20:
        misled.observe(1, [probability], matched)
    assert other.value(1, 1, 0.9) == other.value(1, 1, 0.1) == other.value(1, 1)


def test_expected_accepted_is_the_sum_of_products() -> None:
    rates = AcceptanceRates()
    first, second = rates.value(1, 1), rates.value(2, 1)
    assert rates.expected_accepted(2) == pytest.approx([0, first, first + first * second])


def test_drafters_of_one_draft_have_rates_of_their_own() -> None:
    common = AcceptanceRates()
    rates = AcceptanceRates(common)
    for _ in range(100):
        rates.of("model").observe(1, [0.0], 1)
        rates.of("suffix").observe(1, [0.0], None)
    assert rates.of("model").value(1, 1) > 0.9 > 0.1 > rates.of("suffix").value(1, 1)
    assert rates.value(1, 1) == AcceptanceRates().value(1, 1)
    # Those of all sessions learn too, and other sessions begin with them.
    assert AcceptanceRates(common).of("suffix").value(1, 1) < 0.1
    assert rates.of("") is rates
    # Names come from other machines: there are few, and none is the draft as a whole.
    found = [rates.of(str(number)) for number in range(1000)]
    assert len({id(item) for item in found}) < 10
    assert rates not in found
    assert AcceptanceRates(common).of("one more") is not common
