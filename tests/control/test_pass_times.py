"""Measured pass times: a speed, and what each size costs compared with others."""

import random

import pytest

from outrider.control.pass_sizes import PassSizes
from outrider.control.pass_times import DecayingMean, PassTimes


def test_a_mean_starts_at_the_first_value_and_decays() -> None:
    mean = DecayingMean(0.5)
    assert not mean.known
    for value, expected in ((4.0, 4.0), (0.0, 2.0), (0.0, 1.0)):
        mean.observe(value)
        assert mean.value == expected
    assert mean.known


def test_a_line_is_found_from_passes_of_different_sizes() -> None:
    times = PassTimes()
    assert times.pass_s(3) == 0
    for _ in range(40):
        for num_rows in (4, 8, 32, 4, 60):
            times.observe(0.01 + 0.0005 * num_rows, num_rows)
    assert times.row_s == pytest.approx(0.0005)
    assert times.pass_s(16) == pytest.approx(0.018)
    assert times.pass_s(100) == pytest.approx(0.06)


def test_sizes_that_were_seen_keep_their_costs() -> None:
    # One core, 2,048-wide bfloat16 layers: 8 rows take 1.13 times as long as 1 to 4, 16 take 1.5, 32 take 2.3 times.
    times, measured = PassTimes(), {4: 0.1, 8: 0.113, 16: 0.15, 32: 0.23}
    for _ in range(200):
        for num_rows, seconds in measured.items():
            times.observe(seconds, num_rows)
    for num_rows, seconds in measured.items():
        assert times.pass_s(num_rows) == pytest.approx(seconds, rel=0.02)


def test_rows_that_cost_alike_are_learnt_of_together() -> None:
    times = PassTimes(PassSizes(6, 2))
    for _ in range(50):
        times.observe(0.1, 1)
        times.observe(0.13, 7)
    assert times.pass_s(6) == times.pass_s(2) == pytest.approx(0.1, rel=0.02)
    assert times.pass_s(8) == times.pass_s(7) == pytest.approx(0.13, rel=0.02)


def test_the_machine_is_followed_at_once_for_sizes_that_are_rare_too() -> None:
    times = PassTimes()
    for _ in range(40):
        times.observe(0.1, 4)
        times.observe(0.12, 8)
    for _ in range(20):
        times.observe(0.2, 4)
    assert times.pass_s(4) == pytest.approx(0.2, rel=0.03)
    assert times.pass_s(8) == pytest.approx(0.24, rel=0.07)


def test_a_hiccup_changes_little() -> None:
    times = PassTimes()
    for _ in range(100):
        times.observe(0.1, 4)
        times.observe(0.12, 8)
    times.observe(3.0, 8)
    for _ in range(20):
        times.observe(0.1, 4)
    assert times.pass_s(4) == pytest.approx(0.1, rel=0.1)
    assert times.pass_s(8) == pytest.approx(0.12, rel=0.15)


def test_what_a_size_takes_only_at_first_does_not_make_it_look_dearer_than_two_passes() -> None:
    times = PassTimes()
    for _ in range(20):
        times.observe(0.1, 4)
    times.observe(5.0, 8)
    times.observe(0.001, 16)
    for _ in range(20):
        times.observe(0.1, 4)
    assert times.pass_s(4) == pytest.approx(0.1, rel=0.1)
    assert times.pass_s(4) <= times.pass_s(8) <= 2 * times.pass_s(4)
    assert times.pass_s(16) >= times.pass_s(8) * 0.9


def test_noise_is_averaged_out() -> None:
    draw, times, measured = random.Random(3), PassTimes(), {4: 0.1, 8: 0.113, 16: 0.15}
    for _ in range(1000):
        num_rows = draw.choice(list(measured))
        times.observe(measured[num_rows] * draw.uniform(0.8, 1.2), num_rows)
    for num_rows, seconds in measured.items():
        assert times.pass_s(num_rows) / times.pass_s(4) == pytest.approx(seconds / 0.1, rel=0.1)


def test_a_round_is_a_pass_and_what_is_done_around_it() -> None:
    times = PassTimes()
    times.observe(0.1, 4)
    times.observe_rest(0.004, speculates=True)
    assert times.round_s(4) == times.round_s(4, speculates=True) == pytest.approx(0.104)
    times.observe_rest(0.001, speculates=False)
    assert times.round_s(4) == pytest.approx(0.101)
    assert times.round_s(4, speculates=True) == pytest.approx(0.104)


def test_a_machine_that_slows_down_is_followed() -> None:
    times = PassTimes()
    for speed in (1.0, 2.0):
        for _ in range(120):
            times.observe(speed * 0.1, 4)
            times.observe(speed * 0.113, 8)
    assert times.pass_s(4) == pytest.approx(0.2, rel=0.05)
    assert times.pass_s(8) == pytest.approx(0.226, rel=0.05)
