"""The controller: it waits where that pays and as long as it pays, stops where it does not, and takes it up again."""

import random

import pytest

from outrider.control.allocation import allocate
from outrider.control.draft_times import DraftTimes
from outrider.control.pass_times import PaddedSizes, PassTimes
from outrider.control.policy import RoundPlan, SpeculationPolicy, WorkerStatistics
from outrider.speculation.proposal_tree import Candidate

DEPTH = 5


def _times(plain_s: float = 0.02, row_s: float = 0.0004) -> PassTimes:
    times = PassTimes()
    for _ in range(20):
        for num_rows in (1, 6, 16, 64, 384):
            times.observe(plain_s + row_s * num_rows, num_rows)
    return times


class _Session:
    """A session whose target, draft and network are a few numbers; its clock is its own."""

    def __init__(
        self,
        *,
        accepted: float,
        answer_s: float = 0.002,
        step_s: float = 0.001,
        times: PassTimes | None = None,
        statistics: WorkerStatistics | None = None,
        max_wait_s: float = 0.1,
    ) -> None:
        statistics = statistics or WorkerStatistics(times or _times())
        self.times = statistics.times
        self.policy = SpeculationPolicy(max_wait_s, statistics)
        self.accepted, self.answer_s, self.step_s = accepted, answer_s, step_s
        self._length, self._now = 0, 0.0
        self._random = random.Random(2)

    def round(self) -> RoundPlan:
        """Runs a round of a draft that answers as the numbers say; returns what was decided before it."""
        policy, draft = self.policy, self.policy.draft
        plan = policy.begin([], 0, DEPTH)
        self._length += 1
        draft.record_verdict(self._length, self._now)
        draft.step_s = self.step_s
        wait_s = 0.0
        if plan.wants_draft:
            draft.record_answer(self._length, self._now + self.answer_s)
            wait_s = min(plan.wait_s, self.answer_s + (plan.depth - 1) * self.step_s)
        depth = round((wait_s - self.answer_s) / self.step_s) + 1 if wait_s >= self.answer_s else 0
        is_trial = plan.is_trial
        depth = DEPTH if is_trial else depth
        num = 0
        for place in range(1, depth + 1):
            hit = self._random.random() < self.accepted
            policy.rates.observe_one(place, 1, hit)
            if not hit:
                break
            num += 1
        if plan.wait_s:
            policy.observe_round(num, depth, depth, wait_s, waited=True)
        else:
            policy.observe_plain()
        if is_trial:
            policy.observe_late(num, DEPTH)
        self._now += 0.05
        return plan

    def settle(self, num_rounds: int = 200) -> RoundPlan:
        """Runs rounds; returns the last plan."""
        for _ in range(num_rounds):
            plan = self.round()
        return plan


def test_a_new_request_waits_for_all_and_one_without_a_draft_for_nothing() -> None:
    plan = SpeculationPolicy(0.1, WorkerStatistics()).begin([], 0, DEPTH)
    assert (plan.wait_s, plan.depth, plan.num_speculative_tokens) == (0.1, DEPTH, DEPTH)
    assert SpeculationPolicy(0.0, WorkerStatistics()).begin([], 0, DEPTH) == RoundPlan()
    assert SpeculationPolicy(0.1, WorkerStatistics()).begin([], 0, 0) == RoundPlan()


@pytest.mark.parametrize(
    ("accepted", "answer_s", "waits"),
    [(0.8, 0.002, True), (0.05, 0.004, False), (0.5, 0.002, True), (0.5, 0.03, False), (0.95, 0.03, True)],
)
def test_it_waits_iff_that_pays(accepted: float, answer_s: float, waits: bool) -> None:
    assert (_Session(accepted=accepted, answer_s=answer_s).settle().wait_s > 0) is waits


def test_it_waits_for_a_shorter_line_where_steps_are_slow() -> None:
    quick = _Session(accepted=0.8, step_s=0.0005).settle()
    slow = _Session(accepted=0.8, step_s=0.009).settle()
    assert 0 < slow.depth < quick.depth


