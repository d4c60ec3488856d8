"""Every sampling parameter through the served API: with drafts as without, and as a plain simulation of the law."""

import dataclasses
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cache

import pytest
import pytest_asyncio
import torch

from outrider.client import (
    Accepted,
    Delta,
    DraftOptions,
    Finished,
    Generation,
    GenerationRequest,
    LocalStack,
    OutriderClient,
    Speculation,
    StackOptions,
)
from outrider.lm.markov import MarkovModel
from outrider.parameters import AcceptanceRule, FinishReason, SamplingParameters
from outrider.randomness import Counter, KeyedSource, Purpose
from tests.oracle import reference_distribution, softmax

EOS = 3
TARGET = f"markov:vocabulary=16,order=2,seed=5,scale=1.5,eos={EOS}"
PROMPT = (1, 2, 5)
LONG = 40

# Each parameter by itself, then combinations. Where no stop is meant, the end-of-text token is ignored.
GOES_ON: Mapping[str, object] = {"ignore_eos": True, "max_tokens": LONG}
CASES: Mapping[str, Mapping[str, object]] = {
    "none": {"max_tokens": LONG},
    "temperature": {**GOES_ON, "temperature": 0.6},
    "high temperature": {**GOES_ON, "temperature": 3.0},
    "tiny temperature": {**GOES_ON, "temperature": 1e-6},
    "top_k": {**GOES_ON, "top_k": 3},
    "top_k of one": {**GOES_ON, "top_k": 1},
    "top_p": {**GOES_ON, "top_p": 0.6},
    "min_p": {**GOES_ON, "min_p": 0.2},
    "repetition_penalty": {**GOES_ON, "repetition_penalty": 1.7},
    "repetition_reward": {**GOES_ON, "repetition_penalty": 0.6},
    "presence_penalty": {**GOES_ON, "presence_penalty": 1.2},
    "frequency_penalty": {**GOES_ON, "frequency_penalty": 0.7},
    "frequency_reward": {**GOES_ON, "frequency_penalty": -0.5},
    "logit_bias": {**GOES_ON, "logit_bias": {0: 2.0, 7: -100.0, 15: 1.0}},
    "seed of zero": {**GOES_ON, "seed": 0},
    "largest seed": {**GOES_ON, "seed": 2**64 - 1},
    "ignore_eos": {**GOES_ON, "logit_bias": {EOS: 2.0}},
    "max_tokens of one": {"max_tokens": 1},
    "max_tokens": {"max_tokens": 7, "ignore_eos": True},
    "likely eos": {"max_tokens": LONG, "logit_bias": {EOS: 1.5}},
    "min_tokens with eos": {"max_tokens": LONG, "min_tokens": 20, "logit_bias": {EOS: 2.5}},
    "min_tokens as max_tokens": {"max_tokens": 12, "min_tokens": 12, "logit_bias": {EOS: 3.0}},
    "stop_token_ids": {**GOES_ON, "stop_token_ids": (9, 12)},
    "min_tokens with stop_token_ids": {**GOES_ON, "stop_token_ids": (0, 9, 12), "min_tokens": 15},
    # Combinations.
    "top_k, top_p": {**GOES_ON, "top_k": 5, "top_p": 0.8},
    "top_k, min_p, temperature": {**GOES_ON, "top_k": 6, "min_p": 0.1, "temperature": 1.4},
    "all truncations": {**GOES_ON, "top_k": 8, "top_p": 0.9, "min_p": 0.05, "temperature": 1.2},
    "all penalties": {**GOES_ON, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "penalties, top_p": {**GOES_ON, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "top_p": 0.7},
    "negative penalties, top_k": {**GOES_ON, "presence_penalty": -1.0, "frequency_penalty": -0.2, "top_k": 4},
    "bias, penalties": {**GOES_ON, "logit_bias": {2: 3.0, 4: -2.0}, "presence_penalty": 1.5},
    "bias, top_k of one": {**GOES_ON, "logit_bias": {11: 1.5}, "top_k": 1},
    "min_tokens, penalties": {"max_tokens": LONG, "min_tokens": 10, "repetition_penalty": 1.4, "logit_bias": {EOS: 2}},
    "min_tokens, ignored eos, stop": {**GOES_ON, "min_tokens": 8, "stop_token_ids": (6,), "logit_bias": {6: 2.0}},
    "eos among stop_token_ids": {**GOES_ON, "stop_token_ids": (EOS,), "min_tokens": 5, "temperature": 1.3},
    "bias, truncations, seed": {**GOES_ON, "logit_bias": {8: 2.5}, "top_p": 0.85, "min_p": 0.02, "seed": 123456789},
    "penalties, temperature, min_p": {**GOES_ON, "presence_penalty": 0.8, "temperature": 0.7, "min_p": 0.1},
    "stop, truncations, penalties": {**GOES_ON, "stop_token_ids": (13,), "top_k": 7, "repetition_penalty": 1.2},
    "everything": {
        "max_tokens": LONG,
        "temperature": 1.1,
        "top_k": 10,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {EOS: 1.0, 5: -1.0},
        "seed": 2**63 + 1,
        "stop_token_ids": (14,),
        "min_tokens": 6,
    },
}
PLAIN = Speculation(disabled=True)
COUPLED = Speculation(num_speculative_tokens=4, acceptance_rule=AcceptanceRule.COUPLED)
REJECTION = Speculation(num_speculative_tokens=4, acceptance_rule=AcceptanceRule.REJECTION)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client() -> AsyncIterator[OutriderClient]:
    # A draft opens while the target decodes already: one that took no time would often be done before.
    options = StackOptions(
        model=f"{TARGET},step_s=0.002",
        drafts=(DraftOptions(drafter="model", model=f"{TARGET},noise=0.2"),),
        target_threads=1,
        target_environment={"OUTRIDER_ADAPTIVE_SPECULATION": "false"},
        orchestrator_environment={"OUTRIDER_DRAFT_MAX_WAIT_S": "5", "OUTRIDER_WINDOW": "5"},
    )
    async with LocalStack(options) as stack, stack.client() as client:
        yield client


@cache
def model() -> MarkovModel:
    return MarkovModel.from_name(TARGET)


def case_parameters(name: str, *, greedy: bool = False, **more: object) -> SamplingParameters:
    parameters = SamplingParameters(**{"seed": 17, **CASES[name], **more})  # type: ignore[arg-type]
    return dataclasses.replace(parameters, temperature=0.0) if greedy else parameters


def raw_logits(output: Sequence[int]) -> list[float]:
    table = model()
    logits: list[float] = table.law.log()[table.context((*PROMPT, *output))].tolist()
    return logits


def stop_ids(parameters: SamplingParameters) -> set[int]:
    return set(parameters.stop_token_ids) | (set() if parameters.ignore_eos else {EOS})


def law_after(output: Sequence[int], parameters: SamplingParameters) -> list[float]:
    return reference_distribution(raw_logits(output), parameters, PROMPT, output, stop_ids(parameters))


def simulated(parameters: SamplingParameters) -> tuple[list[int], FinishReason]:
    """Returns what plain decoding gives, position by position, and why it ends."""
    assert parameters.seed is not None
    source = KeyedSource(parameters.seed)
    output: list[int] = []
    while len(output) < parameters.max_tokens:
        law = torch.tensor(law_after(output, parameters), dtype=torch.float64)
        output.append(source.pick(law, Counter(Purpose.TARGET, len(PROMPT) + len(output))))
        if len(output) > parameters.min_tokens and output[-1] in stop_ids(parameters):
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


async def served(client: OutriderClient, parameters: SamplingParameters, speculation: Speculation) -> Generation:
    """Returns the generation, after comparing its stream with the session's log."""
    request = GenerationRequest(token_ids=PROMPT, parameters=parameters, speculation=speculation)
    generation = Generation()
    num_tokens = 0
    events = [event async for event in client.generate(request, timeout_s=30)]
    assert isinstance(events[0], Accepted)
    assert isinstance(events[-1], Finished)
    assert events[-1].num_output_tokens == sum(len(event.token_ids) for event in events if isinstance(event, Delta))
    for event in events:
        if isinstance(event, Delta):
            assert event.offset == num_tokens
            num_tokens += len(event.token_ids)
        generation.add(event)
    session = await client.get_session(events[0].session_id, with_token_ids=True)
    assert list(session.token_ids) == [*PROMPT, *generation.token_ids]
    return generation


@pytest.mark.parametrize("greedy", [False, True], ids=["coupled", "greedy"])
@pytest.mark.parametrize("name", CASES)
async def test_tokens_are_those_of_the_law(client: OutriderClient, name: str, greedy: bool) -> None:
    parameters = case_parameters(name, greedy=greedy)
    expected, reason = simulated(parameters)
    drafted = await served(client, parameters, COUPLED)
    plain = await served(client, parameters, PLAIN)
    assert plain.token_ids == expected
    assert drafted.token_ids == expected
    assert drafted.finish_reason is plain.finish_reason is reason
    assert plain.statistics.num_drafts == 0


async def test_drafted_tokens_are_accepted_over_the_cases(client: OutriderClient) -> None:
    """What equals the law stood at drafted positions: counted over the very outputs that are compared."""
    num_accepted: dict[str, int] = {}
    for name in CASES:
        parameters = case_parameters(name)
        generation = await served(client, parameters, COUPLED)
        assert generation.token_ids == simulated(parameters)[0]
        if len(generation.token_ids) == LONG:
            num_accepted[name] = generation.statistics.num_accepted_tokens
    assert len(num_accepted) > 20
    assert sum(num > 0 for num in num_accepted.values()) > 0.8 * len(num_accepted), num_accepted
    assert sum(num_accepted.values()) > 0.3 * LONG * len(num_accepted), num_accepted


@pytest.mark.parametrize("greedy", [False, True], ids=["coupled", "greedy"])
async def test_a_stop_token_inside_an_accepted_run_ends_the_output(client: OutriderClient, greedy: bool) -> None:
    """Each position of a long output is made the stop in turn, so that some of them lie within an accepted run."""
    longest = case_parameters("temperature", greedy=greedy)
    whole, _ = simulated(longest)
    num_inside = 0
    for token_id in sorted(set(whole)):
        first = whole.index(token_id)
        parameters = dataclasses.replace(longest, stop_token_ids=(token_id,))
        generation = await served(client, parameters, COUPLED)
        assert generation.token_ids == whole[: first + 1]
        assert generation.finish_reason is FinishReason.STOP
        statistics = generation.statistics
        # Fewer output tokens than passes and accepted tokens would give: what came after the stop was dropped.
        num_inside += len(generation.token_ids) <= statistics.num_target_passes - 1 + statistics.num_accepted_tokens
    assert num_inside > 0


@pytest.mark.parametrize("name", CASES)
async def test_rejection_stays_in_the_support(client: OutriderClient, name: str) -> None:
    parameters = case_parameters(name)
    generation = await served(client, parameters, REJECTION)
    output = generation.token_ids
    for position, token_id in enumerate(output):
        assert law_after(output[:position], parameters)[token_id] > 0, position
    stops = [
        position
        for position, token_id in enumerate(output)
        if position >= parameters.min_tokens and token_id in stop_ids(parameters)
    ]
    assert stops in ([], [len(output) - 1])
    assert generation.finish_reason is (FinishReason.STOP if stops else FinishReason.LENGTH)
    assert stops or len(output) == parameters.max_tokens


@pytest.mark.parametrize("name", ["temperature", "top_k", "all penalties", "logit_bias", "everything"])
@pytest.mark.parametrize("num_top", [0, 5, 20])
async def test_logprobs_are_those_of_the_raw_logits(client: OutriderClient, name: str, num_top: int) -> None:
    parameters = case_parameters(name, logprobs=num_top)
    drafted = await served(client, parameters, COUPLED)
    plain = await served(client, parameters, PLAIN)
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    assert len(drafted.logprobs) == len(drafted.token_ids)
    for position, (token_id, found) in enumerate(zip(drafted.token_ids, drafted.logprobs, strict=True)):
        logprobs = [math.log(weight) for weight in softmax(raw_logits(drafted.token_ids[:position]))]
        ranked = sorted(range(len(logprobs)), key=lambda other: (-logprobs[other], other))
        assert found.logprob == pytest.approx(logprobs[token_id], rel=1e-5)
        assert found.rank == ranked.index(token_id) + 1
        assert list(found.top_token_ids) == ranked[:num_top]
        assert list(found.top_logprobs) == pytest.approx([logprobs[other] for other in ranked[:num_top]], rel=1e-5)
