"""Measuring passes at the start, for the choice between restoring and computing."""

from math import inf

import pytest

from outrider.control.pass_times import PassTimes
from target_service.engine.restoring import measure_passes
from tests.target_service.conversation import model


@pytest.mark.parametrize(("num_rows", "max_len"), [(512, 4096), (8, 4096), (512, 100), (512, 40)])
def test_a_prompt_of_any_allowed_length_is_measured_and_leaves_no_pages(num_rows: int, max_len: int) -> None:
    measured, times = model(), PassTimes()
    measure_passes(measured, times, num_rows, max_len)
    assert times.known
    # These passes take so short that beside other processes longer ones may be measured as no longer.
    assert 0 <= times.prefill_s(256, 0) < inf
    assert measured.kv_usage.num_held == 0
