"""The target's engine on vLLM over a real socket, with a fake of vLLM: rounds, windows, spans, resumption, failures."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from outrider.constraint import Constraint, StructuralTag, StructuralTags
from outrider.parameters import AcceptanceRule, FinishReason, SamplingParameters
from outrider.tokens import Base, NodeKind, ProposalNode
from outrider.v1 import target_pb2 as pb
from outrider.v1 import tokens_pb2
from target_service.vllm_engine.parameters import structured_outputs
from tests.target_service.conversation import Caller
from tests.target_service.vllm_engine.fake_vllm import (
    MAX_LEN,
    NUM_SPECULATIVE,
    VOCABULARY,
    Served,
    continuation,
    served,
)

ENGINE = AcceptanceRule.ENGINE
TERMS: Any = {"rule": ENGINE, "stop_token_ids": ()}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = SamplingParameters(temperature=0, max_tokens=20)
WHOLE = continuation(PROMPT, 20)
BONUS, RECOVERED, ACCEPTED = (
    tokens_pb2.TOKEN_ORIGIN_BONUS,
    tokens_pb2.TOKEN_ORIGIN_RECOVERED,
    tokens_pb2.TOKEN_ORIGIN_ACCEPTED,
)


def chain(token_ids: Sequence[int]) -> list[ProposalNode]:
    return [ProposalNode(place, token_id, NodeKind.GUESSED) for place, token_id in enumerate(token_ids)]


async def speculated(caller: Caller, handle: int, truth: Sequence[int], wrong_at: int | None) -> list[pb.Verdict]:
    """Generates with proposals of the true text, but for one token of each, and returns the verdicts."""
    await caller.open(handle, PROMPT, GREEDY, rule=ENGINE, num_speculative_tokens=NUM_SPECULATIVE, stop_token_ids=())
    await caller.span(handle, 0, PROMPT)
    verdicts, num = [], 0
    async for verdict in caller.verdicts(handle):
        assert verdict.base.len == len(PROMPT) + num
        verdicts.append(verdict)
        num += len(verdict.token_ids)
        proposed = list(truth[num : num + NUM_SPECULATIVE])
        if wrong_at is not None and len(proposed) > wrong_at:
            proposed[wrong_at] = (proposed[wrong_at] + 1) % VOCABULARY
        await caller.propose(handle, Base(len(PROMPT) + num, 1), chain(proposed))
    return verdicts


async def until(condition: object, served_now: Served) -> None:
    """Returns once a condition on the engine holds, in its own thread."""
    async with asyncio.timeout(10):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.002)


async def test_plain_requests_at_once_are_decoded_in_steps_together() -> None:
    async with served() as now:
        prompts = {handle: [handle, 3, 5] for handle in range(1, 7)}
        steps: set[int] = set()
        may_run, num_earlier = now.llm.source.may_run, len(now.llm.seen)

        def may_run_together(request: Any) -> bool:
            # vLLM has no room for any before all are there; else the first might have ended by then.
            if len(now.llm.seen) < num_earlier + len(prompts) or not may_run(request):
                return False
            steps.add(now.llm.num_steps)
            return True

        now.llm.source.may_run = may_run_together  # type: ignore[method-assign]
        texts = await asyncio.gather(
            *(now.caller.plain(handle, prompt, GREEDY, **TERMS) for handle, prompt in prompts.items())
        )
        assert texts == [continuation(prompt, 20) for prompt in prompts.values()]
        assert len(steps) == 20
        assert not now.llm.requests


async def test_accepted_recovered_and_bonus_tokens_are_told_apart() -> None:
    async with served(adaptive_speculation=False) as now:
        verdicts = await speculated(now.caller, 1, WHOLE, None)
        assert [token_id for verdict in verdicts for token_id in verdict.token_ids] == WHOLE
        assert list(verdicts[0].origins) == [BONUS]
        assert list(verdicts[1].origins) == [ACCEPTED] * NUM_SPECULATIVE + [BONUS]
        assert verdicts[1].num_draft_tokens == verdicts[1].num_accepted_tokens == NUM_SPECULATIVE
        wrong = await speculated(now.caller, 2, WHOLE, 2)
        assert [token_id for verdict in wrong for token_id in verdict.token_ids] == WHOLE
        assert list(wrong[1].origins) == [ACCEPTED, ACCEPTED, RECOVERED]
        assert now.engine.load.speculation.num_accepted_tokens > 0


async def test_accepted_tokens_name_their_drafters() -> None:
    async with served(adaptive_speculation=False) as now:
        await now.caller.open(1, PROMPT, GREEDY, rule=ENGINE, num_speculative_tokens=4, stop_token_ids=())
        await now.caller.span(1, 0, PROMPT)
        first = (await now.caller.receive(1)).verdict
        assert not first.drafters
        base = Base(len(PROMPT) + len(first.token_ids), 1)
        wrong = (WHOLE[3] + 1) % VOCABULARY
        names = ["model+suffix", "suffix", "suffix"]
        nodes = zip((WHOLE[1], WHOLE[2], wrong), names, strict=True)
        line = [
            ProposalNode(place, token_id, NodeKind.GUESSED, None, name) for place, (token_id, name) in enumerate(nodes)
        ]
        await now.caller.propose(1, base, line)
        second = (await now.caller.receive(1)).verdict
        assert list(second.token_ids) == WHOLE[1:4]
        assert list(second.drafters) == ["model+suffix", "suffix", ""]


async def test_a_branching_proposal_is_verified_along_its_likeliest_line() -> None:
    async with served(adaptive_speculation=False) as now:
        await now.caller.open(1, PROMPT, GREEDY, rule=ENGINE, num_speculative_tokens=3, stop_token_ids=())
        await now.caller.span(1, 0, PROMPT)
        first = (await now.caller.receive(1)).verdict
        base = Base(len(PROMPT) + len(first.token_ids), 1)
        tree = [ProposalNode(0, WHOLE[1]), ProposalNode(0, 0, NodeKind.GUESSED), ProposalNode(1, WHOLE[2])]
        await now.caller.propose(1, base, tree)
        second = (await now.caller.receive(1)).verdict
        assert list(second.token_ids) == WHOLE[1:4]
        assert (second.num_draft_tokens, second.num_nodes) == (2, 2)


async def test_a_closed_window_keeps_a_request_out_and_steps_nothing() -> None:
    async with served() as now:
        await now.caller.open(1, PROMPT, GREEDY, rule=ENGINE, window=5, stop_token_ids=())
        await now.caller.span(1, 0, PROMPT)
        output: list[int] = []
        while len(output) < 20:
            end = min(20, len(output) + 5)
            while len(output) < end:
                output += (await now.caller.receive(1)).verdict.token_ids
            assert len(output) == end, "the window bounds the output"
            if end < 20:
                # Another request's steps run without it, and none runs once that has ended.
                other = await now.caller.plain(50 + end, [9, end], GREEDY, **TERMS)
                assert other == continuation([9, end], 20)
                await until(lambda: now.frontend.loop.busy_s == 0, now)
                num_steps = now.llm.num_steps
                assert now.engine.wait_s() is None or now.engine.wait_s() > 1  # type: ignore[operator]
                assert now.caller.num_waiting(1) == 0
                assert now.llm.num_steps == num_steps
            committed = len(PROMPT) + len(output)
            await now.caller.send(1, window=pb.VerifyWindow(committed_len=committed, window_end=committed + 5))
        assert output == WHOLE


async def test_proposals_are_cut_to_the_window() -> None:
    async with served(adaptive_speculation=False) as now:
        await now.caller.open(1, PROMPT, GREEDY, rule=ENGINE, window=3, num_speculative_tokens=4, stop_token_ids=())
        await now.caller.span(1, 0, PROMPT)
        first = (await now.caller.receive(1)).verdict
        await now.caller.propose(1, Base(len(PROMPT) + 1, 1), chain(WHOLE[1:5]))
        second = (await now.caller.receive(1)).verdict
        assert [*first.token_ids, *second.token_ids] == WHOLE[:3]
        assert second.num_draft_tokens == 1


async def test_a_span_that_truncates_takes_the_request_out_of_vllm_and_enters_it_anew() -> None:
    async with served() as now:
        await now.caller.open(1, PROMPT, GREEDY, rule=ENGINE, window=8, stop_token_ids=())
        await now.caller.span(1, 0, PROMPT)
        output: list[int] = []
        while len(output) < 8:
            output += (await now.caller.receive(1)).verdict.token_ids
        replaced = [*PROMPT[:4], 7, 7, 7, 7]
        await now.caller.span(1, 4, replaced[4:])
        other: list[int] = []
        while len(other) < 8:
            other += (await now.caller.receive(1)).verdict.token_ids
        assert other == continuation(replaced, 8)
        assert [len(item.prompt) for item in now.llm.seen if item.key != "own"] == [8, 8]
        assert len(now.llm.requests) == 1


async def test_spans_are_checked_and_an_earlier_one_is_asked_for() -> None:
    async with served() as now:
        await now.caller.open(1, PROMPT, GREEDY, **TERMS)
        await now.caller.span(1, 5, PROMPT[5:])
        refused = (await now.caller.receive(1)).refusal
        assert (refused.reason, refused.metadata["cached_len"]) == ("KV_CACHE_MISS", "0")
        await now.caller.span(1, 0, PROMPT)
        output = [token_id async for verdict in now.caller.verdicts(1) for token_id in verdict.token_ids]
        assert output == WHOLE


@pytest.mark.parametrize("ends", ["close", "stream", "fenced"])
async def test_a_request_that_ends_early_ends_within_vllm(ends: str) -> None:
    async with served() as now:
        other = Caller(now.caller.channel)
        await other.open(1, PROMPT, GREEDY, rule=ENGINE, session="s", window=2, stop_token_ids=())
        await other.span(1, 0, PROMPT)
        await other.receive(1)
        assert len(now.llm.requests) == 1
        if ends == "close":
            await other.send(1, close=pb.VerifyClose(committed_len=len(PROMPT)))
        elif ends == "fenced":
            await now.caller.open(1, PROMPT, GREEDY, rule=ENGINE, session="s", fencing_token=2)
        if ends != "stream":
            await until(lambda: not now.llm.requests, now)
        await other.end()
        await until(lambda: not now.llm.requests, now)
        assert await now.caller.plain(7, PROMPT, GREEDY, **TERMS) == WHOLE


async def test_a_session_goes_on_from_the_tokens_that_are_here() -> None:
    async with served() as now:
        first = await now.caller.plain(1, PROMPT, GREEDY, rule=ENGINE, session="s", stop_token_ids=())
        text = [*PROMPT, *first, 8, 8]
        opened = await now.caller.open(2, text, GREEDY, rule=ENGINE, session="s", stop_token_ids=())
        assert opened.opened.cached_len == len(text) - 2
        await now.caller.span(2, len(text) - 2, [8, 8])
        output = [token_id async for verdict in now.caller.verdicts(2) for token_id in verdict.token_ids]
        assert output == continuation(text, 20)


@pytest.mark.parametrize("penalty", [0.0, 1.5])
@pytest.mark.parametrize("at", [1, 7, 19])
async def test_a_request_that_resumes_after_a_failover_goes_on_with_its_own_text(penalty: float, at: int) -> None:
    parameters = GREEDY.replace(presence_penalty=penalty)
    whole = continuation(PROMPT, 20, penalty)
    assert (whole == WHOLE) == (not penalty)
    async with served() as now:
        text = [*PROMPT, *whole[:at]]
        await now.caller.open(1, text, parameters, rule=ENGINE, prompt_len=len(PROMPT), stop_token_ids=())
        await now.caller.span(1, 0, text)
        verdicts = [verdict async for verdict in now.caller.verdicts(1)]
        assert [token_id for verdict in verdicts for token_id in verdict.token_ids] == whole[at:]
        assert verdicts[-1].finish_reason == tokens_pb2.FINISH_REASON_LENGTH
        # All output but the last token, which no target has run.
        assert sum(verdict.num_recomputed_tokens for verdict in verdicts) == at - 1


TAG = StructuralTag('<call>{"arguments": ', '{"type": "object"}', "}</call>", "<call>")


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (
            Constraint(json_schema='{"type": "integer"}'),
            {"json": '{"type": "integer"}', "disable_any_whitespace": True},
        ),
        (Constraint(json_object=True, any_whitespace=True), {"json_object": True, "disable_any_whitespace": False}),
        (Constraint(regex="a+"), {"regex": "a+"}),
        (Constraint(choice=["a", "b"]), {"choice": ["a", "b"]}),
        (Constraint(grammar="start: /a/"), {"grammar": "start: /a/"}),
    ],
)
async def test_a_constraint_is_handed_through(constraint: Constraint, expected: dict[str, Any]) -> None:
    assert structured_outputs(constraint) == expected
    async with served() as now:
        await now.caller.plain(1, PROMPT, GREEDY.replace(constraint=constraint), **TERMS)
        entered = now.llm.seen[-1]
        assert entered.params.structured_outputs == expected


def test_tags_are_handed_through_in_the_format_of_xgrammar() -> None:
    tags = StructuralTags([TAG, StructuralTag("<x>")], at_least_one=True)
    given = json.loads(structured_outputs(Constraint(structural_tags=tags))["structural_tag"])
    assert given["type"] == "structural_tag"
    assert {**given["format"], "tags": len(given["format"]["tags"])} == {
        "type": "triggered_tags",
        "triggers": ["<call>", "<x>"],
        "tags": 2,
        "at_least_one": True,
        "stop_after_first": False,
    }
    assert given["format"]["tags"][0] == {
        "begin": TAG.begin,
        "content": {"type": "json_schema", "json_schema": {"type": "object"}},
        "end": TAG.end,
    }


async def test_a_constrained_request_resumes_with_its_output_as_output() -> None:
    """vLLM's matcher follows the output of its own request, so that the text so far is no part of the prompt."""
    parameters = GREEDY.replace(constraint=Constraint(regex="a+"))
    async with served() as now:
        text = [*PROMPT, *WHOLE[:7]]
        await now.caller.open(1, text, parameters, rule=ENGINE, prompt_len=len(PROMPT), stop_token_ids=())
        await now.caller.span(1, 0, text)
        output = [token_id async for verdict in now.caller.verdicts(1) for token_id in verdict.token_ids]
        assert output == WHOLE[7:]
        entered = now.llm.seen[-1]
        assert entered.prompt == PROMPT


