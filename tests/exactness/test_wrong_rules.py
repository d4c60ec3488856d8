"""Known wrong rules and drafts fail the checks that the correct ones pass."""

from dataclasses import replace
from functools import partial

import pytest
from torch import Tensor

from outrider.speculation.randomness import Counter, KeyedSource, Purpose
from outrider.speculation.verification import DecisionSource, Outcome, TargetDistributions, verify_rejection
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree
from tests.exactness.checks import DistributionError, check_bounds, check_counters, check_distribution, one_hot
from tests.exactness.generation import ChainDrafter, Rule, TreeDrafter, Truncation, greedy, sparse, sparse_distribution
from tests.exactness.models import PAIRS, Text, V
from tests.exactness.rules import coupled
from tests.exactness.sources import CounterReusedError
from tests.exactness.tokenwise import Acceptance, Replacement, ratio, verify_tokenwise

TARGET, DRAFT = PAIRS["disagreeing"]


def target_itself(target: Tensor, draft: Tensor) -> Tensor:
    return target


def test_the_plain_form_of_the_rule_passes() -> None:
    check_distribution(TARGET, ChainDrafter(DRAFT), verify_tokenwise)
    check_counters(TARGET, ChainDrafter(DRAFT), verify_tokenwise)


def top_token(target: Tensor, draft: Tensor) -> Tensor:
    return one_hot(target)


def is_argmax(target: Tensor, draft: Tensor, token_id: int) -> float:
    return float(token_id == int(target.argmax()))


def with_epsilon(target: Tensor, draft: Tensor, token_id: int) -> float:
    return min(1.0, float(target[token_id]) / (float(draft[token_id]) + 1e-10))


@pytest.mark.parametrize(
    ("acceptance", "replacement"),
    [
        pytest.param(ratio, top_token, id="a rejected token is replaced by the target's top token"),
        pytest.param(ratio, target_itself, id="a rejected token is replaced by one of the target's distribution"),
        pytest.param(is_argmax, target_itself, id="accept iff it is the argmax, else sample"),
    ],
)
def test_wrong_decisions_are_caught_by_enumeration(acceptance: Acceptance, replacement: Replacement) -> None:
    with pytest.raises(DistributionError):
        check_distribution(
            TARGET, ChainDrafter(DRAFT), partial(verify_tokenwise, acceptance=acceptance, replacement=replacement)
        )


def test_an_epsilon_in_the_ratio_is_caught_by_enumeration() -> None:
    with pytest.raises(DistributionError, match=r"e-1[01]$"):
        check_distribution(TARGET, ChainDrafter(DRAFT), partial(verify_tokenwise, acceptance=with_epsilon))


class LenientSource(KeyedSource):
    """Compares with `<=`."""

    def accept(self, probability: float, counter: Counter) -> bool:
        return self.uniform(counter) <= probability


def test_a_lenient_comparison_is_caught_by_a_uniform_of_zero() -> None:
    check_bounds(KeyedSource)
    with pytest.raises(DistributionError):
        check_bounds(LenientSource)


def seed_reset(
    tree: ProposalTree, distribution_after: TargetDistributions, base_len: int, source: DecisionSource
) -> Outcome:
    """Use the noise of the first round in every round."""
    return verify_rejection(tree, distribution_after, 0, source)


class BaselessSource:
    """Draws by position alone."""

    def __init__(self, source: DecisionSource) -> None:
        self._source = source

    def pick(self, weights: Tensor, counter: Counter) -> int:
        return self._source.pick(weights, replace(counter, base_len=0))

    def accept(self, probability: float, counter: Counter) -> bool:
        return self._source.accept(probability, replace(counter, base_len=0))


def noise_reused(
    tree: ProposalTree, distribution_after: TargetDistributions, base_len: int, source: DecisionSource
) -> Outcome:
    """Reuse draws beyond a rejection in the next round."""
    return verify_rejection(tree, distribution_after, base_len, BaselessSource(source))


@pytest.mark.parametrize("rule", [seed_reset, noise_reused])
def test_noise_that_decides_twice_is_caught_by_the_recorder(rule: Rule) -> None:
    check_counters(TARGET, ChainDrafter(DRAFT), verify_rejection)
    with pytest.raises(CounterReusedError):
        check_counters(TARGET, ChainDrafter(DRAFT), rule)


class SharedNoiseDrafter(TreeDrafter):
    """Drafts below a guess with the noise of the first chain, which also decides whether the guess is followed."""

    def __call__(self, text: Text, source: DecisionSource) -> ProposalTree:
        return super().__call__(text, SegmentlessSource(source))


