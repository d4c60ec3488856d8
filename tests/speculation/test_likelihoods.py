"""The draft's probabilities: they count as far as outcomes show that they inform."""

import random

import pytest

from outrider.speculation.likelihoods import Likelihoods

RATE = {1: 0.7, 2: 0.3}


def _observe(found: Likelihoods, *, informs: bool, num: int = 300) -> None:
    """Observe outcomes of two choices; when the first is right, the draft is surer of it, or less sure."""
    draws = random.Random(3)
    for _ in range(num):
        is_first = draws.random() < RATE[1]
        likelihoods = (0.95, 0.05) if is_first == informs else (0.6, 0.4)
        for rank, likelihood in enumerate(likelihoods, 1):
            found.test(rank, likelihood, RATE[rank], is_first == (rank == 1))
            found.add(rank, likelihood)


def test_before_any_outcome_they_count_nothing() -> None:
    found = Likelihoods(2, 0.998)
    assert found.weighed(0.7, 1, 0.9) == found.weighed(0.7, 1, 0.1) == pytest.approx(0.7)
    _observe(found, informs=True, num=1)
    assert found.weighed(0.5, 1, 0.1) < 0.5, "the first outcome counts"


def test_those_that_mislead_stop_counting_and_count_again_once_they_inform() -> None:
    found = Likelihoods(2, 0.998)
    _observe(found, informs=True)
    assert found.weighed(0.3, 2, 0.05) < 0.15 < 0.3 < found.weighed(0.3, 2, 0.4)
    _observe(found, informs=False, num=900)
    assert found.weighed(0.3, 2, 0.05) == found.weighed(0.3, 2, 0.4) == 0.3
    _observe(found, informs=True, num=1800)
    assert found.weighed(0.3, 2, 0.05) < found.weighed(0.3, 2, 0.4)


def test_without_a_test_they_always_count() -> None:
    found = Likelihoods(2, 0.998, tests=False)
    _observe(found, informs=False)
    assert found.weighed(0.3, 2, 0.05) < found.weighed(0.3, 2, 0.4)


def test_a_draft_that_does_not_say_is_taken_by_its_rates() -> None:
    found = Likelihoods(2, 0.998)
    _observe(found, informs=True)
    assert found.weighed(0.3, 2, 0.0) == 0.3


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_values_keep_the_measured_mean_of_a_draft_that_is_too_modest(factor: float) -> None:
    found, draws = Likelihoods(1, 0.998), random.Random(5)
    certain = [draws.uniform(0.2, 1.0) for _ in range(2000)]
    rate = sum(certain) / len(certain)
    for probability in certain:
        found.test(1, factor * probability, rate, draws.random() < probability)
        found.add(1, factor * probability)
    values = [found.weighed(rate, 1, factor * probability) for probability in certain]
    assert sum(values) / len(values) == pytest.approx(rate, rel=0.03)
    assert found.weighed(rate, 1, factor * 0.3) == pytest.approx(0.3, rel=0.1)