async def test_the_end_of_reasoning_is_vllms_own_to_find() -> None:
    parameters = GREEDY.replace(constraint=Constraint(regex="a", reasoning_end="</think>"))
    async with served() as now:
        refused = await now.caller.open(1, PROMPT, parameters, rule=ENGINE, stop_token_ids=())
        assert "reasoning_end is not supported" in refused.refusal.message


async def test_a_request_that_has_all_its_tokens_ends_at_once() -> None:
    async with served() as now:
        text = [*PROMPT, *WHOLE]
        await now.caller.open(1, text, GREEDY, rule=ENGINE, prompt_len=len(PROMPT), stop_token_ids=())
        await now.caller.span(1, 0, text)
        (verdict,) = [verdict async for verdict in now.caller.verdicts(1)]
        assert (list(verdict.token_ids), verdict.finish_reason) == ([], tokens_pb2.FINISH_REASON_LENGTH)


async def test_a_preempted_request_is_recomputed_and_counted() -> None:
    async with served() as now:
        preempted: list[str] = []

        def preempts(request: object) -> bool:
            is_due = len(request.output) == 6 and not preempted  # type: ignore[attr-defined]
            preempted.extend(["once"] * is_due)
            return is_due

        now.llm.preempts = preempts
        await now.caller.open(1, PROMPT, GREEDY, **TERMS)
        await now.caller.span(1, 0, PROMPT)
        verdicts = [verdict async for verdict in now.caller.verdicts(1)]
        assert [token_id for verdict in verdicts for token_id in verdict.token_ids] == WHOLE
        assert now.engine.load.num_preemptions == 1
        # 14 tokens, of which the prefix cache has 12; the last one had not been run.
        assert sum(verdict.num_recomputed_tokens for verdict in verdicts) == 1


