"""Measured pass times: a speed, and what each size costs compared with others."""

import math
import random

import pytest

from outrider.control.decaying_mean import DecayingMean
from outrider.control.pass_times import PaddedSizes, PassTimes


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
    times = PassTimes(PaddedSizes(6, 2))
    for _ in range(50):
        times.observe(0.1, 1)
        times.observe(0.13, 7)
    assert times.pass_s(6) == times.pass_s(2) == pytest.approx(0.1, rel=0.02)
    assert times.pass_s(8) == times.pass_s(7) == pytest.approx(0.13, rel=0.02)


def test_more_rows_are_not_expected_to_take_less_time() -> None:
    times = PassTimes(PaddedSizes(2, 2))
    for _ in range(50):
        # A pass of one row is slower than one of seven, as where it follows a pause.
        for num_rows, seconds in ((1, 0.12), (7, 0.1), (3, 0.11), (16, 0.2)):
            times.observe(seconds, num_rows)
    assert times.pass_s(1) == times.pass_s(4) == times.pass_s(7) == pytest.approx(0.11, rel=0.1)
    assert times.pass_s(16) == pytest.approx(0.2, rel=0.1)


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
    for _ in range(2):
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


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (PaddedSizes(), [4, 4, 4, 4, 8, 8, 8, 8, 12]),
        (PaddedSizes(6, 2), [6, 6, 6, 6, 6, 6, 8, 8, 10]),
        (PaddedSizes(1, 1), [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_rows_are_padded_to_the_next_size(sizes: PaddedSizes, expected: list[int]) -> None:
    assert [sizes.padded(num_rows) for num_rows in range(1, 10)] == expected
    for num_rows in range(1, 10):
        assert sizes.is_full(num_rows) == (sizes.padded(num_rows + 1) > sizes.padded(num_rows))


ROW_S, POSITION_S = 0.0005, 1e-6


def _prompt_s(*prompts: tuple[int, int]) -> float:
    return sum(num * (ROW_S + POSITION_S * (start + num / 2)) for num, start in prompts)


def _with_prompts() -> PassTimes:
    """Returns the times of passes of 10 ms, alone and with prompts."""
    times = PassTimes()
    for prompts in ([], [(512, 0)], [(512, 512)], [(8, 0)], [(8, 1500), (4, 30)], [(16, 700)]):
        times.observe(0.010 + _prompt_s(*prompts), 1, prompts)
    return times


def test_the_linear_and_the_attention_cost_of_a_prompt_are_told_apart() -> None:
    assert PassTimes().prefill_s(8, 0) == math.inf
    times = _with_prompts()
    for num, start in ((10, 0), (10, 3000), (200, 100)):
        assert times.prefill_s(num, start) == pytest.approx(_prompt_s((num, start)), rel=0.01)
    assert times.pass_s(1) == pytest.approx(0.010), "prompts do not count as passes that decode"


def test_a_prompt_alone_counts_without_the_cost_of_a_small_pass() -> None:
    times = _with_prompts()
    for _ in range(100):
        times.observe(0.010 + _prompt_s((16, 0)), 0, [(16, 0)])
    assert times.prefill_s(1000, 0) == pytest.approx(_prompt_s((1000, 0)), rel=0.02)


def test_old_prompts_fade() -> None:
    times = _with_prompts()
    for _ in range(100):
        times.observe(0.010 + 8 * 0.002, 1, [(8, 0)])
        times.observe(0.010 + 8 * 0.004, 1, [(8, 1000)])
    assert times.prefill_s(8, 0) == pytest.approx(8 * 0.002, rel=0.1)
    assert times.prefill_s(8, 1000) == pytest.approx(8 * 0.004, rel=0.1)


def test_one_prompt_after_a_pause_determines_the_speed_of_all() -> None:
    times = _with_prompts()
    for factor in (5.0, 0.5):
        times.reset_prefill_speed(0.010 + factor * _prompt_s((64, 0)), 64)
        for num, start in ((1000, 0), (200, 3000)):
            assert times.prefill_s(num, start) == pytest.approx(factor * _prompt_s((num, start)), rel=0.02)
    assert times.pass_s(1) == pytest.approx(0.010), "decoding has a speed of its own"


def test_a_prompt_that_was_measured_before_any_pass_counts_in_seconds() -> None:
    times = PassTimes()
    times.observe(0.256, 0, [(256, 0)])
    assert times.prefill_s(512, 0) == pytest.approx(0.512)
    for _ in range(5):
        times.observe(0.010, 1)
    assert times.prefill_s(512, 0) == pytest.approx(0.512)


def test_a_prompt_beside_passes_of_unknown_time_does_not_count() -> None:
    times = PassTimes()
    times.observe(0.3, 1, [(256, 0)])
    assert times.prefill_s(1, 0) == math.inf


def test_prompts_that_add_no_time_never_make_the_costs_overflow() -> None:
    """Passes of a Markov model: most prompts are lost in the noise of a pass."""
    rng = random.Random(1)
    times = PassTimes()
    for _ in range(20_000):
        times.observe(1e-3 * rng.uniform(0.8, 1.2), 4)
        times.observe(1e-3 * rng.uniform(0.8, 1.25), 4, [(3, 0)])
    assert 0 < times.prefill_s(3, 0) < 1e-2
