"""The speculation policy: it waits where that pays, stops where it does not, and takes it up again."""

import pytest

from outrider.policy import DecayingMean, PassTimes, SpeculationPolicy

NODES = 5


def _policy(*, plain_s: float = 0.02, proposal_s: float = 0.022, adapts: bool = True) -> SpeculationPolicy:
    times = PassTimes()
    for _ in range(20):
        times.observe(plain_s, 1)
        times.observe(proposal_s, 1 + NODES)
    return SpeculationPolicy.create(0.1, times, adapts=adapts)


def test_a_mean_starts_at_the_first_value_and_decays() -> None:
    mean = DecayingMean(0.5)
    assert not mean.known
    for value, expected in ((4.0, 4.0), (0.0, 2.0), (0.0, 1.0)):
        mean.observe(value)
        assert mean.value == expected
    assert mean.known


def test_a_new_request_waits() -> None:
    assert _policy().wait_s() == 0.1
    assert SpeculationPolicy.create(0.0, PassTimes()).wait_s() == 0.0


@pytest.mark.parametrize(
    ("num_accepted", "wait_s", "waits"),
    [
        (3, 0.002, True),
        (0, 0.002, False),
        (1, 0.002, True),  # two tokens in 24 ms instead of 40
        (1, 0.03, False),  # two tokens in 52 ms instead of 40
        (4, 0.07, True),
    ],
)
def test_it_waits_iff_that_pays(num_accepted: int, wait_s: float, waits: bool) -> None:
    policy = _policy()
    for _ in range(20):
        policy.observe_round(num_accepted, wait_s, NODES)
    assert (policy.wait_s() > 0) is waits


def test_a_dead_draft_costs_one_wait() -> None:
    policy = _policy()
    policy.observe_round(0, 0.1, NODES)
    assert policy.wait_s() == 0.0


def test_without_any_plain_pass_a_proposal_pass_stands_in() -> None:
    policy = SpeculationPolicy.create(0.1, PassTimes())
    policy.times.observe(0.02, 1 + NODES)
    policy.observe_round(0, 0.001, NODES)
    assert policy.wait_s() == 0.0


def test_a_line_is_found_from_passes_of_different_sizes() -> None:
    times = PassTimes()
    assert times.pass_s(3) == 0
    for num_rows in (4, 9, 30, 4, 60):
        times.observe(0.01 + 0.0005 * num_rows, num_rows)
    assert times.row_s == pytest.approx(0.0005)
    assert times.pass_s(16) == pytest.approx(0.018)
    for _ in range(500):
        times.observe(0.02, 8)
    assert times.pass_s(8) == pytest.approx(0.02, rel=0.05)


def test_a_full_batch_ends_speculation() -> None:
    policy = _policy(plain_s=0.02, proposal_s=0.03)
    for _ in range(20):
        policy.observe_round(3, 0.005, NODES)
    for num_sessions, waits in ((1, True), (16, True), (64, False)):
        policy.times.num_sessions = num_sessions
        assert (policy.wait_s() > 0) is waits, num_sessions
    policy.observe_plain()
    for num_sessions, waits in ((16, False), (8, False), (1, True)):
        policy.times.num_sessions = num_sessions
        assert (policy.wait_s() > 0) is waits, f"{num_sessions}: a choice is kept while it is nearly as good"


def test_proposals_that_are_mostly_empty_cost_no_rows() -> None:
    policy = _policy(plain_s=0.02, proposal_s=0.03)
    for _ in range(60):
        policy.observe_round(2, 0.001, NODES)
        for _ in range(9):
            policy.observe_round(0, 0.001, 0)
    assert policy.wait_s() > 0
    for _ in range(60):
        policy.observe_round(0, 0.001, NODES)
    assert policy.wait_s() == 0


def test_waits_in_vain_become_rarer() -> None:
    policy = _policy()
    policy.observe_round(0, 0.1, NODES)
    rounds = []
    for _ in range(7):
        num_plain = 0
        while policy.wait_s() == 0.0:
            policy.observe_plain()
            num_plain += 1
        rounds.append(num_plain)
        policy.observe_round(0, 0.1, NODES)
    assert rounds == [64, 128, 256, 512, 1024, 1024, 1024]


def test_late_proposals_that_were_right_bring_speculation_back() -> None:
    policy = _policy()
    for _ in range(10):
        policy.observe_round(0, 0.002, NODES)
    assert policy.wait_s() == 0.0
    policy.observe_late(5)
    assert policy.expected_accepted > 0.5
    assert policy.wait_s() > 0


def test_waits_are_measured_again_after_many_plain_rounds() -> None:
    policy = _policy()
    policy.observe_round(0, 0.1, NODES)
    num_plain = 0
    while policy.wait_s() == 0.0:
        policy.observe_plain()
        num_plain += 1
    assert 32 <= num_plain <= 128
    policy.observe_round(0, 0.1, NODES)
    assert policy.wait_s() == 0.0


def test_without_adaptation_every_round_waits() -> None:
    policy = _policy(adapts=False)
    for _ in range(5):
        policy.observe_round(0, 0.1, NODES)
    assert policy.wait_s() == 0.1
