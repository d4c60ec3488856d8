"""A target that is slower with drafts than without goes on without them, and finds out when that changes."""

import random

import pytest

from outrider.control.guard import SpeculationGuard


class Worker:
    """A target whose passes take a given time; with drafts they output more tokens, and may take longer."""

    def __init__(self, num_sessions: int = 8, seed: int = 0) -> None:
        self.guard = SpeculationGuard()
        self.now = 0.0
        self.num_sessions = num_sessions
        self._random = random.Random(seed)

    def run(self, num_passes: int, *, slowdown: float, accepted: float, noise: float = 0.1) -> tuple[float, float]:
        """Runs passes; returns tokens a second over those of plain decoding, and the share with drafts."""
        started, tokens, speculating = self.now, 0, 0
        for _ in range(num_passes):
            allows = self.guard.allows
            speculating += allows
            pass_s = 0.02 * (slowdown if allows else 1.0) * self._random.uniform(1 - noise, 1 + noise)
            num_tokens = [1 + (allows and self._random.random() < accepted) for _ in range(self.num_sessions)]
            self.now += pass_s
            tokens += sum(num_tokens)
            self.guard.count(self.num_sessions)
            self.guard.observe(self.now, dict(enumerate(num_tokens)), counts=True)
        return tokens / (self.now - started) / (self.num_sessions / 0.02), speculating / num_passes


def each(num_sessions: int, num_tokens: int) -> dict[int, int]:
    """Returns the same number of output tokens for each session."""
    return dict.fromkeys(range(num_sessions), num_tokens)