def test_a_longer_line_is_not_expected_to_have_more_nodes_than_rounds_verify() -> None:
    policy = SpeculationPolicy(0.1, WorkerStatistics(_times()))
    policy.draft.record_verdict(1, 0.0)
    policy.draft.record_answer(1, 0.002, 4)
    for _ in range(50):
        policy.observe_round(1, 1, 7, 0.002, waited=True)
    assert policy.expect_whole(1).num_rows == pytest.approx(8, rel=0.01)
    assert policy.expect_whole(4).num_rows == pytest.approx(8, rel=0.01), "a draft's trees have seven nodes"
    assert policy.expect_whole(9).num_rows == pytest.approx(10), "but no fewer than the main line"
    chains = SpeculationPolicy(0.1, WorkerStatistics(_times()))
    chains.draft.record_verdict(1, 0.0)
    chains.draft.record_answer(1, 0.002, 4)
    for _ in range(50):
        chains.observe_round(1, 4, 4, 0.002, waited=True)
    assert [chains.expect_whole(goal).num_rows for goal in (1, 4)] == pytest.approx([2, 5], rel=0.01)


def test_a_dead_draft_costs_one_wait() -> None:
    policy = SpeculationPolicy(0.1, WorkerStatistics(_times()))
    plan = policy.begin([], 0, DEPTH)
    policy.observe_round(0, 0, 0, plan.wait_s, waited=True)
    assert policy.begin([], 0, DEPTH).wait_s == 0.0


def test_patience_is_not_much_longer_than_what_is_expected() -> None:
    plan = _Session(accepted=0.9, answer_s=0.002, max_wait_s=5.0).settle()
    assert 0.006 < plan.wait_s < 0.05


def test_what_is_here_is_not_waited_for() -> None:
    session = _Session(accepted=0.8)
    session.settle()
    stock = [0.8**place for place in range(1, DEPTH + 1)]
    assert session.policy.begin(stock, DEPTH, DEPTH, runs_ahead=True).wait_s == 0.0
    plan = session.policy.begin([], 0, DEPTH, runs_ahead=True)
    assert plan.wait_s > 0 and plan.wants_draft


def test_of_a_line_longer_than_there_is_room_the_round_uses_what_it_may() -> None:
    session = _Session(accepted=0.8)
    session.settle()
    plan = session.policy.begin([0.8, 0.6], DEPTH, 2)
    assert plan.wait_s == 0 and plan.expects.num_rows == 3


def test_a_full_batch_ends_speculation_and_a_choice_is_kept_while_it_is_nearly_as_good() -> None:
    session = _Session(accepted=0.5, times=_times(row_s=0.001), answer_s=0.004)
    session.settle()
    waits = []
    for num_sessions in (1, 8, 64, 256):
        session.times.num_sessions = num_sessions
        waits.append(session.policy.begin([], 0, DEPTH).wait_s > 0)
    assert waits[0] and not waits[-1]
    assert waits == sorted(waits, reverse=True)


def test_proposals_that_rarely_come_are_worth_less() -> None:
    session = _Session(accepted=0.8, answer_s=0.012)
    assert session.settle().wait_s > 0
    for _ in range(60):
        plan = session.policy.begin([], 0, DEPTH)
        if plan.wait_s:
            session.policy.observe_round(0, 0, 0, 0.012, waited=True)
        else:
            session.policy.observe_plain()
    assert session.policy.begin([], 0, DEPTH).wait_s == 0.0


def test_waits_in_vain_become_rarer() -> None:
    policy = SpeculationPolicy(0.1, WorkerStatistics(_times()))
    policy.begin([], 0, DEPTH)
    policy.observe_round(0, 0, 0, 0.1, waited=True)
    rounds = []
    for _ in range(7):
        num_plain = 0
        while policy.begin([], 0, DEPTH).wait_s == 0.0:
            policy.observe_plain()
            num_plain += 1
        rounds.append(num_plain)
        policy.observe_round(0, 0, 0, 0.1, waited=True)
    assert rounds == [64, 128, 256, 512, 1024, 1024, 1024]