class SegmentlessSource(BaselessSource):
    """Draws by position and base alone."""

    def pick(self, weights: Tensor, counter: Counter) -> int:
        return self._source.pick(weights, replace(counter, segment=ROOT))


def test_main_line_noise_below_a_guess_is_caught_by_the_recorder() -> None:
    check_counters(TARGET, TreeDrafter(ChainDrafter(DRAFT)), verify_rejection)
    with pytest.raises(CounterReusedError):
        check_counters(TARGET, SharedNoiseDrafter(ChainDrafter(DRAFT)), verify_rejection)


class WithholdingDrafter(ChainDrafter):
    """Ends a chain before a token with a low draft probability."""

    def __call__(self, text: Text, source: DecisionSource) -> ProposalTree:
        drafted, kept = super().__call__(text, source), ProposalTree()
        for node in drafted.nodes:
            weights = node.draft_distribution
            if weights is None or weights.probabilities[weights.token_ids.index(node.token_id)] < 0.4:
                break
            kept.append(node)
        return kept


def test_a_token_withheld_for_its_value_is_caught_by_enumeration() -> None:
    with pytest.raises(DistributionError, match=r"0\.[01]"):
        check_distribution(TARGET, WithholdingDrafter(DRAFT), verify_rejection)


class GuessingFirst(ChainDrafter):
    """Guesses before it drafts, so that a drafted token that was guessed cannot be added."""

    def __call__(self, text: Text, source: DecisionSource) -> ProposalTree:
        drafted, tree = super().__call__(text, source), ProposalTree()
        guess = int(self.model.distribution(text).argmax())
        tree.append(ProposalNode(ROOT, guess, NodeKind.GUESSED))
        first = drafted.node(1)
        if first.token_id != guess:
            tree.append(first)
        return tree


def test_a_drafted_token_withheld_because_it_was_guessed_is_caught_by_enumeration() -> None:
    with pytest.raises(DistributionError):
        check_distribution(TARGET, GuessingFirst(DRAFT), verify_rejection)


class MisreportingDrafter(ChainDrafter):
    """Samples from a truncated distribution and reports the full one."""

    def __call__(self, text: Text, source: DecisionSource) -> ProposalTree:
        drafted, reported = super().__call__(text, source), ProposalTree()
        for node in drafted.nodes:
            prefix = (*text, *(reported.node(number).token_id for number in reported.path(node.parent)))
            reported.append(replace(node, draft_distribution=sparse_distribution(self.model.distribution(prefix))))
        return reported


@pytest.mark.parametrize("truncation", [sparse, greedy])
def test_a_distribution_not_sampled_from_is_caught_by_enumeration(truncation: Truncation) -> None:
    with pytest.raises(DistributionError):
        check_distribution(TARGET, MisreportingDrafter(DRAFT, truncation), verify_rejection)


class GuessesCalledDrafted(ChainDrafter):
    """Marks its most likely token as drafted, with a distribution that it was not sampled from."""

    def __call__(self, text: Text, source: DecisionSource) -> ProposalTree:
        distribution = self.model.distribution(text)
        tree = ProposalTree()
        tree.append(ProposalNode(ROOT, int(distribution.argmax()), NodeKind.DRAFTED, sparse_distribution(distribution)))
        return tree


def test_a_guess_that_is_called_drafted_is_caught_by_enumeration() -> None:
    with pytest.raises(DistributionError):
        check_distribution(TARGET, GuessesCalledDrafted(DRAFT), verify_rejection)


def second_chance(
    tree: ProposalTree, distribution_after: TargetDistributions, base_len: int, source: DecisionSource
) -> Outcome:
    """Draw again under `coupled` if the target's token was not proposed."""
    outcome = coupled(tree, distribution_after, base_len, source)
    position = base_len + len(outcome.path)
    again = source.pick(
        distribution_after(outcome.path[-1] if outcome.path else ROOT), Counter(Purpose.RESIDUAL, position, base_len)
    )
    return replace(outcome, token_ids=(*outcome.token_ids[:-1], again))


def test_a_second_draw_under_coupled_is_caught_by_enumeration() -> None:
    with pytest.raises(DistributionError):
        check_distribution(TARGET, ChainDrafter(DRAFT), second_chance)


def test_lies_change_nothing_under_coupled() -> None:
    for drafter in (WithholdingDrafter(DRAFT), MisreportingDrafter(DRAFT, sparse), GuessesCalledDrafted(DRAFT)):
        check_distribution(TARGET, drafter, coupled, num=V)