async def test_stops_and_limits_count_from_the_prompt() -> None:
    stop = WHOLE[6]
    num = WHOLE.index(stop) + 1
    async with served() as now:
        for handle, (parameters, stops, expected, reason) in enumerate(
            [
                (GREEDY, (stop,), WHOLE[:num], FinishReason.STOP),
                (GREEDY.replace(min_tokens=num + 1), (stop,), WHOLE, FinishReason.LENGTH),
                (GREEDY.replace(max_tokens=3), (), WHOLE[:3], FinishReason.LENGTH),
            ],
            start=1,
        ):
            await now.caller.open(handle, PROMPT, parameters, rule=ENGINE, stop_token_ids=stops)
            await now.caller.span(handle, 0, PROMPT)
            verdicts = [verdict async for verdict in now.caller.verdicts(handle)]
            output = [token_id for verdict in verdicts for token_id in verdict.token_ids]
            if stop not in WHOLE[num:] or handle != 2:
                assert output == expected
                assert verdicts[-1].finish_reason == getattr(tokens_pb2, f"FINISH_REASON_{reason.name}")


async def test_a_session_ends_at_the_longest_that_is_allowed() -> None:
    async with served() as now:
        prompt = [index % 40 for index in range(MAX_LEN - 3)]
        output = await now.caller.plain(1, prompt, GREEDY, **TERMS)
        assert output == continuation(prompt, 3)


