"""Whether a pass waits for others: where that gives more tokens a second, and never for long or for nothing."""

import random
from collections.abc import Callable, Sequence

import pytest

from outrider.control.batching_delay import BatchCandidate, batching_delay_s
from outrider.control.pass_times import PassTimes


def _times(plain_s: float = 0.08, row_s: float = 0.001) -> PassTimes:
    times = PassTimes()
    for _ in range(20):
        for num_rows in (4, 8, 16, 64, 384):
            times.observe(plain_s + row_s * num_rows, num_rows)
    return times


READY = BatchCandidate(3.0, 5.0, answer_s=0.03)


def _coming(ready_in_s: float, num_tokens: float = 3.0) -> BatchCandidate:
    return BatchCandidate(num_tokens, 5.0, ready_in_s, answer_s=0.03, later_tokens=3.0, later_rows=5.0)


def test_two_sessions_whose_drafts_wait_for_verdicts_share_passes() -> None:
    assert batching_delay_s([READY], [_coming(0.02)], _times()) == 0.02


def test_nothing_is_waited_for_that_comes_too_late() -> None:
    assert batching_delay_s([READY], [_coming(0.2)], _times()) is None
    assert batching_delay_s([READY] * 3, [_coming(0.01), _coming(0.02)], _times()) == 0.02


def test_nothing_is_waited_for_while_nothing_is_known() -> None:
    assert batching_delay_s([READY], [_coming(0.02)], PassTimes()) is None
    assert batching_delay_s([READY], [], _times()) is None


def test_sessions_that_need_no_proposal_are_not_held_up() -> None:
    plain = BatchCandidate(1.0, 1.0, ready_again=1.0)
    assert batching_delay_s([plain] * 8, [_coming(0.02)], _times()) is None


def test_sessions_whose_drafts_run_ahead_are_not_held_up_for_little() -> None:
    """The one that comes has a better proposal for the pass after this one."""
    ready = BatchCandidate(3.0, 5.0, answer_s=0.03, ready_again=0.7)
    assert batching_delay_s([ready] * 3, [_coming(0.02, num_tokens=1.8)], _times()) is None


def test_where_rows_cost_more_than_passes_nobody_waits() -> None:
    one, two = (
        BatchCandidate(3.0, 4.0, answer_s=0.03),
        BatchCandidate(3.0, 4.0, 0.01, 0.03, later_tokens=3.0, later_rows=4.0),
    )
    assert batching_delay_s([one], [two], _times(0.001, 0.01)) is None


class _Session:
    """One whose draft answers each verdict after a time, with a proposal that gives so many tokens."""

    def __init__(self, draw: random.Random, answer_s: float, num_tokens: float) -> None:
        self.answer_s, self.num_tokens = answer_s, num_tokens
        self.ready_at = draw.random() * answer_s

    def batch_candidate(self, now: float) -> BatchCandidate:
        ready_in_s = max(0.0, self.ready_at - now)
        return BatchCandidate(self.num_tokens, 5.0, ready_in_s, self.answer_s, 0.0, self.num_tokens, 5.0)


def _rate(sessions: Sequence[_Session], times: PassTimes, wait: Callable[..., float]) -> float:
    now = tokens = 0.0
    while now < 60:
        ready = [item for item in sessions if item.ready_at <= now]
        if not ready:
            now = min(item.ready_at for item in sessions)
            continue
        coming = [item.batch_candidate(now) for item in sessions if item.ready_at > now]
        if (wait_s := wait([item.batch_candidate(now) for item in ready], coming, times)) is not None:
            now += wait_s
            continue
        now += times.pass_s(5 * len(ready))
        tokens += sum(item.num_tokens for item in ready)
        for item in ready:
            item.ready_at = now + item.answer_s
    return tokens / now


@pytest.mark.parametrize("seed", range(60))
def test_a_target_that_waits_for_others_gives_no_less(seed: int) -> None:
    """Over sessions that differ, drafts that differ, and passes that cost little or much a row."""
    draw = random.Random(seed)
    times = _times(draw.uniform(0.01, 0.1), draw.choice([0.0002, 0.001, 0.005]))
    about = [(draw.uniform(0.005, 0.08), draw.uniform(1.0, 5.0)) for _ in range(draw.choice([2, 3, 5, 12]))]
    waiting, never = (
        _rate([_Session(random.Random(seed), *item) for item in about], times, rule)
        for rule in (batching_delay_s, lambda *about: None)
    )
    assert waiting > 0.85 * never


def test_on_average_waiting_for_others_gives_more() -> None:
    gains = []
    for seed in range(40):
        draw, times = random.Random(seed), _times(0.08, 0.001)
        about = [(draw.uniform(0.02, 0.06), 3.0) for _ in range(2)]
        waiting, never = (
            _rate([_Session(random.Random(seed), *item) for item in about], times, rule)
            for rule in (batching_delay_s, lambda *about: None)
        )
        gains.append(waiting / never)
    assert sum(gains) / len(gains) > 1.1
