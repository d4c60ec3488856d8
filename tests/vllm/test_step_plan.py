"""How long a step waits, and what it verifies, against times and rates that are known."""

import pytest

from outrider.control.draft_times import DraftTimes
from outrider.control.pass_times import PassTimes
from outrider.speculation.acceptance import AcceptanceRates
from outrider.vllm.step_plan import Line, best_wait_s, verified


def steps(base_s: float, row_s: float) -> PassTimes:
    """Times of steps that take `base_s` and `row_s` for each row."""
    times = PassTimes()
    for _ in range(40):
        for num_rows in (4, 8, 16, 32):
            times.observe(base_s + row_s * num_rows, num_rows)
    return times


def rates(share: float) -> AcceptanceRates:
    """Rates of a draft whose first choice is accepted with this share."""
    found = AcceptanceRates()
    for number in range(400):
        for depth in range(1, 6):
            found.observe_one(depth, 1, number % 100 < 100 * share)
    return found


def answering(answer_s: float, step_s: float) -> DraftTimes:
    """Times of a draft that answers after `answer_s` with one token, and has another one each `step_s`."""
    times = DraftTimes()
    for number in range(20):
        times.record_verdict(number, float(number))
        times.record_answer(number, number + answer_s, 1)
    times.step_s = step_s
    return times


def line(values: tuple[float, ...] = (), *, answer_s: float = 0.004, step_s: float = 0.004, share: float = 0.9) -> Line:
    return Line(values, 5, rates(share), answering(answer_s, step_s))


def test_a_step_waits_for_a_draft_that_is_fast_beside_it() -> None:
    wait_s = best_wait_s([line()], [0], 1.0, steps(0.04, 0.0001))
    assert 0.004 <= wait_s <= 0.021


@pytest.mark.parametrize(
    "slow", [line(answer_s=0.2), line(share=0.02)], ids=["an answer takes five steps", "nothing is accepted"]
)
def test_a_step_does_not_wait_for_a_draft_that_does_not_pay(slow: Line) -> None:
    assert best_wait_s([slow], [0], 1.0, steps(0.04, 0.0001)) == 0


def test_one_slow_draft_does_not_hold_up_many_requests() -> None:
    ready = Line((0.9, 0.8, 0.7, 0.6, 0.5), 5, rates(0.9), None)
    alone, among = line(answer_s=0.03), [line(answer_s=0.03), *[ready] * 15]
    times = steps(0.04, 0.0001)
    assert best_wait_s([alone], [0], 1.0, times) > 0
    assert best_wait_s(among, [0] + [5] * 15, 1.0, times) == 0


def test_what_is_overdue_is_given_up() -> None:
    overdue = Line((), 5, rates(0.9), answering(0.004, 0.004), asked_s=0.1)
    assert best_wait_s([overdue], [0], 1.0, steps(0.04, 0.0001)) == 0


def test_no_wait_is_longer_than_the_limit() -> None:
    assert best_wait_s([line(answer_s=0.01)], [0], 0.005, steps(0.04, 0.0001)) == 0


def test_tokens_are_verified_while_they_pay() -> None:
    good, bad = (0.9, 0.8, 0.7, 0.6, 0.5), (0.02, 0.01, 0.01, 0.01, 0.01)
    free, dear = steps(0.04, 0.00001), steps(0.001, 0.01)
    assert verified([Line(good, 5, rates(0.9))], 256, free) == [5]
    # Rows up to four are one padded size, and cost what one does.
    assert verified([Line(bad, 5, rates(0.02))], 256, dear) == [3]
    assert verified([Line(bad, 5, rates(0.02))] * 4, 256, dear) == [0] * 4
    assert sum(verified([Line(good, 5, rates(0.9))] * 16, 20, free)) == 4


def test_no_more_is_verified_than_may_be() -> None:
    assert verified([Line((0.9, 0.8, 0.7), 1, rates(0.9))], 256, steps(0.04, 0.00001)) == [1]


def test_what_has_arrived_and_does_not_pay_is_not_waited_for() -> None:
    poor = Line((0.05,), 5, rates(0.05), answering(0.004, 0.004))
    assert best_wait_s([poor], [0], 1.0, steps(0.001, 0.01)) == 0
