"""The target over a real socket: rounds, windows, stops, fencing, replay, and what it refuses."""

import asyncio
import math
import random
from collections.abc import Callable, Sequence

import pytest

from outrider import wire
from outrider.control.guard import SpeculationGuard
from outrider.parameters import AcceptanceRule, FinishReason, SamplingParameters
from outrider.speculation.randomness import KeyedSource
from outrider.speculation.verification import draft_rejection
from outrider.tokens import MAX_PROPOSAL_NODES, Base, NodeKind, ProposalNode, SparseDistribution, TokenLogprobs
from outrider.v1 import target_pb2 as pb
from outrider.v1 import tokens_pb2
from target_service.frontend import Frontend
from target_service.servicer import TargetServicer
from tests.target_service.conversation import Caller, model, paused, target

PROMPT = [1, 2, 3, 4]
GREEDY = SamplingParameters(temperature=0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParameters(seed=7, max_tokens=40, ignore_eos=True)


def _guesses(rng: random.Random, truth: Sequence[int], depth: int) -> list[ProposalNode]:
    """A tree of guessed nodes of which some are right."""
    nodes: list[ProposalNode] = []
    parents = [0]
    for level in range(depth):
        token_ids = {rng.randrange(12) for _ in range(2)} | ({truth[level]} if level < len(truth) else set())
        parent = rng.choice(parents)
        first = len(nodes) + 1
        nodes += [ProposalNode(parent, token_id, NodeKind.GUESSED) for token_id in sorted(token_ids)]
        parents = list(range(first, len(nodes) + 1))
    return nodes


async def _speculated(
    caller: Caller, handle: int, parameters: SamplingParameters, truth: list[int], seed: int
) -> tuple[list[int], int]:
    rng = random.Random(seed)
    await caller.open(handle, PROMPT, parameters, num_speculative_tokens=3, stop_token_ids=())
    await caller.span(handle, 0, PROMPT)
    output: list[int] = []
    num_accepted = 0
    async for verdict in caller.verdicts(handle):
        assert verdict.base.len == len(PROMPT) + len(output)
        output += verdict.token_ids
        num_accepted += verdict.num_accepted_tokens
        assert list(verdict.origins).count(1) == verdict.num_accepted_tokens
        base = Base(len(PROMPT) + len(output), 1)
        await caller.propose(handle, base, _guesses(rng, truth[len(output) :], rng.randrange(4)))
    return output, num_accepted


@pytest.mark.parametrize("parameters", [GREEDY, SAMPLED, SAMPLED.replace(seed=3, top_k=5, top_p=0.9)])
async def test_trees_change_no_token_under_coupled(parameters: SamplingParameters) -> None:
    async with target(adaptive_speculation=False) as (_, caller):
        truth = await caller.plain(1, PROMPT, parameters, stop_token_ids=())
        for seed in range(6):
            output, num_accepted = await _speculated(caller, 10 + seed, parameters, truth, seed)
            assert output == truth
            assert num_accepted > 0


async def test_greedy_output_is_the_argmax_of_the_distribution() -> None:
    async with target() as (_, caller):
        output = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
    table, tokens = model(), list(PROMPT)
    for token_id in output:
        assert token_id == int(table.transitions[table.context(tokens)].argmax())
        tokens.append(token_id)
    assert len(output) == 40


async def test_requests_that_come_together_are_told_what_pays_for_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculationGuard, "allows_at", lambda _, num_sessions: num_sessions < 3)
    async with target() as (engine, caller):
        assert not (await caller.open(1, PROMPT, GREEDY)).opened.is_plain
        assert isinstance(engine.host, Frontend)
        async with paused(engine):
            opening = [asyncio.create_task(caller.open(handle, PROMPT, GREEDY)) for handle in (2, 3, 4)]
            async with asyncio.timeout(20):
                while engine.host.loop.num_waiting < 3:
                    await asyncio.sleep(0.001)
        assert all([frame.opened.is_plain for frame in await asyncio.gather(*opening)])


async def test_a_request_is_told_that_it_is_open_before_all_else() -> None:
    async with target() as (engine, caller):
        async with paused(engine):
            opening = asyncio.create_task(caller.open(1, PROMPT, GREEDY))
            await asyncio.sleep(0)
            await caller.span(1, 3, PROMPT[3:])
        assert (await opening).WhichOneof("frame") == "opened"
        assert (await caller.receive(1)).refusal.reason == "KV_CACHE_MISS"


