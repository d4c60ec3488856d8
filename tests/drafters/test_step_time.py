"""What a draft says that its steps take."""

import pytest

from outrider.drafters.step_time import StepTime


def test_a_prompt_does_not_make_steps_look_slow_for_long() -> None:
    time = StepTime()
    assert time.seconds == 0.0
    time.observe(0.5)
    for _ in range(8):
        time.observe(0.01)
    assert time.seconds == pytest.approx(0.01, rel=1)
    for _ in range(20):
        time.observe(0.01)
    time.observe(0.5)
    assert time.seconds < 0.012


def test_steps_that_have_become_slow_are_followed() -> None:
    time = StepTime()
    time.observe(0.01)
    for _ in range(60):
        time.observe(0.03)
    assert time.seconds == pytest.approx(0.03, rel=0.05)