async def test_parts_of_a_long_prompt_are_reported() -> None:
    async with served(chunk_len=16) as now:
        prompt = [index % 40 for index in range(50)]
        await now.caller.open(1, prompt, GREEDY, **TERMS)
        await now.caller.span(1, 0, prompt)
        output = [token_id async for verdict in now.caller.verdicts(1) for token_id in verdict.token_ids]
        assert output == continuation(prompt, 20)
        assert now.caller.progress[1] == [16, 32, 48]


async def test_logprobs_are_those_of_vllm() -> None:
    async with served() as now:
        parameters = GREEDY.replace(logprobs=2, max_tokens=2)
        await now.caller.open(1, PROMPT, parameters, **TERMS)
        await now.caller.span(1, 0, PROMPT)
        verdicts = [verdict async for verdict in now.caller.verdicts(1)]
        (first,) = verdicts[0].logprobs
        assert list(first.top_token_ids) == [0, 1]
        assert list(first.top_logprobs) == [-0.5, -1.5]
        assert (first.rank, first.logprob) == (9, -3.0)


@pytest.mark.parametrize(
    ("parameters", "rule", "field"),
    [
        (SamplingParameters(min_p=0.1), ENGINE, "min_p"),
        (SamplingParameters(logit_bias={3: 1.0}), ENGINE, "logit_bias"),
        (SamplingParameters(temperature=2.5), ENGINE, "temperature"),
        (SamplingParameters(), AcceptanceRule.COUPLED, "acceptance_rule"),
        (SamplingParameters(), AcceptanceRule.REJECTION, "acceptance_rule"),
        (SamplingParameters(stop_token_ids=(VOCABULARY,)), ENGINE, "stop_token_ids"),
    ],
)
async def test_what_vllm_cannot_follow_is_refused_by_name(
    parameters: SamplingParameters, rule: AcceptanceRule, field: str
) -> None:
    async with served() as now:
        refused = (await now.caller.open(1, PROMPT, parameters, rule=rule, stop_token_ids=())).refusal
        assert (refused.reason, refused.metadata["field"]) == ("INVALID_ARGUMENT", field)


