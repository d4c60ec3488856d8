"""A mean that follows a lasting change, and that no single stall moves far, whichever observation it is."""

import pytest

from outrider.control.decaying_mean import DecayingMean


def test_the_first_observations_weigh_alike_and_later_ones_decay() -> None:
    mean = DecayingMean(0.25)
    for value in (1.0, 2.0, 3.0, 6.0):
        mean.observe(value)
    assert mean.value == pytest.approx(3.0)
    mean.observe(7.0)
    assert mean.value == pytest.approx(4.0)


@pytest.mark.parametrize("place", [0, 1, 5, 30])
def test_a_stall_moves_it_little(place: int) -> None:
    mean = DecayingMean(0.1, max_ratio=2.0, doubts_first=True)
    for number in range(place + 3):
        mean.observe(500.0 if number == place else 1.0)
    assert 1.0 <= mean.value < 2.0


def test_a_lasting_change_is_followed() -> None:
    mean = DecayingMean(0.2, max_ratio=2.0)
    for value in [1.0] * 10 + [50.0] * 60:
        mean.observe(value)
    assert mean.value == pytest.approx(50.0, rel=0.01)
    for _ in range(60):
        mean.observe(1.0)
    assert mean.value == pytest.approx(1.0, rel=0.01)


def test_what_is_certain_is_taken_as_it_is() -> None:
    mean = DecayingMean(0.5, max_ratio=2.0)
    mean.observe(1.0)
    mean.observe(99.0, is_certain=True)
    assert mean.value == pytest.approx(50.0)
