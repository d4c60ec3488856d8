"""Steps of which one session's failure is its own, and parts that say everything once."""

from collections.abc import Sequence
from typing import cast

import pytest

from outrider.control.pass_times import PassTimes
from outrider.drafters import stepping
from outrider.drafters.drafter import Drafter, DraftTerms, OpenProposal, StepRows
from outrider.drafters.stepping import SentProposal, Stepper
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.tokens import Base

TERMS = DraftTerms(SamplingParameters(), AcceptanceRule.COUPLED, 1, frozenset())


def _proposal(session_id: str = "s", num: int = 3) -> OpenProposal:
    return OpenProposal(session_id, [1], TERMS, num)


class _Drafter:
    """Appends a node to every proposal; fails where one of them is of a session that it cannot draft for."""

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.times = PassTimes()
        self.tokens_per_step = 1
        self.forgotten: list[str] = []

    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        if any(proposal.session_id in self.broken for proposal in proposals):
            raise RuntimeError("no such page")
        for proposal in proposals:
            proposal.append(5)
        return StepRows(len(proposals))

    @property
    def num_rows_alone(self) -> int:
        return 0

    def forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)


def test_everything_is_said_once() -> None:
    sent = SentProposal(Base(1, 1), _proposal(), 1)
    assert sent.next_part(0.1) is None
    sent.proposal.append(5)
    sent.proposal.append(6)
    part = sent.next_part(0.1)
    assert part is not None
    assert (part.first_node, len(part.nodes), part.complete, part.known_len, part.step_time_s) == (1, 2, False, 1, 0.1)
    assert sent.next_part(0.1) is None
    sent.proposal.append(7)
    part = sent.next_part(0.1)
    assert part is not None
    assert (part.first_node, len(part.nodes), part.complete) == (3, 1, True)
    assert sent.next_part(0.1) is None


def test_nodes_that_took_no_step_are_sent_without_its_time() -> None:
    sent = SentProposal(Base(1, 1), _proposal(), 1)
    sent.proposal.append(5)
    sent.proposal.took_steps = False
    part = sent.next_part(0.1)
    assert part is not None
    assert part.step_time_s == 0


def test_that_nothing_comes_is_said_for_every_length_that_is_told() -> None:
    sent = SentProposal(Base(1, 1), _proposal(num=0), 1)
    for length in (1, 4):
        sent.advance(Base(length, 1))
        part = sent.next_part(0.1)
        assert part is not None
        assert (part.nodes, part.complete, part.known_len) == ((), True, length)
        assert sent.next_part(0.1) is None


def test_a_proposal_that_misses_features_waits_for_them() -> None:
    sent = SentProposal(Base(1, 1), _proposal(), 1)
    assert sent.can_go_on
    sent.proposal.missing_features_from = 0
    assert not sent.can_go_on


def test_only_sessions_that_fail_are_refused() -> None:
    drafter = _Drafter("b")
    stepper = Stepper(cast(Drafter, drafter))
    proposals = [_proposal(name) for name in "abc"]
    stepper.step(proposals)
    assert [proposal.refusal is not None for proposal in proposals] == [False, True, False]
    assert [len(proposal.nodes) for proposal in proposals] == [1, 0, 1]
    assert set(drafter.forgotten) == {"a", "b", "c"}, "what a broken pass has cached is not known"
    assert (stepper.num_passes, stepper.num_tokens) == (2, 2)
    assert not drafter.times.known, "the time of a step that failed is no step's"
    assert stepper.model_time_s > 0
    stepper.step([_proposal("a")])
    assert stepper.step_time_s > 0


class _Clock:
    """Time that passes as steps do: 10 ms and 1 ms a row."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class _TimedDrafter(_Drafter):
    """Runs four rows for each session, and lets a clock go on."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        num_rows = 4 * len(proposals)
        self._clock.now += 0.010 + 0.001 * num_rows
        return StepRows(num_rows)