async def test_without_speculation_vllm_follows_min_p_and_logit_bias() -> None:
    async with served(num_speculative=0) as now:
        parameters = SamplingParameters(temperature=0, max_tokens=4, min_p=0.1, logit_bias={3: 1.0})
        terms = {"num_speculative_tokens": 5, "max_wait_s": 5.0}
        output = await now.caller.plain(1, PROMPT, parameters, **TERMS, **terms)
        assert output == WHOLE[:4]
        assert now.llm.seen[-1].params.logit_bias == {3: 1.0}


async def test_a_missing_proposal_is_waited_for_no_longer_than_allowed() -> None:
    async with served() as now:
        started = asyncio.get_running_loop().time()
        terms = {"num_speculative_tokens": 4, "max_wait_s": 0.2}
        output = await now.caller.plain(1, PROMPT, GREEDY, **TERMS, **terms)
        assert output == WHOLE
        # One wait teaches the policy that waiting does not pay; without it there would be 19 of them.
        assert asyncio.get_running_loop().time() - started < 2.0


async def test_a_request_that_vllm_ends_with_an_error_ends_alone() -> None:
    async with served() as now:
        now.llm.ends_at = WHOLE[3]
        await now.caller.open(1, PROMPT, GREEDY, **TERMS)
        await now.caller.span(1, 0, PROMPT)
        while (frame := await now.caller.receive(1)).WhichOneof("frame") == "verdict":
            pass
        assert frame.refusal.reason == "REQUEST_FAILED"
        now.llm.ends_at = None
        assert await now.caller.plain(2, PROMPT, GREEDY, **TERMS) == WHOLE
        assert not now.failed


