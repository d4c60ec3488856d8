"""Sampling parameters through the served API: drafted positions follow the oracle exactly as undrafted ones do."""

import asyncio
import math
from collections.abc import Sequence

import pytest
import torch

from outrider.client import Generation, GenerationRequest, OutriderClient, Speculation
from outrider.lm.markov import MarkovModel
from outrider.parameters import AcceptanceRule, FinishReason, SamplingParameters
from outrider.speculation.randomness import Counter, KeyedSource, Purpose
from tests.oracle import reference_distribution
from tests.served.stacks import EOS, SHARED_TARGET

PROMPT = (1, 5, 2, 5)
MODEL = MarkovModel.from_name(SHARED_TARGET)

BASIS = SamplingParameters(seed=17, max_tokens=40)
CASES: dict[str, SamplingParameters] = {
    name: BASIS.replace(**changes)
    for name, changes in {
        "default": {},
        "seed-0": {"seed": 0},
        "largest-seed": {"seed": 2**64 - 1},
        "greedy": {"temperature": 0.0, "ignore_eos": True},
        "cool": {"temperature": 0.4, "ignore_eos": True},
        "hot": {"temperature": 3.0, "ignore_eos": True},
        "top-k": {"top_k": 3, "ignore_eos": True},
        "top-p": {"top_p": 0.6, "ignore_eos": True},
        "min-p": {"min_p": 0.3, "ignore_eos": True},
        "repetition": {"repetition_penalty": 1.8, "ignore_eos": True},
        "reward-of-repetition": {"repetition_penalty": 0.5, "ignore_eos": True},
        "presence": {"presence_penalty": 1.5, "ignore_eos": True},
        "frequency": {"frequency_penalty": 0.7, "ignore_eos": True},
        "greedy-penalties": {
            "temperature": 0.0,
            "frequency_penalty": 1.0,
            "repetition_penalty": 1.3,
            "ignore_eos": True,
        },
        "bias": {"logit_bias": {0: 3.0, 7: -100.0, 9: 1.0}, "ignore_eos": True},
        "min-tokens": {"min_tokens": 25},
        "min-tokens-and-stop-ids": {"min_tokens": 12, "stop_token_ids": (0, 8)},
        "stop-ids": {"stop_token_ids": (0, 8), "ignore_eos": True},
        "ignore-eos": {"ignore_eos": True},
        "one-token": {"max_tokens": 1, "ignore_eos": True},
        "seven-tokens": {"max_tokens": 7, "ignore_eos": True},
        "all-truncations": {"temperature": 1.3, "top_k": 6, "top_p": 0.8, "min_p": 0.05, "ignore_eos": True},
        "everything": {
            "temperature": 0.8,
            "top_k": 8,
            "top_p": 0.95,
            "min_p": 0.02,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.1,
            "logit_bias": {4: 0.5},
            "min_tokens": 10,
            "stop_token_ids": (6,),
        },
    }.items()
}


async def _generate(client: OutriderClient, parameters: SamplingParameters, speculation: Speculation) -> Generation:
    request = GenerationRequest(token_ids=PROMPT, parameters=parameters, speculation=speculation)
    return await client.complete(request, timeout_s=60)


async def _drafted(client: OutriderClient, parameters: SamplingParameters, speculation: Speculation) -> Generation:
    """Generates again where the target was done before the draft had the session, as happens on a busy machine."""
    async with asyncio.timeout(60):
        while True:
            generation = await _generate(client, parameters, speculation)
            if generation.statistics.num_accepted_tokens:
                return generation


def _stops(parameters: SamplingParameters) -> set[int]:
    return {*parameters.stop_token_ids, *(() if parameters.ignore_eos else (EOS,))}


def _distribution(parameters: SamplingParameters, output: Sequence[int]) -> list[float]:
    logits = MODEL.transitions[MODEL.context((*PROMPT, *output))].log().tolist()
    return reference_distribution(logits, parameters, PROMPT, output, _stops(parameters))


def _simulated(parameters: SamplingParameters) -> tuple[list[int], FinishReason]:
    """Decodes position by position with the oracle's distribution and the keyed noise."""
    source = KeyedSource(parameters.seed or 0)
    output: list[int] = []
    while len(output) < parameters.max_tokens:
        distribution = torch.tensor(_distribution(parameters, output), dtype=torch.float64)
        output.append(source.pick(distribution, Counter(Purpose.TARGET, len(PROMPT) + len(output))))
        if output[-1] in _stops(parameters):
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


@pytest.mark.parametrize("name", CASES)
async def test_drafted_and_plain_output_follow_the_oracle(client: OutriderClient, name: str) -> None:
    parameters = CASES[name]
    expected, reason = _simulated(parameters)
    for speculation in (Speculation(disabled=True), Speculation(num_speculative_tokens=4), Speculation()):
        generate = _generate if speculation.disabled or len(expected) <= 10 else _drafted
        generation = await generate(client, parameters, speculation)
        assert (generation.token_ids, generation.finish_reason) == (expected, reason)


@pytest.mark.parametrize("name", CASES)
async def test_under_rejection_every_token_is_possible_and_logged(client: OutriderClient, name: str) -> None:
    parameters = CASES[name]
    generation = await _generate(client, parameters, Speculation(acceptance_rule=AcceptanceRule.REJECTION))
    output = generation.token_ids
    for index, token_id in enumerate(output):
        assert _distribution(parameters, output[:index])[token_id] > 0
        assert (token_id in _stops(parameters)) <= (index == len(output) - 1)
    assert len(output) <= parameters.max_tokens
    session = await client.get_session(generation.session_id, with_token_ids=True)
    assert list(session.token_ids) == [*PROMPT, *output]


@pytest.mark.parametrize("num_top", [0, 1, 5])
async def test_logprobs_are_those_of_the_raw_logits(client: OutriderClient, num_top: int) -> None:
    parameters = CASES["all-truncations"].replace(logprobs=num_top)
    plain = await _generate(client, parameters, Speculation(disabled=True))
    drafted = await _drafted(client, parameters, Speculation())
    assert drafted.logprobs == plain.logprobs
    assert len(plain.logprobs) == len(plain.token_ids)
    for index, (token_id, found) in enumerate(zip(plain.token_ids, plain.logprobs, strict=True)):
        distribution = MODEL.transitions[MODEL.context((*PROMPT, *plain.token_ids[:index]))].tolist()
        ordered = sorted(range(MODEL.info.vocabulary_size), key=lambda token: -distribution[token])
        assert found.logprob == pytest.approx(math.log(distribution[token_id]), abs=1e-5)
        assert found.rank == ordered.index(token_id) + 1
        assert found.top_token_ids == tuple(ordered[:num_top])
        assert found.top_logprobs == pytest.approx(
            [math.log(distribution[token]) for token in ordered[:num_top]], abs=1e-5
        )