def test_what_sessions_add_to_each_others_steps_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(stepping, "time", clock)
    stepper = Stepper(cast(Drafter, _TimedDrafter(clock)))
    alone, together = [_proposal("a")], [_proposal(name) for name in "abcdefgh"]
    for _ in range(20):
        stepper.step(alone)
    assert stepper.shared_time_s == pytest.approx(0.0, abs=1e-9)
    assert stepper.alone_s == pytest.approx(0.014)
    for _ in range(20):
        stepper.step(together)
        stepper.step(alone)
    before = stepper.shared_time_s
    stepper.step(together)
    assert stepper.shared_time_s - before == pytest.approx(0.028, rel=0.1), "42 ms, of which one needs 14"
    assert stepper.model_time_s == pytest.approx(clock.now)


class _NarrowingDrafter(_TimedDrafter):
    """Runs as many rows for eight sessions as it would run for one."""

    @property
    def num_rows_alone(self) -> int:
        return 8

    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        self._clock.now += 0.010 + 0.001 * 8
        return StepRows(8)


def test_rows_that_sessions_take_from_each_other_are_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(stepping, "time", clock)
    drafter = _TimedDrafter(clock)
    stepper = Stepper(cast(Drafter, drafter))
    for num in (1, 2, 4, 8) * 20:
        stepper.step([_proposal(str(number)) for number in range(num)])
    narrowing = _NarrowingDrafter(clock)
    narrowing.times = drafter.times
    stepper._drafter = cast(Drafter, narrowing)
    before = stepper.shared_time_s
    stepper.step([_proposal("a")])
    assert stepper.shared_time_s == pytest.approx(before)
    stepper.step([_proposal(name) for name in "abcd"])
    # All four as wide as one would take 42 ms in place of 18.
    assert stepper.shared_time_s - before == pytest.approx(0.018 * (1 - 18 / 42), rel=0.1)


class _PromptDrafter(_TimedDrafter):
    """Runs steps of four rows, and with every tenth one a prompt of 1 ms a row."""

    num_steps = 0

    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        self.num_steps += 1
        rows = StepRows.of(4, [(500, 0)] if self.num_steps % 10 == 0 else [])
        self._clock.now += 0.010 + 0.001 * rows.num_rows
        return rows


def test_a_step_that_drafts_several_tokens_of_a_path_takes_less_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(stepping, "time", clock)
    drafter = _TimedDrafter(clock)
    drafter.tokens_per_step = 5
    stepper = Stepper(cast(Drafter, drafter))
    for _ in range(3):
        before = clock.now
        stepper.step([_proposal()])
        assert stepper.step_time_s == pytest.approx((clock.now - before) / 5)


def test_a_prompt_does_not_make_steps_look_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(stepping, "time", clock)
    drafter = _PromptDrafter(clock)
    stepper = Stepper(cast(Drafter, drafter))
    assert stepper.step_time_s == 0
    for _ in range(40):
        stepper.step([_proposal()])
        assert stepper.step_time_s == pytest.approx(0.014)
    assert drafter.times.prefill_s(500, 0) == pytest.approx(0.5)


def test_short_texts_count_as_rows_that_decode() -> None:
    assert StepRows.of(3, [(2, 40), (16, 7), (17, 90)]) == StepRows(21, ((17, 90),))
    assert StepRows.of(3, [(2, 40), (17, 90)]).num_rows == 22


class _CompilingDrafter(_TimedDrafter):
    """Takes ten seconds more for the first step of each number of sessions."""

    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        if len(proposals) not in self.seen:
            self.seen.add(len(proposals))
            self._clock.now += 10.0
        return super().step(proposals)

    def __init__(self, clock: _Clock) -> None:
        super().__init__(clock)
        self.seen: set[int] = set()


def test_the_first_step_of_a_size_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(stepping, "time", clock)
    drafter = _CompilingDrafter(clock)
    stepper = Stepper(cast(Drafter, drafter))
    for num in (1, 1, 1, 2, 3, 2, 3):
        stepper.step([_proposal(str(number)) for number in range(num)])
    assert drafter.times.pass_s(4) == pytest.approx(0.014, rel=0.05)
    assert drafter.times.pass_s(12) == pytest.approx(0.022, rel=0.05)
