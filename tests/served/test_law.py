"""The law through the served API: the joint law of the first tokens, for both rules, with good, bad and no drafts."""

import asyncio
import itertools
import math
from collections.abc import Mapping

import pytest

from outrider.client import GenerationRequest, LocalStack, OutriderClient, Speculation, StackOptions
from outrider.lm.markov import MarkovModel
from outrider.parameters import AcceptanceRule, SamplingParameters
from tests.served.fit import SIGNIFICANCE, p_value
from tests.served.stacks import BAD_DRAFT, GOOD_DRAFT, TARGET, WrongStackOptions, markov_stack

PROMPT = (1, 3)
NUM_TOKENS = 3
NUM_SAMPLES = 3_000
NUM_SAMPLES_SLOW = 30_000
CONCURRENCY = 32


def exact_law() -> Mapping[tuple[int, ...], float]:
    """Returns the joint law of the first tokens after the prompt."""
    model = MarkovModel.from_name(TARGET)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        law = {
            (*tokens, token_id): weight * float(model.law[model.context((*PROMPT, *tokens))][token_id])
            for tokens, weight in law.items()
            for token_id in range(model.info.vocabulary_size)
        }
    return law


async def sample(
    client: OutriderClient,
    num: int,
    rule: AcceptanceRule,
    *,
    speculates: bool = True,
    max_nodes: int = 0,
    depth: int = 0,
    lookahead_nodes: int = 0,
    num_more: int = 0,
) -> tuple[list[tuple[int, ...]], float]:
    """Returns the first tokens of requests with seeds 0, 1, 2, ..., and the acceptance rate over all."""
    seeds = iter(range(num))
    outputs: list[tuple[int, ...]] = []
    num_drafted = num_accepted = 0

    async def run() -> None:
        nonlocal num_drafted, num_accepted
        for seed in seeds:
            request = GenerationRequest(
                token_ids=PROMPT,
                parameters=SamplingParameters(seed=seed, max_tokens=NUM_TOKENS + num_more),
                speculation=Speculation(
                    disabled=not speculates,
                    num_speculative_tokens=depth or (3 if max_nodes else 2),
                    acceptance_rule=rule,
                    max_nodes=max_nodes,
                    lookahead_nodes=lookahead_nodes,
                ),
            )
            generation = await client.complete(request, timeout_s=60)
            outputs.append(tuple(generation.token_ids[:NUM_TOKENS]))
            num_drafted += generation.statistics.num_draft_tokens
            num_accepted += generation.statistics.num_accepted_tokens

    await asyncio.gather(*(run() for _ in range(CONCURRENCY)))
    return outputs, num_accepted / num_drafted if num_drafted else math.nan


def test_the_test_of_fit_has_power() -> None:
    """A law at a total variation of 0.1 is told apart at this significance and number of samples."""
    law = exact_law()
    ordered = sorted(law, key=lambda tokens: -law[tokens])
    moved = {**law, ordered[0]: law[ordered[0]] + 0.1}
    excess = 0.1
    for tokens in ordered[1:]:
        taken = min(excess, law[tokens] / 2)
        moved[tokens] -= taken
        excess -= taken
    counts = {tokens: round(weight * NUM_SAMPLES) for tokens, weight in moved.items()}
    samples = [tokens for tokens, count in counts.items() for _ in range(count)]
    assert excess == pytest.approx(0)
    assert p_value(samples, law) < SIGNIFICANCE


async def _check(options: StackOptions, num: int, rules: tuple[AcceptanceRule, ...], least_rate: float) -> None:
    async with LocalStack(options) as stack, stack.client() as client:
        for rule, speculates in itertools.product(rules, (True, False) if least_rate > 0.5 else (True,)):
            samples, rate = await sample(client, num, rule, speculates=speculates)
            assert p_value(samples, exact_law()) > SIGNIFICANCE, (rule, speculates)
            assert not speculates or rate > least_rate, (rule, rate)


RULES = (AcceptanceRule.COUPLED, AcceptanceRule.REJECTION)


async def test_good_draft_and_none() -> None:
    await _check(markov_stack(GOOD_DRAFT), NUM_SAMPLES, RULES, 0.6)


async def test_bad_draft() -> None:
    await _check(markov_stack(BAD_DRAFT), NUM_SAMPLES, RULES, 0.1)


async def _check_trees(draft: str, num: int, least_rate: float) -> None:
    """Checks trees of depth 3: sampled lines with guesses beside them, or the likeliest branches under the noise."""
    async with LocalStack(markov_stack(draft)) as stack, stack.client() as client:
        for rule in RULES:
            samples, rate = await sample(client, num, rule, max_nodes=9)
            assert p_value(samples, exact_law()) > SIGNIFICANCE, rule
            assert rate > least_rate, (rule, rate)


@pytest.mark.parametrize(("draft", "least_rate"), [(GOOD_DRAFT, 0.6), (BAD_DRAFT, 0.3)])
async def test_trees(draft: str, least_rate: float) -> None:
    await _check_trees(draft, NUM_SAMPLES, least_rate)


async def _check_streaming(draft: str, num: int, least_rate: float, depths: tuple[int, ...]) -> None:
    """Checks short rounds of trees that run ahead: most tokens are then verified in a tree that was followed."""
    async with LocalStack(markov_stack(draft)) as stack, stack.client() as client:
        for rule, depth in itertools.product(RULES, depths):
            samples, rate = await sample(client, num, rule, depth=depth, lookahead_nodes=12)
            assert p_value(samples, exact_law()) > SIGNIFICANCE, (rule, depth)
            assert rate > least_rate, (rule, rate)


async def test_drafts_that_run_ahead() -> None:
    await _check_streaming(GOOD_DRAFT, NUM_SAMPLES, 0.6, (1,))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("draft", "least_rate"), [(GOOD_DRAFT, 0.6), (BAD_DRAFT, 0.3)])
async def test_drafts_that_run_ahead_with_many_samples(draft: str, least_rate: float) -> None:
    await _check_streaming(draft, NUM_SAMPLES_SLOW, least_rate, (1, 2))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("draft", "least_rate"), [(GOOD_DRAFT, 0.6), (BAD_DRAFT, 0.3)])
async def test_trees_with_many_samples(draft: str, least_rate: float) -> None:
    await _check_trees(draft, NUM_SAMPLES_SLOW, least_rate)


async def test_a_wrong_rule_is_caught_through_the_served_api() -> None:
    base = markov_stack(BAD_DRAFT)
    options = WrongStackOptions(**{name: getattr(base, name) for name in StackOptions.__dataclass_fields__})
    async with LocalStack(options) as stack, stack.client() as client:
        # Nothing is proposed for a request's last token.
        samples, _ = await sample(client, NUM_SAMPLES, AcceptanceRule.REJECTION, num_more=2)
    assert p_value(samples, exact_law()) < SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("draft", "least_rate"), [(GOOD_DRAFT, 0.6), (BAD_DRAFT, 0.1)])
async def test_law_with_many_samples(draft: str, least_rate: float) -> None:
    await _check(markov_stack(draft), NUM_SAMPLES_SLOW, RULES, least_rate)
