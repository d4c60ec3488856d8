"""The output's distribution through the served API, under both rules, compared with the target's own.

The default run tests long streams: every token and every pair of successive tokens given the tokens before them, some
thousands of each from a few dozen requests. `make exactness` tests the joint distribution of the first tokens of
30,000 requests as well, with good, bad and no drafts.
"""

import asyncio
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import pytest

from outrider.client import DraftOptions, GenerationRequest, LocalStack, OutriderClient, Speculation, StackOptions
from outrider.lm.markov import MarkovModel
from outrider.parameters import AcceptanceRule, SamplingParameters
from tests.served.fit import SIGNIFICANCE, p_value
from tests.served.stacks import (
    BAD_DRAFT,
    GOOD_DRAFT,
    TARGET,
    WrongStackOptions,
    markov_stack,
    until_one_draft_is_in_rotation,
)

PROMPT = (1, 3)
RULES = (AcceptanceRule.COUPLED, AcceptanceRule.REJECTION)
CONCURRENCY = 32
NUM_STREAMS = 16
STREAM_LEN = 200
BLOCK_LENS = (1, 2)
"""Lengths of the blocks of successive tokens that are counted."""
NUM_TOKENS = 3
NUM_SAMPLES = 30_000

Block = tuple[int, tuple[int, ...]]
"""A context, as the model numbers it, and the tokens that came after it."""

MODEL = MarkovModel.from_name(TARGET)
SPECULATIONS = {
    "a tree that waits": Speculation(num_speculative_tokens=3, max_nodes=9, lookahead=0),
    "a tree that runs ahead": Speculation(num_speculative_tokens=1, lookahead=12),
}

CHAIN = Speculation(num_speculative_tokens=2, lookahead=0)


def blocks(streams: Iterable[Sequence[int]], block_len: int) -> list[Block]:
    """Returns the successive blocks of all streams, each with its context; no token is in two of them."""
    found = []
    for stream in streams:
        tokens = (*PROMPT, *stream)
        for start in range(len(PROMPT), len(tokens) - block_len + 1, block_len):
            found.append((MODEL.context(tokens[:start]), tuple(tokens[start : start + block_len])))
    return found


def expected(found: Sequence[Block], block_len: int) -> dict[Block, float]:
    """Returns the target's distribution of blocks, where contexts are as frequent as they were found to be."""
    size = MODEL.info.vocabulary_size
    shares = Counter(context for context, _ in found)
    return {
        (context, tokens): num / len(found) * _probability(context, tokens)
        for context, num in shares.items()
        for tokens in itertools.product(range(size), repeat=block_len)
    }


def _probability(context: int, tokens: tuple[int, ...]) -> float:
    size, probability = MODEL.info.vocabulary_size, 1.0
    for token_id in tokens:
        probability *= float(MODEL.transitions[context][token_id])
        context = context * size % size**MODEL.options.order + token_id
    return probability


def fits(streams: Iterable[Sequence[int]]) -> list[float]:
    """Returns the p-value of each length of block."""
    streams = list(streams)
    return [
        p_value(found, expected(found, block_len)) for block_len in BLOCK_LENS for found in [blocks(streams, block_len)]
    ]


async def generate(client: OutriderClient, rule: AcceptanceRule, speculation: Speculation) -> list[Sequence[int]]:
    """Return the outputs of `NUM_STREAMS` requests at once, of which proposals must be a large part.

    All together: a draft that is late because the machine is busy proposes nothing for a request that ends meanwhile.
    """
    chosen = dataclasses.replace(speculation, acceptance_rule=rule)
    generations = await asyncio.gather(
        *(
            client.complete(
                GenerationRequest(
                    token_ids=PROMPT,
                    parameters=SamplingParameters(seed=seed, max_tokens=STREAM_LEN),
                    speculation=chosen,
                ),
                timeout_s=60,
            )
            for seed in range(NUM_STREAMS)
        )
    )
    statistics = [generation.statistics for generation in generations]
    assert sum(item.num_draft_tokens for item in statistics) > NUM_STREAMS * STREAM_LEN / 5
    assert sum(item.num_accepted_tokens for item in statistics) > NUM_STREAMS * STREAM_LEN / 20
    return [generation.token_ids for generation in generations]


@pytest.mark.parametrize(
    "rules", [RULES, pytest.param(RULES[::-1], marks=pytest.mark.slow)], ids=["each-rule-once", "the-other-way-round"]
)
async def test_streams_follow_the_targets_distribution(rules: tuple[AcceptanceRule, ...]) -> None:
    # A pass takes a little, so that a request is not over before its draft has opened it.
    options = dataclasses.replace(markov_stack(BAD_DRAFT), model=f"{TARGET},step_s=0.002")
    async with LocalStack(options) as stack, stack.client() as client:
        await until_one_draft_is_in_rotation(client)
        for (name, speculation), rule in zip(SPECULATIONS.items(), rules, strict=True):
            found = fits(await generate(client, rule, speculation))
            assert min(found) > SIGNIFICANCE, (name, rule, found)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("drafter", ["suffix", "model+suffix"])
@pytest.mark.parametrize("at", ["service", "target"])
async def test_streams_drafted_from_what_others_say_follow_the_targets_distribution(drafter: str, at: str) -> None:
    environment = {"OUTRIDER_SUFFIX_SCOPE": "all"} if at == "service" else {}
    draft = DraftOptions(drafter, BAD_DRAFT if drafter == "model+suffix" else "", at=at, environment=environment)
    options = dataclasses.replace(markov_stack(None), model=f"{TARGET},step_s=0.002", drafts=(draft,))
    async with LocalStack(options) as stack, stack.client() as client:
        if at == "service":
            await until_one_draft_is_in_rotation(client)
        for (name, speculation), rule in itertools.product(SPECULATIONS.items(), RULES):
            found = fits(await generate(client, rule, speculation))
            assert min(found) > SIGNIFICANCE, (name, rule, found)


