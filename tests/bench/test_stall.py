"""Which gaps overlap with the prefill of a long prompt."""

import pytest

from bench.stall import Stall, gaps_of
from bench.traffic import Trace


def test_gaps_that_overlap_with_a_prefill_are_told_from_the_others() -> None:
    # A session with a delta every second, and one gap of three seconds.
    trace = Trace(0.0, [*map(float, range(1, 12)), 14.0, 15.0, 16.0])
    stall = gaps_of([trace], [(11.5, 14.5)])
    assert stall.quiet == [1.0] * 6
    assert stall.under_prefill == [3.0, 1.0]
    assert stall.ratio == pytest.approx(3.0)
    assert stall.prefill_s == [3.0]


def test_gaps_before_the_last_session_has_begun_are_left_out() -> None:
    traces = [Trace(0.0, [float(second) for second in range(20)]), Trace(0.0, [12.5])]
    assert len(gaps_of(traces, []).quiet) == 6


def test_without_gaps_there_is_no_ratio() -> None:
    assert Stall([], [1.0], [1.0]).ratio == 0