def test_late_proposals_that_were_right_bring_speculation_back() -> None:
    session = _Session(accepted=0.02)
    assert session.settle().wait_s == 0.0
    for _ in range(30):
        for place in range(1, DEPTH + 1):
            session.policy.rates.observe_one(place, 1, True)
        session.policy.observe_late(DEPTH, DEPTH)
    assert session.policy.begin([], 0, DEPTH).wait_s > 0


def test_a_draft_that_runs_ahead_is_asked_on_while_what_it_says_is_of_use() -> None:
    session = _Session(accepted=0.5, answer_s=0.09)
    assert session.settle().wait_s == 0.0
    wanted = []
    for _ in range(100):
        wanted.append(session.policy.begin([], 0, DEPTH, runs_ahead=True).wants_draft)
        session.policy.observe_round(1, 1, 1, 0.0, waited=False)
    assert all(wanted[-20:])
    for _ in range(60):
        session.policy.observe_round(0, 1, 1, 0.0, waited=False)
    wanted = [session.policy.begin([], 0, DEPTH, runs_ahead=True).wants_draft]
    for _ in range(256):
        session.policy.observe_plain()
        wanted.append(session.policy.begin([], 0, DEPTH, runs_ahead=True).wants_draft)
    assert wanted.count(False) > 20 and True in wanted, "it is tried again now and then"


def test_a_draft_that_runs_ahead_is_left_alone_where_nothing_of_it_is_worth_verifying() -> None:
    session = _Session(accepted=0.5, answer_s=0.09)
    session.settle()
    for _ in range(30):
        session.policy.observe_round(1, 1, 1, 0.0, waited=False)
    assert session.policy.begin([], 0, DEPTH, runs_ahead=True).wants_draft
    wanted = []
    for _ in range(256):
        session.policy.observe_plain()
        wanted.append(session.policy.begin([], 0, DEPTH, runs_ahead=True).wants_draft)
    assert wanted.count(True) < 96 and not all(wanted[-16:])


def test_without_adaptation_every_round_waits_until_all_is_here() -> None:
    policy = SpeculationPolicy(0.1, WorkerStatistics(_times()), adapts=False)
    for _ in range(5):
        policy.observe_round(0, 0, 0, 0.1, waited=True)
    assert policy.begin([], 0, DEPTH).wait_s == 0.1
    assert policy.begin([0.1] * DEPTH, DEPTH, DEPTH).wait_s == 0.0


def test_answers_are_timed_from_their_verdicts() -> None:
    draft = DraftTimes()
    draft.step_s = 0.004
    for place in range(1, 20):
        draft.record_verdict(place, float(place))
        draft.record_answer(place, place + 0.03)
    draft.record_answer(3, 99.0)
    assert draft.arrival_s(1, is_running=False) == pytest.approx(0.03)
    assert draft.arrival_s(3, is_running=False) == pytest.approx(0.038)
    assert draft.arrival_s(2, is_running=True) == pytest.approx(0.008)
    draft.record_timeout(0.1)
    assert draft.arrival_s(1, is_running=False) > 0.04


def _line(*values: float) -> list[Candidate]:
    return [Candidate(number, value) for number, value in enumerate(values, 1)]


def test_nodes_of_all_sessions_compete_for_the_pass() -> None:
    times = _times(0.02, 0.001)
    good, poor = _line(0.9, 0.8, 0.7), _line(0.3, 0.02, 0.001)
    assert allocate([good, poor], 2.0, 2, 100, times) == [[1, 2, 3], [1, 2, 3]], (
        "a pass of 8 rows is worth it, and full"
    )
    assert allocate([good, poor], 2.0, 4, 100, times) == [[1, 2, 3], [1]]
    assert allocate([good, poor], 2.0, 2, 4, times) == [[1, 2], []]
    assert allocate([good, poor], 2.0, 2, 100, PassTimes()) == [[1, 2, 3], [1, 2, 3]]


