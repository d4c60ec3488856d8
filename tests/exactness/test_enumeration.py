"""The output distribution of each rule, draft and model pair, summed over all outcomes, is the target's."""

import pytest
import torch

from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.speculation.verification import DecisionSource, Outcome, TargetDistributions, verify_rejection
from outrider.tokens import ProposalTree
from tests.exactness.checks import TOLERANCE, check_counters, check_distribution
from tests.exactness.generation import (
    TRUNCATIONS,
    AnyTreeDrafter,
    ChainDrafter,
    Drafter,
    Rule,
    TreeDrafter,
    joint_output_distribution,
    verify_round,
)
from tests.exactness.judged import judge, request_of
from tests.exactness.models import PAIRS, Text, V, random_chain, total_variation
from tests.exactness.rules import RULES
from tests.exactness.sources import every_run
from tests.exactness.tokenwise import verify_tokenwise
from tests.repetition import seeds


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_the_output_follows_the_target_over_several_rounds(rule: str, truncation: str, shape: str, pair: str) -> None:
    target, draft = PAIRS[pair]
    chain = ChainDrafter(draft, TRUNCATIONS[truncation])
    drafter: Drafter = chain if shape == "chain" else TreeDrafter(chain)
    # A round outputs at most three or four tokens, and most output fewer.
    check_distribution(target, drafter, RULES[rule], num=4 if shape == "chain" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("rule", RULES)
def test_the_output_of_trees_follows_the_target_over_more_rounds(rule: str, truncation: str, pair: str) -> None:
    target, draft = PAIRS[pair]
    check_distribution(target, TreeDrafter(ChainDrafter(draft, TRUNCATIONS[truncation])), RULES[rule], num=4)


@pytest.mark.parametrize("rule", RULES)
def test_whole_generations_enumerate_to_the_same_distribution(rule: str) -> None:
    target, draft = PAIRS["disagreeing"]
    distribution = joint_output_distribution(3, target, ChainDrafter(draft, num=1), RULES[rule])
    assert total_variation(distribution, target.joint(3)) < TOLERANCE


@pytest.mark.parametrize("num", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_blocks_of_any_length_follow_the_target(num: int) -> None:
    target, draft = PAIRS["disagreeing"]
    check_distribution(target, ChainDrafter(draft, num=num), verify_rejection, num=min(num + 1, 4))


@pytest.mark.parametrize("seed", seeds(2, 5))
def test_a_chain_may_end_at_a_token_that_was_drafted(seed: int) -> None:
    """Let the end of a chain depend on its tokens before the end, as it does at stop tokens."""
    target, draft = random_chain(seed + 10), random_chain(seed + 20)
    drafter = TreeDrafter(ChainDrafter(draft, num=3, stop_token_id=1), num_guessed_at=1)
    check_distribution(target, drafter, verify_rejection, num=3)


@pytest.mark.parametrize("seed", seeds(3, 12))
@pytest.mark.parametrize("rule", RULES)
def test_trees_of_any_shape_follow_the_target(rule: str, seed: int) -> None:
    target, draft = PAIRS["disagreeing"]
    drafter = AnyTreeDrafter(draft, seed)
    check_distribution(target, drafter, RULES[rule], num=3)
    check_counters(target, drafter, RULES[rule])


def judged(
    tree: ProposalTree, distribution_after: TargetDistributions, base_len: int, source: DecisionSource
) -> Outcome:
    """Run `decide_all` under `rejection` from logits."""
    request = request_of([0] * base_len, SamplingParameters(), AcceptanceRule.REJECTION, source=source)
    result = judge(request, torch.stack([distribution_after(number).log() for number in range(1 + len(tree))]), tree)
    return Outcome(result.token_ids, result.origins, result.kept_path)


@pytest.mark.parametrize("pair", PAIRS)
def test_rounds_as_the_engine_judges_them_follow_the_target(pair: str) -> None:
    target, draft = PAIRS[pair]
    drafter = TreeDrafter(ChainDrafter(draft), num_guessed_at=1)
    check_distribution(target, drafter, judged, num=2)
    check_counters(target, drafter, judged, num=20)


def test_nearly_equal_models_are_exact_too() -> None:
    """Use residuals of a few units in the last place, at which an epsilon would be detected."""
    target = random_chain(4)
    draft = type(target)(target.rows * (1 + 1e-15 * random_chain(5).rows))
    check_distribution(target, ChainDrafter(draft), verify_rejection, num=3)


def test_blocks_accept_at_least_as_many_tokens_as_token_by_token() -> None:
    """Check Theorem 2 of Sun et al. 2024 for each text that a round can continue."""
    target, draft = PAIRS["disagreeing"]
    texts: list[Text] = [(token_id,) for token_id in range(V)]
    drafter = ChainDrafter(draft, num=3)

    def mean(rule: Rule, text: Text) -> float:
        runs = every_run(lambda source: verify_round(text, drafter(text, source), target, rule, source).path)
        return sum(len(path) * probability for path, probability in runs)

    gains = [mean(verify_rejection, text) - mean(verify_tokenwise, text) for text in texts]
    assert min(gains) > -TOLERANCE
    assert max(gains) > 0.01


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_no_counter_decides_twice(rule: str, shape: str, pair: str) -> None:
    target, draft = PAIRS[pair]
    chain = ChainDrafter(draft, num=3)
    check_counters(target, chain if shape == "chain" else TreeDrafter(chain, num_guessed_at=3), RULES[rule])