async def test_sessions_at_once_give_what_they_give_alone() -> None:
    async with target() as (_, caller):
        prompts = {handle: [handle % 12, 3, 5] * handle for handle in range(1, 9)}
        alone = {handle: await caller.plain(handle, prompt, SAMPLED) for handle, prompt in prompts.items()}
        together = await asyncio.gather(
            *(caller.plain(100 + handle, prompt, SAMPLED) for handle, prompt in prompts.items())
        )
        assert together == list(alone.values())


async def test_the_window_holds_the_target_back() -> None:
    async with target() as (_, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        await caller.open(2, PROMPT, GREEDY, window=5, stop_token_ids=())
        await caller.span(2, 0, PROMPT)
        output: list[int] = []
        while len(output) < 40:
            window_end = len(output) + 5
            while len(output) < window_end:
                output += (await caller.receive(2)).verdict.token_ids
            assert len(output) == window_end
            committed = len(PROMPT) + window_end
            await caller.send(2, window=pb.VerifyWindow(committed_len=committed, window_end=committed + 5))
        assert output == truth


async def test_a_missing_proposal_is_waited_for_no_longer_than_allowed() -> None:
    async with target() as (_, caller):
        started = asyncio.get_running_loop().time()
        await caller.open(1, PROMPT, GREEDY, num_speculative_tokens=4, max_wait_s=0.2, stop_token_ids=())
        await caller.span(1, 0, PROMPT)
        output = [token_id async for verdict in caller.verdicts(1) for token_id in verdict.token_ids]
        assert len(output) == 40
        # One wait teaches the policy that waiting does not pay; without it there would be 39 of them.
        assert asyncio.get_running_loop().time() - started < 2.0


async def test_stop_conditions_inside_an_accepted_run() -> None:
    async with target(adaptive_speculation=False) as (_, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        stop = truth[5]
        expected = truth[: truth.index(stop) + 1]
        for parameters, stops, wanted, reason in (
            (GREEDY, (stop,), expected, FinishReason.STOP),
            (SamplingParameters(temperature=0, max_tokens=3), (), truth[:3], FinishReason.LENGTH),
        ):
            await caller.open(
                2, PROMPT, parameters, num_speculative_tokens=8, session=f"{reason}", stop_token_ids=stops
            )
            await caller.span(2, 0, PROMPT[:-1])
            nodes = [ProposalNode(depth, token_id) for depth, token_id in enumerate(truth[1:9])]
            await caller.span(2, 3, PROMPT[3:])
            first = (await caller.receive(2)).verdict
            output = list(first.token_ids)
            await caller.propose(2, Base(len(PROMPT) + 1, 1), nodes)
            last = (await caller.receive(2)).verdict
            output += last.token_ids
            assert output == wanted
            assert wire.finish_from_number(last.finish_reason) is reason
            await caller.send(2, close=pb.VerifyClose(committed_len=len(PROMPT) + len(output)))


async def test_a_session_continues_where_it_was_closed() -> None:
    async with target() as (engine, caller):
        parameters = SamplingParameters(seed=1, max_tokens=20, ignore_eos=True)
        first = await caller.plain(1, PROMPT, parameters, session="a", stop_token_ids=())
        longer = [*PROMPT, *first, 5, 6]
        opened = await caller.open(2, longer, parameters, session="a", fencing_token=2, stop_token_ids=())
        assert opened.opened.cached_len == len(PROMPT) + 20
        rows = engine.load.num_tokens
        await caller.span(2, opened.opened.cached_len, longer[opened.opened.cached_len :])
        warm = [token_id async for verdict in caller.verdicts(2) for token_id in verdict.token_ids]
        assert engine.load.num_tokens - rows == 3 + 19  # the last output token, the two new ones, one row a token
        assert warm == await caller.plain(3, longer, parameters, session="cold", stop_token_ids=())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


async def test_a_session_that_is_gone_is_forgotten_once_its_request_ends() -> None:
    async with target() as (engine, caller):
        await caller.plain(1, PROMPT, SAMPLED, session="gone", stop_token_ids=())
        await caller.plain(2, PROMPT, SAMPLED, session="kept", stop_token_ids=())
        await caller.open(3, PROMPT, SAMPLED, session="running", stop_token_ids=())
        for session_id in ("gone", "running", "nobody"):
            await caller.send(0, forget=tokens_pb2.ForgetSession(session_id=session_id))
        await until(lambda: engine.load.num_cached_sessions == 2)
        await caller.span(3, 0, PROMPT)
        output = [token_id async for verdict in caller.verdicts(3) for token_id in verdict.token_ids]
        assert len(output) == 40, "it runs as long as it is open"
        await caller.send(3, close=pb.VerifyClose(committed_len=len(PROMPT) + len(output)))
        await until(lambda: engine.load.num_cached_sessions == 1)
        for handle, (session_id, known_len) in enumerate({"gone": 0, "running": 0, "kept": len(PROMPT)}.items(), 4):
            opened = await caller.open(handle, [*PROMPT, 1], SAMPLED, session=session_id, fencing_token=2)
            assert opened.opened.cached_len == known_len, session_id


async def test_an_idle_session_is_forgotten_when_it_gets_too_old() -> None:
    async with target(idle_ttl_s=0.3) as (engine, caller):
        await caller.open(1, PROMPT, SAMPLED, session="waiting", stop_token_ids=())
        began = asyncio.get_running_loop().time()
        await caller.plain(2, PROMPT, SAMPLED, session="idle", stop_token_ids=())
        await until(lambda: engine.load.num_cached_sessions == 1)
        assert asyncio.get_running_loop().time() - began >= 0.3
        opened = await caller.open(3, [*PROMPT, 1], SAMPLED, session="idle", fencing_token=2)
        assert opened.opened.cached_len == 0


async def test_a_session_ages_while_others_are_busy() -> None:
    """Each pass looks at the oldest one only, so that a target that never sleeps forgets too."""
    async with target(idle_ttl_s=0.1) as (engine, caller):
        await caller.plain(1, PROMPT, SAMPLED, session="idle", stop_token_ids=())
        endless = SAMPLED.replace(max_tokens=1_000_000)
        await caller.open(2, PROMPT, endless, session="busy", window=1_000_000, stop_token_ids=())
        await caller.span(2, 0, PROMPT)
        await until(lambda: engine.load.num_cached_sessions == 1)
        assert engine.num_requests == 1


async def test_nothing_is_said_before_the_span_has_come() -> None:
    """Where a session is warm the target has all tokens as soon as it is opened; its callers count from the span on."""
    async with target() as (_, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        await caller.open(2, PROMPT, GREEDY, session="a", stop_token_ids=())
        await caller.span(2, 0, PROMPT)
        verdicts = caller.verdicts(2)
        output = [token_id for _ in range(5) for token_id in (await anext(verdicts)).token_ids]
        await caller.send(2, close=pb.VerifyClose(committed_len=len(PROMPT) + len(output)))
        known = [*PROMPT, *output]
        opened = await caller.open(
            3, known, GREEDY, session="a", fencing_token=2, prompt_len=len(PROMPT), stop_token_ids=()
        )
        assert opened.opened.cached_len == len(known) - 1
        # Passes of another request, in which this one has no part.
        await caller.plain(4, PROMPT, GREEDY, stop_token_ids=())
        assert not caller.num_waiting(3)
        await caller.span(3, len(known) - 1, known[-1:])
        async for verdict in caller.verdicts(3):
            assert verdict.base.len == len(PROMPT) + len(output)
            output += verdict.token_ids
        assert output == truth


async def test_output_that_is_computed_again_is_counted() -> None:
    async with target() as (_, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        known = [*PROMPT, *truth[:13]]
        await caller.open(2, known, GREEDY, session="elsewhere", prompt_len=len(PROMPT), stop_token_ids=())
        await caller.span(2, 0, known)
        verdicts = [verdict async for verdict in caller.verdicts(2)]
        assert [token_id for verdict in verdicts for token_id in verdict.token_ids] == truth[13:]
        # The first page is a whole one, which the first request has left; the last token was never run.
        assert [verdict.num_recomputed_tokens for verdict in verdicts] == [0] * len(verdicts)
        await caller.open(
            3, known, GREEDY, session="apart", prompt_len=len(PROMPT), stop_token_ids=(), cache_salt=b"another tenant"
        )
        await caller.span(3, 0, known)
        counts = [verdict.num_recomputed_tokens async for verdict in caller.verdicts(3)]
        assert counts == [12, *[0] * (len(counts) - 1)]


async def test_a_span_beyond_the_cache_is_a_miss_and_an_earlier_one_replays() -> None:
    async with target() as (_, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        await caller.open(2, PROMPT, GREEDY, session="new", stop_token_ids=())
        await caller.span(2, 2, PROMPT[2:])
        refusal = (await caller.receive(2)).refusal
        assert (refusal.reason, refusal.metadata["cached_len"]) == ("KV_CACHE_MISS", "0")
        await caller.span(2, 0, PROMPT)
        assert [token_id async for verdict in caller.verdicts(2) for token_id in verdict.token_ids] == truth


async def test_fencing() -> None:
    async with target() as (_, caller):
        await caller.open(1, PROMPT, GREEDY, session="a", fencing_token=5)
        assert (await caller.open(2, PROMPT, GREEDY, session="a", fencing_token=6)).HasField("opened")
        assert (await caller.receive(1)).refusal.reason == "FENCED"
        assert (await caller.open(3, PROMPT, GREEDY, session="a", fencing_token=5)).refusal.reason == "FENCED"


async def test_garbage_proposals_change_nothing() -> None:
    async with target() as (engine, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        garbage = [
            [ProposalNode(0, 99)],
            [ProposalNode(7, 1)],
            [ProposalNode(0, 1, NodeKind.GUESSED)] * 2,
            [ProposalNode(depth, 1) for depth in range(MAX_PROPOSAL_NODES + 1)],
        ]
        await caller.open(2, PROMPT, GREEDY, num_speculative_tokens=4, stop_token_ids=())
        await caller.span(2, 0, PROMPT)
        output: list[int] = []
        async for verdict in caller.verdicts(2):
            output += verdict.token_ids
            await caller.propose(2, Base(len(PROMPT) + len(output), 1), garbage[len(output) % 4])
            await caller.propose(2, Base(3, 1), garbage[0])
        assert output == truth
        assert engine.load.num_invalid_proposals > 0
        assert engine.load.num_stale_messages > 0


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        (SamplingParameters(stop_token_ids=(12,)), "stop_token_ids"),
        (SamplingParameters(logit_bias={99: 1.0}), "logit_bias"),
    ],
)
async def test_bad_parameters_are_named(parameters: SamplingParameters, field: str) -> None:
    async with target() as (_, caller):
        refusal = (await caller.open(1, PROMPT, parameters)).refusal
        assert (refusal.reason, refusal.metadata["field"]) == ("INVALID_ARGUMENT", field)


async def test_bad_frames_end_their_session_only() -> None:
    async with target(max_session_len=64) as (_, caller):
        truth = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        for handle, tokens in ((2, [99]), (3, []), (4, [1] * 65)):
            await caller.open(handle, PROMPT, GREEDY)
            await caller.span(handle, 0, tokens)
            assert (await caller.receive(handle)).refusal.reason == "INVALID_ARGUMENT"
        await caller.send(5, speculation=pb.SpeculationSettings(max_wait_s=math.nan))
        assert (await caller.receive(5)).refusal.metadata["field"] == "max_wait_s"
        assert await caller.plain(6, PROMPT, GREEDY, stop_token_ids=()) == truth


async def test_limits_are_named() -> None:
    async with target(max_sessions=1) as (_, caller):
        await caller.open(1, PROMPT, GREEDY)
        assert (await caller.open(2, PROMPT, GREEDY)).refusal.reason == "OVERLOADED"


async def test_the_end_of_the_context_ends_the_request() -> None:
    async with target(max_session_len=10) as (_, caller):
        output = await caller.plain(1, PROMPT, GREEDY, stop_token_ids=())
        assert len(output) == 6


async def test_logprobs_are_those_of_plain_decoding() -> None:
    parameters = SamplingParameters(temperature=0, max_tokens=9, logprobs=3)
    async with target(adaptive_speculation=False) as (_, caller):
        truth, plain = await _with_logprobs(caller, 1, parameters, [])
        output, speculated = await _with_logprobs(caller, 2, parameters, truth)
    assert output == truth
    assert speculated == plain
    assert len(plain) == 9


async def _with_logprobs(
    caller: Caller, handle: int, parameters: SamplingParameters, guesses: Sequence[int]
) -> tuple[list[int], list[TokenLogprobs]]:
    """Returns the output and its log-probabilities; proposes from `guesses`, or nothing."""
    await caller.open(handle, PROMPT, parameters, num_speculative_tokens=4 if guesses else 0, stop_token_ids=())
    await caller.span(handle, 0, PROMPT)
    output: list[int] = []
    logprobs: list[TokenLogprobs] = []
    async for verdict in caller.verdicts(handle):
        output += verdict.token_ids
        logprobs += [wire.logprobs_from_message(message) for message in verdict.logprobs]
        nodes = [ProposalNode(depth, token_id) for depth, token_id in enumerate(guesses[len(output) :][:4])]
        await caller.propose(handle, Base(len(PROMPT) + len(output), 1), nodes)
    return output, logprobs


async def test_draining_refuses_new_requests_and_finishes_running_ones() -> None:
    async with target() as (engine, caller):
        await caller.open(1, PROMPT, GREEDY, stop_token_ids=())
        idle = engine.host.loop.drain()
        assert (await caller.open(2, PROMPT, GREEDY)).refusal.reason == "DRAINING"
        await caller.span(1, 0, PROMPT)
        output = [token_id async for verdict in caller.verdicts(1) for token_id in verdict.token_ids]
        assert len(output) == 40
        assert not idle.done()
        await caller.send(1, close=pb.VerifyClose(committed_len=44))
        await asyncio.wait_for(asyncio.wrap_future(idle), 10)


async def test_a_drain_hands_over_what_does_not_end_in_time() -> None:
    async with target() as (engine, caller):
        servicer = TargetServicer(engine.host, engine.max_len, hand_over_after_s=0.05)
        await caller.open(1, PROMPT, GREEDY, stop_token_ids=(), window=3)
        await caller.span(1, 0, PROMPT)
        frames = [await caller.receive(1) for _ in range(3)]
        assert [frame.WhichOneof("frame") for frame in frames] == ["verdict"] * 3
        # Its window is closed: it will not end by itself.
        drained = asyncio.create_task(servicer.drain())
        assert (await caller.receive(1)).refusal.reason == "DRAINING"
        await asyncio.wait_for(drained, 10)


async def test_rejection_accepts_a_draft_that_reports_the_law_it_sampled_from() -> None:
    rule, num = AcceptanceRule.REJECTION, 3
    parameters = SamplingParameters(seed=5, max_tokens=60, ignore_eos=True)
    async with target(adaptive_speculation=False) as (_, caller):
        table, source = model(), KeyedSource(5)
        await caller.open(1, PROMPT, parameters, rule=rule, num_speculative_tokens=num, stop_token_ids=())
        await caller.span(1, 0, PROMPT)
        tokens, num_accepted, num_drafted = list(PROMPT), 0, 0
        async for verdict in caller.verdicts(1):
            tokens += verdict.token_ids
            num_accepted += verdict.num_accepted_tokens
            num_drafted += verdict.num_draft_tokens
            branch, nodes = list(tokens), []
            for depth in range(num):
                distribution = table.transitions[table.context(branch)]
                branch.append(draft_rejection(distribution, len(tokens), len(branch), source))
                sparse = SparseDistribution(tuple(range(12)), tuple(distribution.tolist()))
                nodes.append(ProposalNode(depth, branch[-1], NodeKind.DRAFTED, sparse))
            await caller.propose(1, Base(len(tokens), 1), nodes)
    # The draft's distribution is the target's: every drafted token is accepted, but for what max_tokens cuts off.
    assert len(tokens) == len(PROMPT) + 60
    assert num_drafted > 0
    assert num_accepted >= num_drafted - num


async def test_the_rule_of_another_engine_is_refused_by_name() -> None:
    async with target() as (_, caller):
        refused = (await caller.open(1, PROMPT, GREEDY, rule=AcceptanceRule.ENGINE)).refusal
        assert (refused.reason, refused.metadata["field"]) == ("INVALID_ARGUMENT", "acceptance_rule")