def test_rows_that_come_for_nothing_are_taken() -> None:
    times = PassTimes(PaddedSizes(6, 2))
    for _ in range(50):
        times.observe(0.1, 1)
        times.observe(0.16, 8)
    line = _line(0.5, 0.3, 0.2, 0.1, 0.05, 0.04, 0.03)
    assert allocate([line], 1.0, 1, 100, times) == [[1, 2, 3, 4, 5]]
    assert allocate([line, line], 2.0, 2, 100, times) == [[1, 2], [1, 2]], "six rows of two sessions"


def test_rounds_that_have_waited_verify_more() -> None:
    times, line = _times(0.02, 0.002), _line(0.5, 0.25, 0.12, 0.12, 0.1, 0.1, 0.1)
    [plain], [waited] = (allocate([line], 1.0, 1, 100, times, wait_s) for wait_s in (0.0, 0.05))
    assert len(plain) == 3 and len(waited) == 7


def test_a_full_pass_verifies_less_and_in_the_end_nothing() -> None:
    times = _times(0.02, 0.001)
    taken = []
    for num_sessions in (1, 4, 16, 64, 256):
        parts = allocate([_line(0.6, 0.36, 0.2, 0.1)] * num_sessions, num_sessions, num_sessions, 10_000, times)
        taken.append(sum(map(len, parts)) / num_sessions)
    assert taken[0] >= 3 and taken[-1] == 0
    assert taken == sorted(taken, reverse=True)


def test_drafts_that_send_all_at_once_are_not_expected_step_by_step() -> None:
    draft = DraftTimes()
    draft.step_s = 0.01
    for place in range(1, 20):
        draft.record_verdict(place, float(place))
        draft.record_answer(place, place + 0.03, depth=4)
    assert draft.arrival_s(4, is_running=False) == pytest.approx(0.03)
    assert draft.arrival_s(6, is_running=False) == pytest.approx(0.05)
    # They are told how much is wanted, and less of it comes sooner.
    assert draft.arrival_s(2, is_running=False) == pytest.approx(0.01)


def test_drafts_that_wait_for_verdicts_are_asked_for_no_more_than_is_waited_for() -> None:
    session = _Session(accepted=0.8, step_s=0.009)
    plan = session.settle()
    assert 0 < plan.num_speculative_tokens == plan.depth < DEPTH
    stock = [0.8**place for place in range(1, DEPTH + 1)]
    ahead = session.policy.begin(stock, DEPTH - 1, DEPTH, runs_ahead=True)
    assert (ahead.wait_s, ahead.num_speculative_tokens) == (0.0, DEPTH), "one that runs ahead goes on"


def test_where_nothing_is_waited_for_a_trial_is_asked_for_now_and_then() -> None:
    session = _Session(accepted=0.02)
    session.settle()
    plans = [session.round() for _ in range(48)]
    assert all(plan.wait_s == 0 and plan.wants_draft == plan.is_trial for plan in plans)
    assert 2 <= sum(plan.is_trial for plan in plans) <= 6


def test_a_session_begins_with_what_others_have_shown() -> None:
    statistics = WorkerStatistics(_times())
    for _ in range(8):
        _Session(accepted=0.02, statistics=statistics).settle(60)
    assert SpeculationPolicy(0.1, statistics).begin([], 0, DEPTH).wait_s == 0
    for _ in range(8):
        _Session(accepted=0.9, statistics=statistics).settle(60)
    assert SpeculationPolicy(0.1, statistics).begin([], 0, DEPTH).wait_s > 0


def test_what_is_done_around_rounds_that_speculate_counts() -> None:
    session = _Session(accepted=0.5)
    assert session.settle().wait_s > 0
    for _ in range(50):
        session.times.observe_rest(0.0, speculates=False)
        session.times.observe_rest(0.05, speculates=True)
    assert session.settle().wait_s == 0