async def test_a_step_that_fails_ends_the_engine_and_refuses_nobody() -> None:
    async with served() as now:
        now.llm.fails_at = next(token_id for token_id in WHOLE[5:] if token_id not in (*PROMPT, *WHOLE[:5]))
        await now.caller.open(1, PROMPT, GREEDY, rule=ENGINE, window=5, stop_token_ids=())
        await now.caller.span(1, 0, PROMPT)
        output: list[int] = []
        while len(output) < 5:
            output += (await now.caller.receive(1)).verdict.token_ids
        await now.caller.send(1, window=pb.VerifyWindow(committed_len=13, window_end=30))
        await until(lambda: now.failed and not now.frontend.loop.is_alive, now)
        assert now.failed == ["failed"]


async def test_a_fleet_larger_than_vllms_batch_is_served_in_turns() -> None:
    async with served(room=2) as now:
        prompts = {handle: [handle, 2, 9] for handle in range(1, 8)}
        texts = await asyncio.gather(
            *(now.caller.plain(handle, prompt, GREEDY, **TERMS) for handle, prompt in prompts.items())
        )
        assert texts == [continuation(prompt, 20) for prompt in prompts.values()]


async def test_closed_windows_that_fill_vllms_batch_hold_others_back_without_a_busy_loop() -> None:
    async with served(room=1) as now:
        await now.caller.open(1, PROMPT, GREEDY, rule=ENGINE, window=2, stop_token_ids=())
        await now.caller.span(1, 0, PROMPT)
        output = [*(await now.caller.receive(1)).verdict.token_ids, *(await now.caller.receive(1)).verdict.token_ids]
        before = now.llm.num_steps
        waiting = asyncio.create_task(now.caller.plain(2, [5, 5], GREEDY, **TERMS))
        await until(lambda: now.llm.num_steps > before + 1, now)
        began = asyncio.get_running_loop().time()
        before = now.llm.num_steps
        await asyncio.sleep(0.3)
        elapsed = asyncio.get_running_loop().time() - began
        assert now.llm.num_steps - before <= elapsed / 0.05 + 2
        await now.caller.send(1, window=pb.VerifyWindow(committed_len=10, window_end=100))
        output += [token_id async for verdict in now.caller.verdicts(1) for token_id in verdict.token_ids]
        assert output == WHOLE
        assert await waiting == continuation([5, 5], 20)


async def test_each_entry_into_vllm_draws_with_a_seed_of_its_own_and_salts_keep_tenants_apart() -> None:
    async with served() as now:
        sampled = SamplingParameters(seed=7, max_tokens=6)
        for handle, prompt_len in ((1, 8), (2, 7)):
            opened = await now.caller.open(
                handle,
                PROMPT,
                sampled,
                rule=ENGINE,
                prompt_len=prompt_len,
                stop_token_ids=(),
                cache_salt=bytes([handle]),
            )
            assert opened.WhichOneof("frame") == "opened"
            await now.caller.span(handle, 0, PROMPT)
            assert [verdict async for verdict in now.caller.verdicts(handle)]
        await now.caller.plain(3, PROMPT[:5], sampled, **TERMS)
        first, second, third = (item for item in now.llm.seen if item.key != "own")
        assert first.params.seed == second.params.seed != third.params.seed
        assert (first.salt, second.salt, third.salt) == ("01", "02", "")
        assert (first.params.max_tokens, second.params.max_tokens) == (6, 5)
        assert all(item.params.ignore_eos for item in now.llm.seen)