@pytest.mark.parametrize("num_sessions", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(("slowdown", "accepted"), [(1.5, 0.1), (1.3, 0.0), (1.1, 0.0)])
def test_drafts_that_cost_more_than_they_bring_cost_nearly_nothing(
    num_sessions: int, slowdown: float, accepted: float
) -> None:
    worker = Worker(num_sessions)
    worker.run(500, slowdown=slowdown, accepted=accepted)
    rate, _ = worker.run(4000, slowdown=slowdown, accepted=accepted)
    assert rate > 0.98


def test_a_trial_of_what_cost_much_takes_half_a_hundredth_of_the_time() -> None:
    worker = Worker(16)
    worker.run(60, slowdown=2.0, accepted=0.0)
    rate, share = worker.run(4000, slowdown=2.0, accepted=0.0)
    assert rate > 0.99 and share > 0


def test_passes_of_a_trial_that_take_long_count_as_what_they_take() -> None:
    worker = Worker(16)
    worker.run(60, slowdown=3.0, accepted=0.7, noise=0.01)
    rate, share = worker.run(5000, slowdown=3.0, accepted=0.7, noise=0.01)
    assert rate > 0.995 and share > 0


def test_texts_that_drafts_read_first_are_part_of_what_a_trial_costs() -> None:
    """Each time that drafts are asked for again, the first pass waits half a second for them."""
    guard, now, num_trials, did_allow = SpeculationGuard(), 0.0, 0, True
    for _ in range(4000):
        allows = guard.allows
        begins, did_allow = allows and not did_allow, allows
        num_trials += begins
        now += (0.5 if begins else 0.0) + 0.02
        guard.count(8)
        guard.observe(now, each(8, 1), counts=True)
    # The second of 0.5 s comes no sooner than 50 s after the first.
    assert 1 <= num_trials <= 3


def test_one_text_that_repeats_itself_does_not_slow_the_others_down() -> None:
    """Passes with drafts yield 1.5 times the tokens, most of them of one session, and take 1.3 times as long."""
    guard, now, speculating = SpeculationGuard(), 0.0, 0
    for number in range(1200):
        allows = guard.allows
        speculating += allows and number >= 200
        now += 0.026 if allows else 0.02
        guard.count(8)
        guard.observe(now, {**each(8, 1), 0: 5 if allows else 1}, counts=True)
    assert speculating < 50


def test_one_trial_that_met_an_idle_machine_does_not_undo_what_several_have_found() -> None:
    guard, now, num_trials, did_allow = SpeculationGuard(), 0.0, 0, True
    for _ in range(12000):
        allows = guard.allows
        num_trials, did_allow = num_trials + (allows and not did_allow), allows
        # Drafts gain nothing, but passes of their third trial take half as long as others.
        now += 0.01 if allows and num_trials == 3 else 0.03 if allows else 0.02
        guard.count(8)
        guard.observe(now, each(8, 1), counts=True)
        if num_trials == 3 and not allows:
            break
    assert num_trials == 3 and not guard.allows_at(8)


def test_a_session_that_waits_for_proposals_counts_with_the_tokens_that_it_has() -> None:
    """With drafts a pass takes half as long, but runs half of the sessions: each has its tokens as soon as before."""
    guard, now, speculating = SpeculationGuard(), 0.0, 0
    for number in range(1200):
        allows = guard.allows
        speculating += allows and number >= 200
        now += 0.01 if allows else 0.02
        guard.count(8)
        guard.observe(now, {session: int(not allows or session % 2 == number % 2) for session in range(8)}, counts=True)
    assert speculating < 100


def test_drafts_that_gain_nothing_are_left_out() -> None:
    worker = Worker(16)
    worker.run(500, slowdown=1.3, accepted=0.3, noise=0.01)
    assert worker.run(2000, slowdown=1.3, accepted=0.3, noise=0.01)[1] < 0.1


@pytest.mark.parametrize("num_sessions", [1, 4, 32])
def test_drafts_that_pay_go_on_but_for_one_pass_in_a_hundred(num_sessions: int) -> None:
    worker = Worker(num_sessions)
    worker.run(500, slowdown=1.1, accepted=0.6)
    rate, share = worker.run(4000, slowdown=1.1, accepted=0.6)
    assert share > 0.97 and rate > 0.98 * 1.6 / 1.1


def test_a_change_is_noticed_both_ways() -> None:
    worker = Worker()
    worker.run(600, slowdown=1.5, accepted=0.1)
    # No later than after the longest interval without speculation, and a trial.
    worker.run(2100, slowdown=1.1, accepted=0.8)
    assert worker.run(1000, slowdown=1.1, accepted=0.8)[1] > 0.95
    worker.run(1100, slowdown=1.5, accepted=0.1)
    assert worker.run(1000, slowdown=1.5, accepted=0.1)[1] < 0.2


def test_each_number_of_sessions_has_its_own_answer_and_begins_with_that_of_fewer() -> None:
    worker = Worker(16)
    worker.run(600, slowdown=1.5, accepted=0.1)
    assert not worker.guard.allows
    assert worker.guard.allows_at(1) and not worker.guard.allows_at(17)
    worker.num_sessions = 1
    worker.run(2, slowdown=1.0, accepted=0.8)
    assert worker.guard.allows  # of one session nothing was seen
    worker.num_sessions = 33
    worker.run(2, slowdown=1.5, accepted=0.1)
    assert not worker.guard.allows  # never seen either, but with fewer it did not pay
    _, share = worker.run(900, slowdown=1.1, accepted=0.8)
    assert not share  # nor is it tried soon
    worker.run(400, slowdown=1.1, accepted=0.8)
    assert worker.guard.allows
    worker.num_sessions = 31
    worker.run(2, slowdown=1.5, accepted=0.1)
    assert not worker.guard.allows


@pytest.mark.parametrize("was_seen", [False, True])
def test_several_sessions_begin_without_drafts_where_more_were_slower(*, was_seen: bool) -> None:
    worker = Worker(6)
    if was_seen:
        worker.run(5, slowdown=1.5, accepted=0.1)  # as requests arrive one after another
    worker.num_sessions = 16
    worker.run(100, slowdown=1.5, accepted=0.1)
    worker.num_sessions = 6
    worker.run(1, slowdown=1.5, accepted=0.1)
    assert worker.run(120, slowdown=1.5, accepted=0.1)[1] == 0
    worker.run(100, slowdown=1.1, accepted=0.8)  # it is tried once, and pays with so few
    assert worker.guard.allows and worker.guard.allows_at(6) and not worker.guard.allows_at(16)
    worker.num_sessions = 2
    worker.run(1, slowdown=1.1, accepted=0.8)
    assert worker.guard.allows


def test_more_sessions_that_were_there_for_a_moment_begin_with_what_fewer_found_later() -> None:
    worker = Worker(16)
    worker.run(5, slowdown=1.5, accepted=0.1)
    worker.num_sessions = 8
    worker.run(100, slowdown=1.5, accepted=0.1)
    worker.num_sessions = 16
    worker.run(1, slowdown=1.5, accepted=0.1)
    assert worker.run(900, slowdown=1.5, accepted=0.1)[1] == 0


def test_what_a_trial_has_decided_for_several_sessions_outlives_a_full_load() -> None:
    worker = Worker(6)
    worker.run(200, slowdown=1.1, accepted=0.8)
    worker.num_sessions = 16
    worker.run(300, slowdown=1.5, accepted=0.1)
    assert not worker.guard.allows
    worker.num_sessions = 6
    worker.run(1, slowdown=1.1, accepted=0.8)
    assert worker.guard.allows


def test_a_stall_of_the_machine_decides_nothing() -> None:
    worker = Worker(4)
    worker.run(47, slowdown=1.1, accepted=0.6)
    worker.now += 30
    worker.run(400, slowdown=1.1, accepted=0.6)
    assert worker.run(500, slowdown=1.1, accepted=0.6)[1] > 0.9


def test_a_trial_that_met_a_busy_machine_is_soon_repeated() -> None:
    guard, now, num_trials, did_allow = SpeculationGuard(), 0.0, 0, True
    for _ in range(75):
        allows = guard.allows
        num_trials, did_allow = num_trials + (did_allow and not allows), allows
        # Plain decoding is faster, but not while it is tried for the first time.
        now += 0.03 if allows else 0.05 if num_trials == 1 else 0.02
        guard.count(16)
        guard.observe(now, each(16, 1), counts=True)
    assert num_trials <= 3 and not guard.allows_at(16)


def test_passes_with_prompts_and_pauses_between_requests_show_no_rate() -> None:
    worker = Worker(1)
    for _ in range(2000):
        worker.now += 5.0
        worker.guard.observe(worker.now, each(1, 1), counts=False)
        worker.now += 0.02
        worker.guard.observe(worker.now, each(1, 1), counts=True)
        assert worker.guard.allows  # a trial would have begun after 48 passes


def test_the_time_of_prompts_is_left_out() -> None:
    """With drafts every pass has a prompt in it too; without them it is as long, and yields half as many tokens."""
    guard, now = SpeculationGuard(), 0.0
    for _ in range(600):
        allows = guard.allows
        now += 0.06 if allows else 0.02
        guard.count(8)
        guard.observe(now, each(8, 2 if allows else 1), counts=True, prompts_s=0.025 if allows else 0.0)
    assert guard.allows_at(8)


def test_a_pass_that_prompts_take_most_of_shows_no_rate() -> None:
    guard, now = SpeculationGuard(), 0.0
    for number in range(600):
        allows = guard.allows
        if not allows and number % 2:
            # The prompts took 0.18 s.
            now += 0.2
            guard.count(8)
            guard.observe(now, each(8, 1), counts=True, prompts_s=0.12)
        now += 0.05 if allows else 0.02
        guard.count(8)
        guard.observe(now, each(8, 2 if allows else 1), counts=True)
    assert not guard.allows_at(8)


def test_what_is_asked_before_anything_is_known_settles_nothing() -> None:
    worker = Worker(4)
    assert worker.guard.allows_at(32)
    worker.run(600, slowdown=1.5, accepted=0.1)
    assert not worker.guard.allows_at(32)
