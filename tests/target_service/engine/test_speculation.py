"""Proposals that run ahead, at a running target: hits, trees that are followed, what comes late or is wrong."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from outrider import wire
from outrider.control.policy import WorkerStatistics
from outrider.drafters.drafter import OpenProposal, StepRows
from outrider.drafters.loading import load_drafter
from outrider.drafters.options import DrafterKind, DrafterOptions
from outrider.parameters import REPLAYABLE_RULES, AcceptanceRule, SamplingParameters
from outrider.tokens import MAX_PROPOSAL_NODES, Base, NodeKind, ProposalNode, ProposalPart, SparseDistribution
from outrider.v1 import target_pb2 as pb
from outrider.v1 import tokens_pb2
from target_service.engine import passes
from target_service.engine.colocated import ColocatedDraft
from target_service.engine.commands import SpeculationTerms
from target_service.engine.results import RoundResult
from target_service.engine.rounds import Round, decide_all
from target_service.engine.speculation import Speculation
from tests.target_service.conversation import MODEL, Caller, target

PROMPT = [1, 2, 3, 4]
GREEDY = SamplingParameters(temperature=0, max_tokens=40, ignore_eos=True)


def _line(token_ids: list[int], first_parent: int = 0) -> tuple[ProposalNode, ...]:
    return tuple(
        ProposalNode(first_parent + place, token_id, NodeKind.GUESSED) for place, token_id in enumerate(token_ids)
    )


async def _send(caller: Caller, handle: int, part: ProposalPart) -> None:
    await caller.send(handle, proposal=wire.proposal_to_message(part))


async def _open(caller: Caller, handle: int, num: int, max_wait_s: float = 5.0) -> None:
    await caller.open(
        handle, PROMPT, GREEDY, num_speculative_tokens=num, max_wait_s=max_wait_s, stop_token_ids=(), lookahead=48
    )


async def test_what_is_below_the_targets_own_token_is_verified_without_another_word() -> None:
    async with target(adaptive_speculation=False) as (_, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        await _open(caller, 2, num=4)
        await caller.span(2, 0, PROMPT)
        await _send(caller, 2, ProposalPart(Base(4, 1), 1, _line(truth[:20]), complete=False, known_len=4))
        # The prompt's pass verifies nothing.
        output = list((await caller.receive(2)).verdict.token_ids)
        for _ in range(3):
            verdict = (await caller.receive(2)).verdict
            output += verdict.token_ids
            assert (verdict.num_accepted_tokens, verdict.hit) == (4, True)
            assert verdict.lookahead == 48
        assert output == truth[:16]


async def test_a_branch_beside_the_main_line_is_followed_too() -> None:
    async with target(adaptive_speculation=False) as (_, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        wrong = (truth[1] + 1) % 11
        nodes = (*_line([truth[0], wrong, 1, 2]), ProposalNode(1, truth[1], NodeKind.GUESSED), *_line(truth[2:8], 5))
        await _open(caller, 2, num=3)
        await caller.span(2, 0, PROMPT)
        await _send(caller, 2, ProposalPart(Base(4, 1), 1, nodes, complete=True, known_len=4))
        output = list((await caller.receive(2)).verdict.token_ids)
        while len(output) < 8:
            verdict = (await caller.receive(2)).verdict
            output += verdict.token_ids
            assert verdict.num_accepted_tokens > 0
        assert output == truth[: len(output)]


async def test_nodes_that_come_late_are_used_where_the_text_has_come_to() -> None:
    """The target has gone on by itself; of what then comes it finds its place."""
    async with target() as (engine, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        await caller.open(
            2, PROMPT, GREEDY, num_speculative_tokens=4, max_wait_s=0.0, stop_token_ids=(), lookahead=48, window=6
        )
        await caller.span(2, 0, PROMPT)
        output: list[int] = []
        while len(output) < 6:
            output += (await caller.receive(2)).verdict.token_ids
        # The window is closed: what comes now continues the prompt, six tokens back.
        await _send(caller, 2, ProposalPart(Base(4, 1), 1, _line(truth[:20]), complete=False, known_len=4))
        await caller.send(2, window=pb.VerifyWindow(committed_len=10, window_end=1000))
        verdicts = [verdict async for verdict in caller.verdicts(2)]
        output += [token_id for verdict in verdicts for token_id in verdict.token_ids]
        assert output == truth
        assert verdicts[0].num_accepted_tokens > 0
        assert engine.load.num_stale_messages == 0


async def test_stale_and_future_parts_are_counted_and_change_nothing() -> None:
    async with target() as (engine, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        await caller.open(
            2, PROMPT, GREEDY, num_speculative_tokens=4, max_wait_s=0.0, stop_token_ids=(), lookahead=8, window=6
        )
        await caller.span(2, 0, PROMPT)
        output: list[int] = []
        while len(output) < 6:
            output += (await caller.receive(2)).verdict.token_ids
        await _send(caller, 2, ProposalPart(Base(8, 1), 1, _line([1, 2]), complete=False, known_len=8))
        for base, first, known in (
            (Base(6, 1), 1, 6),  # another tree was planted since
            (Base(8, 1), 9, 8),  # with a gap before it
            (Base(11, 1), 1, 11),  # of a text that there is not
            (Base(8, 1), 3, 11),
            (Base(8, 7), 3, 8),  # of another lease
            (Base(2, 1), 1, 2),  # within the prompt
        ):
            await _send(caller, 2, ProposalPart(base, first, _line([3]), complete=False, known_len=known))
        await caller.send(2, window=pb.VerifyWindow(committed_len=10, window_end=1000))
        async for verdict in caller.verdicts(2):
            output += verdict.token_ids
        assert output == truth
        assert engine.load.num_stale_messages == 6


async def test_more_nodes_than_are_allowed_are_refused_and_counted() -> None:
    async with target() as (engine, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        await _open(caller, 2, num=4)
        await caller.span(2, 0, PROMPT)
        await _send(
            caller, 2, ProposalPart(Base(4, 1), 1, _line([1] * (MAX_PROPOSAL_NODES + 1)), complete=False, known_len=4)
        )
        output = [token_id async for verdict in caller.verdicts(2) for token_id in verdict.token_ids]
        assert output == truth
        assert engine.load.num_invalid_proposals == 1


async def test_under_rejection_a_line_is_verified_as_far_as_it_has_come() -> None:
    async with target(adaptive_speculation=False) as (_, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        await caller.open(
            2,
            PROMPT,
            GREEDY,
            rule=AcceptanceRule.REJECTION,
            num_speculative_tokens=3,
            stop_token_ids=(),
            lookahead=48,
        )
        await caller.span(2, 0, PROMPT)
        distribution = SparseDistribution(tuple(range(11)), (1 / 11,) * 11)
        nodes = [
            ProposalNode(place, token_id, NodeKind.DRAFTED, distribution)
            for place, token_id in enumerate([truth[0], 3, 3])
        ]
        nodes += [
            ProposalNode(3, 5, NodeKind.DRAFTED, distribution),
            ProposalNode(4, 5, NodeKind.DRAFTED, distribution),
        ]
        nodes += [ProposalNode(1, 4, NodeKind.GUESSED), ProposalNode(6, 4, NodeKind.DRAFTED, distribution)]
        await _send(caller, 2, ProposalPart(Base(4, 1), 1, tuple(nodes), complete=True, known_len=4))
        await caller.receive(2)
        verdict = (await caller.receive(2)).verdict
        # Of what hangs from the guess nothing: how it is chosen must not tell of its token.
        assert (verdict.num_draft_tokens, verdict.num_nodes) == (3, 4)


async def test_a_target_that_drafts_for_itself_gives_the_same_text_in_fewer_passes() -> None:
    for rule in REPLAYABLE_RULES:
        drafter = load_drafter(DrafterOptions(drafter=DrafterKind.MODEL, model=MODEL))
        async with target(draft=ColocatedDraft(drafter), adaptive_speculation=False) as (engine, caller):
            assert engine.drafter == "model"
            truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
            for handle, own_draft in ((2, True), (3, False)):
                await caller.open(
                    handle,
                    PROMPT,
                    GREEDY,
                    rule=rule,
                    num_speculative_tokens=4,
                    max_wait_s=0.5 if own_draft else 0.0,
                    stop_token_ids=(),
                    session=f"{rule}{handle}",
                    own_draft=own_draft,
                )
                await caller.span(handle, 0, PROMPT)
                verdicts = [verdict async for verdict in caller.verdicts(handle)]
                assert [token_id for verdict in verdicts for token_id in verdict.token_ids] == truth
                assert (len(verdicts) < 20) is own_draft


async def test_passes_count_for_the_comparison_of_where_their_drafts_are() -> None:
    drafter = load_drafter(DrafterOptions(drafter=DrafterKind.MODEL, model=MODEL))
    async with target(draft=ColocatedDraft(drafter)) as (engine, caller):
        statistics = engine._passes._statistics
        for handle, own_draft in ((2, True), (3, False)):
            wait_s = 0.5 if own_draft else 0.0
            options = {"num_speculative_tokens": 4, "max_wait_s": wait_s, "stop_token_ids": (), "own_draft": own_draft}
            await caller.open(handle, PROMPT, GREEDY, session=f"s{handle}", **options)
            await caller.span(handle, 0, PROMPT)
            assert [verdict async for verdict in caller.verdicts(handle)]
            counted = [statistics.guard_of(own_draft=own)._case.num_passes > 0 for own in (True, False)]
            assert counted == [True, not own_draft]


async def test_a_pass_that_only_reads_prompts_shows_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = load_drafter(DrafterOptions(drafter=DrafterKind.MODEL, model=MODEL))
    async with target(draft=ColocatedDraft(drafter)) as (engine, caller):
        guard, observed = engine._passes._statistics.own_guard, list[bool]()
        monkeypatch.setattr(guard, "observe", lambda *_, counts, prompts_s: observed.append(counts))
        options = {"num_speculative_tokens": 4, "max_wait_s": 0.5, "stop_token_ids": (), "own_draft": True}
        await caller.open(2, PROMPT, GREEDY, **options)
        await caller.span(2, 0, PROMPT)
        assert [verdict async for verdict in caller.verdicts(2)]
        assert len(observed) > 1
        assert not observed[0]
        assert all(observed[1:])


@pytest.mark.parametrize("num_others", [0, 7])
async def test_sessions_whose_prompts_are_still_to_be_read_decide_about_drafts_too(num_others: int) -> None:
    drafter = load_drafter(DrafterOptions(drafter=DrafterKind.MODEL, model=MODEL))
    async with target(draft=ColocatedDraft(drafter)) as (engine, caller):
        guard, now = engine._passes._statistics.own_guard, 0.0
        for _ in range(60):
            guard.count(8)
            now += 0.04 if guard.allows else 0.02
            guard.observe(now, dict.fromkeys(range(8), 1), counts=True)
        options = {"num_speculative_tokens": 4, "max_wait_s": 0.5, "stop_token_ids": (), "own_draft": True}
        for handle in range(2, 3 + num_others):
            await caller.open(handle, PROMPT, GREEDY, session=f"s{handle}", **options)
        await caller.span(2, 0, PROMPT)
        verdicts = [verdict async for verdict in caller.verdicts(2)]
        assert any(verdict.num_accepted_tokens for verdict in verdicts) is (num_others == 0)
        assert engine._times.num_sessions == 1


async def test_a_session_that_is_deleted_is_forgotten_by_a_colocated_draft_once_nothing_runs_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = load_drafter(DrafterOptions(drafter=DrafterKind.MODEL, model=MODEL))
    forgotten: list[str] = []
    monkeypatch.setattr(drafter, "forget", forgotten.append)
    async with target(draft=ColocatedDraft(drafter), adaptive_speculation=False) as (_, caller):
        options = {"num_speculative_tokens": 4, "max_wait_s": 0.5, "stop_token_ids": (), "own_draft": True}
        await caller.open(2, PROMPT, GREEDY, session="s", window=4, **options)
        await caller.span(2, 0, PROMPT)
        length = len(PROMPT) + len((await caller.receive(2)).verdict.token_ids)
        await caller.send(0, forget=tokens_pb2.ForgetSession(session_id="s"))
        await caller.plain(3, PROMPT, GREEDY, session="other", stop_token_ids=())
        assert not forgotten
        await caller.send(2, close=pb.VerifyClose(committed_len=length))
        await caller.plain(4, PROMPT, GREEDY, session="another", stop_token_ids=())
        assert forgotten == ["s"]


async def test_sessions_beside_each_other_share_a_colocated_drafts_steps() -> None:
    drafter = load_drafter(DrafterOptions(drafter=DrafterKind.MODEL, model=MODEL))
    prompts = [[number, number + 1, 3] for number in range(8)]

    async def run(caller: Caller, handle: int, *, own_draft: bool) -> list[int]:
        parameters = SamplingParameters(seed=handle % 100, max_tokens=30, ignore_eos=True)
        await caller.open(
            handle,
            prompts[handle % 100],
            parameters,
            num_speculative_tokens=4 if own_draft else 0,
            max_wait_s=1.0,
            stop_token_ids=(),
            own_draft=own_draft,
        )
        await caller.span(handle, 0, prompts[handle % 100])
        return [token_id async for verdict in caller.verdicts(handle) for token_id in verdict.token_ids]

    async with target(draft=ColocatedDraft(drafter)) as (_, caller):
        plain = await asyncio.gather(*(run(caller, number, own_draft=False) for number in range(8)))
        drafted = await asyncio.gather(*(run(caller, 100 + number, own_draft=True) for number in range(8)))
    assert drafted == plain


@pytest.mark.parametrize(("num_threads", "feature_layers", "used"), [(2, (0,), 1), (3, (0,), 3), (2, (), 2)])
async def test_a_heads_short_steps_leave_one_of_two_cores(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, feature_layers: tuple[int, ...], used: int
) -> None:
    drafter = load_drafter(DrafterOptions(drafter=DrafterKind.MODEL, model=MODEL))
    step, used_by_steps, used_by_passes = drafter.step, list[int](), list[int]()

    def counting(proposals: Sequence[OpenProposal]) -> StepRows:
        used_by_steps.append(torch.get_num_threads())
        if len(used_by_steps) == 2:
            raise RuntimeError("no such page")
        return step(proposals)

    def judging(rounds: Sequence[Round], logits: torch.Tensor, max_len: int) -> list[RoundResult]:
        used_by_passes.append(torch.get_num_threads())
        return decide_all(rounds, logits, max_len)

    monkeypatch.setattr(drafter, "step", counting)
    monkeypatch.setattr(passes, "decide_all", judging)
    monkeypatch.setattr(type(drafter), "info", replace(drafter.info, feature_layers=feature_layers))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)  # as a target does, before its engine's thread begins
    try:
        async with target(draft=ColocatedDraft(drafter), adaptive_speculation=False) as (_, caller):
            await caller.open(
                2, PROMPT, GREEDY, num_speculative_tokens=4, max_wait_s=1.0, stop_token_ids=(), own_draft=True
            )
            await caller.span(2, 0, PROMPT)
            assert [verdict async for verdict in caller.verdicts(2)]
    finally:
        torch.set_num_threads(before)
    assert len(used_by_steps) > 2
    assert set(used_by_steps) == {used}
    assert set(used_by_passes) == {num_threads}


async def test_a_session_that_a_colocated_draft_fails_on_goes_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = load_drafter(DrafterOptions(drafter=DrafterKind.MODEL, model=MODEL))
    step, num_failures = drafter.step, 0

    def failing(proposals: Sequence[OpenProposal]) -> int:
        nonlocal num_failures
        if any(proposal.session_id == "bad" for proposal in proposals):
            num_failures += 1
            raise RuntimeError("no such page")
        return step(proposals)

    monkeypatch.setattr(drafter, "step", failing)
    async with target(draft=ColocatedDraft(drafter), adaptive_speculation=False) as (engine, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())

        async def run(handle: int, session: str) -> int:
            await caller.open(
                handle,
                PROMPT,
                GREEDY,
                num_speculative_tokens=4,
                max_wait_s=1.0,
                stop_token_ids=(),
                session=session,
                own_draft=True,
            )
            await caller.span(handle, 0, PROMPT)
            verdicts = [verdict async for verdict in caller.verdicts(handle)]
            assert [token_id for verdict in verdicts for token_id in verdict.token_ids] == truth
            return sum(verdict.num_accepted_tokens for verdict in verdicts)

        bad, good = await asyncio.gather(run(2, "bad"), run(3, "good"))
        assert engine.host.loop.is_alive
    assert bad == 0 < min(good, num_failures)


async def test_a_draft_that_joins_late_is_not_waited_for_before_it_is_asked() -> None:
    """The verdict before said that nothing is awaited, so nobody was asked for this round."""
    async with target(adaptive_speculation=False) as (_, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        await caller.open(2, PROMPT, GREEDY, stop_token_ids=(), window=1)
        await caller.span(2, 0, PROMPT)
        first = (await caller.receive(2)).verdict
        assert not first.num_speculative_tokens
        await caller.send(2, speculation=pb.SpeculationSettings(num_speculative_tokens=4, max_wait_s=30))
        await caller.send(2, window=pb.VerifyWindow(committed_len=5, window_end=1000))
        second = (await caller.receive(2)).verdict
        assert second.wait_time_s == 0
        assert second.num_speculative_tokens
        assert [*first.token_ids, *second.token_ids] == truth[:2]


def test_a_round_that_makes_do_with_less_has_waited_until_that_came() -> None:
    statistics, length = WorkerStatistics(), len(PROMPT)
    for _ in range(20):
        for num_rows in (4, 8, 16):
            statistics.times.observe(0.08 + 0.0005 * num_rows, num_rows)
    terms = SpeculationTerms(num_speculative_tokens=4, max_wait_s=1.0, lookahead=48)
    speculation = Speculation(terms, AcceptanceRule.COUPLED, statistics, adapts=True)
    speculation.restart(length)
    for place in range(20):
        speculation._policy.draft.record_verdict(place, float(place))
        speculation._policy.draft.record_answer(place, place + 0.03, 4)
        for depth in range(1, 5):
            speculation._policy.rates.observe_one(depth, 1, hit=True)
    speculation._policy.draft.step_s = 0.001
    speculation.begin(100, 50.0)
    assert speculation.waits and not speculation.is_ready(length, 50.001)
    # The first node comes, and word that the next ones will take long.
    part = ProposalPart(Base(length, 1), 1, _line([7]), complete=False, known_len=length, step_time_s=0.5)
    assert speculation.receive(part, PROMPT, 50.04)
    assert speculation.is_ready(length, 50.045)
    assert math.isclose(speculation.waited_s(50.06), 0.04, abs_tol=1e-6)


@pytest.mark.parametrize("rule", AcceptanceRule)
def test_of_equal_places_the_node_that_its_draft_is_surer_of_is_verified_first(rule: AcceptanceRule) -> None:
    statistics, length = WorkerStatistics(), len(PROMPT)
    for number in range(100):
        is_right = number % 2 == 0
        statistics.rates.observe(1, [0.4, 0.9 if is_right else 0.3], 2 if is_right else 1)
    terms = SpeculationTerms(num_speculative_tokens=4, max_wait_s=1.0, lookahead=0)
    found = dict[float, list[int]]()
    for likelihood in (0.3, 0.9):
        speculation = Speculation(terms, rule, statistics, adapts=True)
        speculation.restart(length)
        pair = [ProposalNode(0, 5, NodeKind.GUESSED, likelihood=0.4)]
        pair.append(ProposalNode(0, 6, NodeKind.GUESSED, likelihood=likelihood))
        speculation.receive(ProposalPart(Base(length, 1), 1, tuple(pair), complete=True, known_len=length), PROMPT, 0.0)
        speculation.begin(100, 0.0)
        must, may = speculation.offer(100)
        assert not must
        found[likelihood] = [item.number for item in may]
    # Under `rejection` no decision depends on a token, and so on none of these.
    assert (found[0.3] != found[0.9]) is (rule is not AcceptanceRule.REJECTION)
    assert found[0.9][0] == 2 or rule is AcceptanceRule.REJECTION


def test_nodes_that_took_no_step_do_not_say_when_those_of_a_model_come() -> None:
    length, statistics = len(PROMPT), WorkerStatistics()
    terms = SpeculationTerms(num_speculative_tokens=4, max_wait_s=1.0, lookahead=0)
    speculation = Speculation(terms, AcceptanceRule.COUPLED, statistics, adapts=True)
    speculation.restart(length)

    def answer(taken_s: float, step_time_s: float) -> float:
        nonlocal now
        now += 10
        speculation.record_verdict(length, now)
        part = ProposalPart(Base(length, 1), 1, _line([7]), complete=True, known_len=length, step_time_s=step_time_s)
        assert speculation.receive(part, PROMPT, now + taken_s)
        return speculation._policy.draft.arrival_s(1, is_running=False)

    now = 0.0
    assert answer(0.03, 0.005) == pytest.approx(0.03)
    for _ in range(20):
        assert answer(0.001, 0.0) == pytest.approx(0.03)
    assert speculation._policy.draft.step_s == 0.005


@pytest.mark.parametrize(("num_idle", "num_left", "wants"), [(40, 15, False), (40, 16, True), (7, 15, True)])
def test_a_draft_that_was_not_needed_for_long_is_not_asked_for_the_last_few_tokens(
    num_idle: int, num_left: int, wants: bool
) -> None:
    statistics = WorkerStatistics()
    terms = SpeculationTerms(num_speculative_tokens=4, max_wait_s=1.0)
    speculation = Speculation(terms, AcceptanceRule.COUPLED, statistics, adapts=True)
    speculation.restart(len(PROMPT))
    statistics.guard._case.speculates = False
    for place in range(num_idle):
        speculation.begin(100 - place, float(place))
        assert not speculation.wants_draft
    statistics.guard._case.speculates = True
    speculation.begin(num_left, 50.0)
    assert speculation.wants_draft is wants


@pytest.mark.parametrize(("num_idle", "counts"), [(0, True), (4, True), (5, False)])
def test_an_answer_that_took_the_reading_of_a_text_says_nothing_about_the_next(num_idle: int, counts: bool) -> None:
    statistics = WorkerStatistics()
    speculation = Speculation(
        SpeculationTerms(num_speculative_tokens=4, max_wait_s=1.0), AcceptanceRule.COUPLED, statistics, adapts=True
    )
    length, now = len(PROMPT), 0.0
    speculation.restart(length)

    def answer(answer_s: float) -> None:
        speculation.begin(100, now)
        speculation.record_verdict(length, now)
        part = ProposalPart(Base(length, 1), 1, _line([1, 2]), complete=True, known_len=length, step_time_s=0.001)
        assert speculation.receive(part, range(length), now + answer_s)

    for _ in range(4):
        answer(0.01)
        length, now = length + 1, now + 1
    statistics.guard._case.speculates = False
    for _ in range(num_idle):
        speculation.begin(100, now)
    statistics.guard._case.speculates = True
    known_s = statistics.answers.seconds.value
    answer(0.5)
    assert (statistics.answers.seconds.value > known_s) is counts


@pytest.mark.parametrize("own_draft", [False, True])
def test_drafts_that_do_not_pay_in_one_place_may_in_the_other(own_draft: bool) -> None:
    statistics = WorkerStatistics()
    terms = SpeculationTerms(num_speculative_tokens=4, max_wait_s=1.0, own_draft=own_draft)
    speculation = Speculation(terms, AcceptanceRule.COUPLED, statistics, adapts=True)
    speculation.restart(len(PROMPT))
    for place, wants in ((not own_draft, True), (own_draft, False)):
        statistics.guard_of(own_draft=place)._case.speculates = False
        speculation.begin(100, 0.0)
        assert speculation.wants_draft is wants
    statistics.guard_of(own_draft=not own_draft)._case.speculates = True
    speculation.change(replace(terms, own_draft=not own_draft))
    speculation.begin(100, 1.0)
    assert speculation.wants_draft


def test_a_draft_that_each_round_needs_is_asked_for_the_last_few_tokens() -> None:
    length, statistics = len(PROMPT), WorkerStatistics()
    for _ in range(20):
        for num_rows in (1, 6, 16):
            statistics.times.observe(0.08 + 0.0005 * num_rows, num_rows)
    terms = SpeculationTerms(num_speculative_tokens=4, max_wait_s=1.0)
    speculation = Speculation(terms, AcceptanceRule.COUPLED, statistics, adapts=True)
    speculation.restart(length)
    now, text = 0.0, list(PROMPT)
    for num_left in range(80, 4, -5):
        speculation.record_verdict(len(text), now)
        speculation.begin(num_left, now)
        assert speculation.wants_draft, num_left
        nodes = _line([7, 8, 9, 10])
        part = ProposalPart(Base(len(text), 1), 1, nodes, complete=True, known_len=len(text), step_time_s=0.001)
        assert speculation.receive(part, text, now + 0.004)
        # The round goes on with the nodes that have come, and wants no more.
        assert speculation.is_ready(len(text), now + 0.005)
        text += [7, 8, 9, 10, 5]
        speculation.advance([7, 8, 9, 10, 5], len(text))
        speculation.observe(4, 4, 4, 0.004, 0.001)
        now += 0.1
