"""Passes that wait for sessions about to be ready, on a clock of the test's own."""

from typing import cast

from outrider.control.policy import WorkerStatistics
from outrider.lm.model import SessionStep
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.speculation.randomness import KeyedSource
from outrider.tokens import Base, NodeKind, ProposalNode, ProposalPart, ProposalTree, TokenSpan
from target_service.engine.commands import Handle, SpeculationTerms
from target_service.engine.constraints import Constraints
from target_service.engine.pass_budget import PassBudget
from target_service.engine.request import Request
from target_service.engine.scheduling import Scheduler
from target_service.engine.sessions import Resident
from target_service.engine.speculation import Speculation
from tests.target_service.conversation import model

PASS_S = 0.08
ANSWER_S = 0.03
DEPTH = 4
TERMS = SpeculationTerms(num_speculative_tokens=DEPTH, max_wait_s=0.2)


class _Target:
    """Requests of one target, and what it has measured: answers of 30 ms to passes of 80."""

    def __init__(self) -> None:
        self.statistics = WorkerStatistics()
        times = self.statistics.times
        for _ in range(20):
            for num_rows in (4, 8, 16, 64):
                times.observe(PASS_S + 0.0005 * num_rows, num_rows)
        times.num_sessions = 2
        self.model = model()
        self.scheduler = Scheduler(64, 64, PassBudget(2.0, times), times, Constraints(None, 16, ()))
        self.requests: list[Request] = []

    def open(self, terms: SpeculationTerms = TERMS) -> Request:
        """Adds a request that decodes, and whose draft is known by twenty rounds."""
        token_ids = [1, 2, 3, 4]
        resident = Resident(f"s{len(self.requests)}", self.model.new_cache(), token_ids)
        span = TokenSpan(0, tuple(token_ids[:-1]))
        assert resident.cache.reserve(span, ProposalTree())
        self.model.forward([SessionStep(resident.cache, span, ProposalTree(), wants_logits=False)])
        speculation = Speculation(terms, AcceptanceRule.COUPLED, self.statistics, adapts=True)
        speculation.restart(len(token_ids))
        draft, rates = speculation._policy.draft, speculation._policy.rates
        draft.step_s = 0.002
        for place in range(20 if terms.num_speculative_tokens else 0):
            draft.record_verdict(place, float(place))
            draft.record_answer(place, place + ANSWER_S, DEPTH)
            for depth in range(1, DEPTH + 1):
                rates.observe_one(depth, 1, True)
        parameters = SamplingParameters(seed=1, max_tokens=100)
        request = Request(
            number=len(self.requests) + 1,
            handle=cast(Handle, None),
            resident=resident,
            fencing_token=1,
            parameters=parameters,
            rule=AcceptanceRule.COUPLED,
            prompt_len=4,
            stop_token_ids=frozenset(),
            start_len=4,
            window_end=1000,
            source=KeyedSource(1),
            speculation=speculation,
            has_start=True,
        )
        self.requests.append(request)
        return request

    def answer(self, request: Request, now: float) -> None:
        nodes = tuple(ProposalNode(place, 5, NodeKind.GUESSED) for place in range(DEPTH))
        part = ProposalPart(Base(4, 1), 1, nodes, complete=True, known_len=4)
        request.speculation.receive(part, request.resident.token_ids, now)

    def pass_at(self, now: float) -> list[int]:
        """Returns the numbers of the requests in a pass of that time."""
        return [share.request.number for share in self.scheduler.shares(self.requests, now)]


def test_a_pass_waits_for_a_session_that_is_about_to_be_ready() -> None:
    target = _Target()
    one, two = target.open(), target.open()
    one.begin_round(100.0)
    two.begin_round(100.01)
    target.answer(one, 100.03)
    assert target.pass_at(100.03) == [], "the other is expected at 100.04"
    until = target.scheduler.next_time(target.requests, 100.03)
    assert until is not None and 100.04 < until < 100.05
    target.answer(two, 100.041)
    assert target.pass_at(100.041) == [1, 2]


def test_it_does_not_wait_for_long() -> None:
    target = _Target()
    one, two = target.open(), target.open()
    one.begin_round(100.0)
    two.begin_round(100.01)
    target.answer(one, 100.03)
    assert target.pass_at(100.03) == []
    until = target.scheduler.next_time(target.requests, 100.03)
    assert until is not None
    assert target.pass_at(until - 0.001) == []
    assert target.pass_at(until) == [1]


def test_it_does_not_wait_for_one_that_comes_after_the_pass() -> None:
    target = _Target()
    one, two = target.open(), target.open()
    one.begin_round(100.0)
    target.answer(one, 100.03)
    for _ in range(9):
        two.speculation._policy.draft.record_timeout(0.1)
    two.begin_round(100.03)
    assert two.speculation.wait_until > 100.12, "it waits, for longer than a pass takes"
    assert target.pass_at(100.03) == [1]


def test_what_a_session_was_held_up_for_is_not_its_drafts_doing() -> None:
    target = _Target()
    one, two = target.open(), target.open()
    one.begin_round(100.0)
    two.begin_round(100.01)
    target.answer(one, 100.03)
    assert target.pass_at(100.031) == []
    target.answer(two, 100.041)
    shares = target.scheduler.shares(target.requests, 100.041)
    assert [round(share.wait_s, 3) for share in shares] == [0.03, 0.031]
    assert [round(share.queue_s, 3) for share in shares] == [0.011, 0.0]


def test_sessions_that_need_no_proposal_are_not_held_up() -> None:
    target = _Target()
    for _ in range(8):
        request = target.open(SpeculationTerms())
        request.begin_round(100.0)
        for _ in range(20):
            request.speculation.observe(0, 0, 0, 0.0, 0.0)
    slow = target.open()
    slow.begin_round(100.0)
    assert target.pass_at(100.001) == list(range(1, 9))