async def test_a_wrong_rule_is_caught_through_the_served_api() -> None:
    base = markov_stack(BAD_DRAFT)
    options = WrongStackOptions(**{name: getattr(base, name) for name in StackOptions.__dataclass_fields__})
    async with LocalStack(options) as stack, stack.client() as client:
        # A chain: beside it no guess is followed, so that each rejected token is replaced.
        streams = await generate(client, AcceptanceRule.REJECTION, CHAIN)
    # By one length of block at least, as the tests above would fail.
    assert min(fits(streams)) < SIGNIFICANCE


@pytest.mark.parametrize("block_len", BLOCK_LENS)
def test_the_test_of_fit_has_power(block_len: int) -> None:
    """A distribution of blocks at a total variation of 0.1 from the target's is told apart by as many of them."""
    num = NUM_STREAMS * STREAM_LEN // block_len
    contexts = range(len(MODEL.transitions))
    counts: Counter[Block] = Counter()
    for context in contexts:
        right = {
            tokens: _probability(context, tokens)
            for tokens in itertools.product(range(MODEL.info.vocabulary_size), repeat=block_len)
        }
        for tokens, weight in moved(right, 0.1).items():
            counts[context, tokens] = round(weight * num / len(contexts))
    found = list(counts.elements())
    assert p_value(found, expected(found, block_len)) < SIGNIFICANCE


def moved(distribution: Mapping[tuple[int, ...], float], distance: float) -> dict[tuple[int, ...], float]:
    """Returns a distribution at a total variation of `distance`: the likeliest outcome has what others lost."""
    first, *others = sorted(distribution, key=lambda outcome: -distribution[outcome])
    result, excess = {**distribution, first: distribution[first] + distance}, distance
    for outcome in others:
        taken = min(excess, 0.9 * distribution[outcome])
        result[outcome] -= taken
        excess -= taken
    assert excess == pytest.approx(0)
    return result


def first_tokens() -> Mapping[tuple[int, ...], float]:
    """Returns the joint distribution of the first tokens after the prompt."""
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        distribution = {
            (*tokens, token_id): weight * float(MODEL.transitions[MODEL.context((*PROMPT, *tokens))][token_id])
            for tokens, weight in distribution.items()
            for token_id in range(MODEL.info.vocabulary_size)
        }
    return distribution


async def sample(
    client: OutriderClient,
    rule: AcceptanceRule,
    *,
    speculates: bool = True,
    max_nodes: int = 0,
    depth: int = 0,
    lookahead: int = 0,
) -> tuple[list[tuple[int, ...]], float]:
    """Returns the first tokens of requests with seeds 0, 1, 2, ..., and the acceptance rate over all."""
    seeds = iter(range(NUM_SAMPLES))
    outputs: list[tuple[int, ...]] = []
    num_drafted = num_accepted = 0

    async def run() -> None:
        nonlocal num_drafted, num_accepted
        for seed in seeds:
            request = GenerationRequest(
                token_ids=PROMPT,
                parameters=SamplingParameters(seed=seed, max_tokens=NUM_TOKENS),
                speculation=Speculation(
                    disabled=not speculates,
                    num_speculative_tokens=depth or (3 if max_nodes else 2),
                    acceptance_rule=rule,
                    max_nodes=max_nodes,
                    lookahead=lookahead,
                ),
            )
            generation = await client.complete(request, timeout_s=60)
            outputs.append(tuple(generation.token_ids[:NUM_TOKENS]))
            num_drafted += generation.statistics.num_draft_tokens
            num_accepted += generation.statistics.num_accepted_tokens

    await asyncio.gather(*(run() for _ in range(CONCURRENCY)))
    return outputs, num_accepted / num_drafted if num_drafted else math.nan


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("draft", "least_rate"), [(GOOD_DRAFT, 0.6), (BAD_DRAFT, 0.1)])
async def test_first_tokens_with_chains_and_without_drafts(draft: str, least_rate: float) -> None:
    async with LocalStack(markov_stack(draft)) as stack, stack.client() as client:
        for rule, speculates in itertools.product(RULES, (True, False) if draft == GOOD_DRAFT else (True,)):
            samples, rate = await sample(client, rule, speculates=speculates)
            assert p_value(samples, first_tokens()) > SIGNIFICANCE, (rule, speculates)
            assert not speculates or rate > least_rate, (rule, rate)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("draft", "least_rate"), [(GOOD_DRAFT, 0.6), (BAD_DRAFT, 0.3)])
async def test_first_tokens_with_trees_that_wait(draft: str, least_rate: float) -> None:
    """Trees of depth 3: sampled lines with guesses beside them, or the likeliest branches under the noise."""
    async with LocalStack(markov_stack(draft)) as stack, stack.client() as client:
        for rule in RULES:
            samples, rate = await sample(client, rule, max_nodes=9)
            assert p_value(samples, first_tokens()) > SIGNIFICANCE, rule
            assert rate > least_rate, (rule, rate)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("draft", "least_rate"), [(GOOD_DRAFT, 0.6), (BAD_DRAFT, 0.3)])
async def test_first_tokens_with_trees_that_run_ahead(draft: str, least_rate: float) -> None:
    """Short rounds: most tokens are verified in a tree that was followed."""
    async with LocalStack(markov_stack(draft)) as stack, stack.client() as client:
        for rule, depth in itertools.product(RULES, (1, 2)):
            samples, rate = await sample(client, rule, depth=depth, lookahead=12)
            assert p_value(samples, first_tokens()) > SIGNIFICANCE, (rule, depth)
            assert rate > least_rate, (rule, rate)