def test_a_machine_that_stands_still_for_a_moment_does_not_end_speculation() -> None:
    statistics = WorkerStatistics()
    for _ in range(20):
        for num_rows in (1, 6, 16, 64):
            statistics.times.observe(0.02 + 0.0004 * num_rows, num_rows)
    session = _Session(accepted=0.8, statistics=statistics)
    session.settle()
    answer_s, session.answer_s = session.answer_s, 0.6
    statistics.times.observe(0.6, 1)
    session.round()
    session.answer_s = answer_s
    assert [session.round().wait_s > 0 for _ in range(8)] == [True] * 8
    # What stays so is followed.
    session.answer_s = 0.6
    assert session.settle(40).wait_s == 0


def test_a_machine_that_stands_still_at_first_does_not_end_speculation_of_short_requests() -> None:
    statistics = WorkerStatistics(_times())
    _Session(accepted=0.8, statistics=statistics).round()
    statistics.times.observe_rest(2.0, speculates=True)
    statistics.times.observe_rest(0.001, speculates=False)
    waits = []
    for _ in range(10):
        session = _Session(accepted=0.8, statistics=statistics)
        for _ in range(16):
            waits.append(session.round().wait_s > 0)
            statistics.times.observe_rest(0.001, speculates=waits[-1])
    assert not any(waits[:16])
    assert all(waits[96:])


def test_short_requests_wait_in_vain_no_more_often_than_one_long_one() -> None:
    statistics = WorkerStatistics(_times())
    _Session(accepted=0.02, statistics=statistics).settle()
    waits = []
    for _ in range(200):
        session = _Session(accepted=0.02, statistics=statistics)
        waits += [session.round().wait_s > 0 for _ in range(16)]
    assert 1 <= sum(waits) <= 8


def test_sessions_that_need_no_draft_do_not_wait_all_at_once() -> None:
    statistics = WorkerStatistics(_times())
    statistics.times.num_sessions = 32
    _Session(accepted=0.02, statistics=statistics).settle(60)
    sessions = [_Session(accepted=0.02, statistics=statistics) for _ in range(32)]
    num_waits = 0
    for _ in range(2000):
        # All begin their rounds before any of them ends.
        plans = [session.policy.begin([], 0, DEPTH) for session in sessions]
        for session, plan in zip(sessions, plans, strict=True):
            if plan.wait_s:
                num_waits += 1
                assert session.policy.begin([], 0, DEPTH).wait_s > 0, "it waits to the end of its round"
                session.policy.observe_round(0, 1, 1, 0.002, waited=True)
            else:
                session.policy.observe_plain()
    assert 32 <= num_waits < 0.01 * 32 * 2000


def test_while_no_pass_was_measured_a_wait_is_as_long_as_it_may_be() -> None:
    policy = SpeculationPolicy(0.1, WorkerStatistics())
    policy.draft.record_verdict(1, 0.0)
    policy.draft.record_answer(1, 0.03)
    assert policy.begin([], 0, DEPTH).wait_s == 0.1


def test_an_answer_after_a_text_was_read_shows_what_later_ones_take_at_most() -> None:
    times, other = DraftTimes(), DraftTimes()
    for length, answer_s in enumerate([0.03] * 8 + [0.3] * 4):
        for draft, had_text in ((times, answer_s > 0.1 or length == 0), (other, False)):
            draft.record_verdict(length, length)
            draft.record_answer(length, length + answer_s, had_text=had_text)
    assert times.arrival_s(1, is_running=False) == pytest.approx(0.03)
    assert other.arrival_s(1, is_running=False) > 0.06
    # It counts where it is shorter than those before.
    for length in range(20, 30):
        times.record_verdict(length, length)
        times.record_answer(length, length + 0.01, had_text=True)
    assert times.arrival_s(1, is_running=False) < 0.012
