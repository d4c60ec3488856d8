"""Examples of the acceptance rules; `tests/exactness` proves that they are lossless."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.speculation.randomness import Counter, KeyedSource, Purpose
from outrider.speculation.verification import (
    Outcome,
    draft_coupled,
    draft_rejection,
    residual_distribution,
    verify_rejection,
)
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree, SparseDistribution, TokenOrigin
from tests.exactness.rules import coupled
from tests.proposals import chain

V = 4
ACCEPTED, RECOVERED, BONUS = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED, TokenOrigin.BONUS


def distribution(*weights: float) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64)


def certain(token_id: int) -> Tensor:
    return torch.zeros(V, dtype=torch.float64).index_fill_(0, torch.tensor(token_id), 1.0)


class ScriptedSource:
    """Accepts by a script, picks the most likely token, and records counters and probabilities."""

    def __init__(self, *accepts: bool) -> None:
        self._accepts = list(accepts)
        self.counters: list[Counter] = []
        self.probabilities: list[float] = []

    def pick(self, weights: Tensor, counter: Counter) -> int:
        self.counters.append(counter)
        return int(weights.argmax())

    def accept(self, probability: float, counter: Counter) -> bool:
        self.counters.append(counter)
        self.probabilities.append(probability)
        return self._accepts.pop(0)


class RecordedDistributions:
    """Distributions that record the nodes of all calls."""

    def __init__(self, by_node: dict[int, Tensor] | Tensor) -> None:
        self._by_node = by_node
        self.numbers: list[int] = []

    def __call__(self, number: int) -> Tensor:
        self.numbers.append(number)
        return self._by_node if isinstance(self._by_node, Tensor) else self._by_node[number]


def drafted(parent: int, token_id: int, *weights: float) -> ProposalNode:
    support = tuple(token for token, weight in enumerate(weights) if weight > 0)
    sparse = SparseDistribution(support, tuple(weight for weight in weights if weight > 0))
    return ProposalNode(parent, token_id, NodeKind.DRAFTED, sparse)


def guessed(parent: int, token_id: int) -> ProposalNode:
    return ProposalNode(parent, token_id, NodeKind.GUESSED)


def tree_of(*nodes: ProposalNode) -> ProposalTree:
    tree = ProposalTree()
    for node in nodes:
        tree.append(node)
    return tree


@pytest.mark.parametrize("verify", [coupled, verify_rejection])
def test_an_empty_tree_is_plain_decoding(verify: Callable[..., Outcome]) -> None:
    assert verify(ProposalTree(), RecordedDistributions(certain(2)), 7, KeyedSource(0)) == Outcome((2,), (BONUS,), ())


def test_coupled_follows_the_targets_own_tokens() -> None:
    tree = chain((1, 2, 3))
    recorded = RecordedDistributions({ROOT: certain(1), 1: certain(2), 2: certain(0)})
    outcome = coupled(tree, recorded, 5, KeyedSource(0))
    assert outcome == Outcome((1, 2, 0), (ACCEPTED, ACCEPTED, RECOVERED), (1, 2))
    assert recorded.numbers == [ROOT, 1, 2]


def test_coupled_gives_a_bonus_behind_a_whole_branch() -> None:
    tree = tree_of(guessed(ROOT, 0), guessed(ROOT, 3), guessed(2, 1))
    outcome = coupled(tree, RecordedDistributions({ROOT: certain(3), 2: certain(1), 3: certain(2)}), 0, KeyedSource(0))
    assert outcome == Outcome((3, 1, 2), (ACCEPTED, ACCEPTED, BONUS), (2, 3))


def test_coupled_counters_are_positions_alone() -> None:
    source = ScriptedSource()
    coupled(chain((1, 1)), RecordedDistributions(certain(1)), 5, source)
    assert source.counters == [Counter(Purpose.TARGET, position) for position in (5, 6, 7)]


def test_rejection_keeps_the_longest_prefix_that_a_draw_keeps() -> None:
    half = (0.5, 0.5, 0, 0)
    tree = tree_of(drafted(ROOT, 0, *half), drafted(1, 0, *half), drafted(2, 0, *half))
    recorded = RecordedDistributions(distribution(0.25, 0.25, 0.5, 0))
    source = ScriptedSource(False, True)
    outcome = verify_rejection(tree, recorded, 5, source)
    # p_1 = 1/2, p_2 = 1/4, p_3 = 1/8; the residual after two tokens is norm(max(target / 4 - draft, 0)).
    assert source.probabilities == [0.125, pytest.approx(0.125 / (0.125 + 0.75))]
    assert outcome == Outcome((0, 0, 2), (ACCEPTED, ACCEPTED, RECOVERED), (1, 2))
    assert source.counters == [
        Counter(Purpose.ACCEPT, 7, 5),
        Counter(Purpose.ACCEPT, 6, 5),
        Counter(Purpose.RESIDUAL, 7, 5),
    ]


def test_rejection_asks_for_no_law_that_cannot_matter() -> None:
    tree = tree_of(drafted(ROOT, 0, 1, 0, 0, 0), drafted(1, 0, 1, 0, 0, 0), drafted(2, 0, 1, 0, 0, 0))
    impossible_second = RecordedDistributions({ROOT: distribution(0.5, 0.5, 0, 0), 1: certain(3)})
    assert verify_rejection(tree, impossible_second, 0, ScriptedSource(True)).token_ids == (0, 3)
    assert impossible_second.numbers == [ROOT, 1]
    impossible_first = RecordedDistributions(certain(3))
    assert verify_rejection(tree, impossible_first, 0, ScriptedSource()).token_ids == (3,)
    assert impossible_first.numbers == [ROOT]


def test_rejection_asks_for_the_bonus_law_only_when_all_is_kept() -> None:
    tree = tree_of(drafted(ROOT, 0, 0.5, 0.5, 0, 0))
    for accepted, numbers in ((False, [ROOT]), (True, [ROOT, 1])):
        recorded = RecordedDistributions(distribution(0.25, 0.25, 0.5, 0))
        verify_rejection(tree, recorded, 0, ScriptedSource(accepted))
        assert recorded.numbers == numbers


def test_rejection_goes_on_below_a_guess_under_new_counters() -> None:
    tree = tree_of(drafted(ROOT, 0, 0.5, 0.5, 0, 0), guessed(ROOT, 2), drafted(2, 0, 0.5, 0.5, 0, 0))
    source = ScriptedSource(False, True)
    outcome = verify_rejection(tree, RecordedDistributions(distribution(0.25, 0.25, 0.5, 0)), 5, source)
    assert outcome == Outcome((2, 0, 2), (ACCEPTED, ACCEPTED, BONUS), (2, 3))
    assert source.counters == [
        Counter(Purpose.ACCEPT, 5, 5),
        Counter(Purpose.RESIDUAL, 5, 5),
        Counter(Purpose.ACCEPT, 6, 5, segment=2),
        Counter(Purpose.RESIDUAL, 7, 5, segment=2),
    ]


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(ProposalNode(ROOT, 1), id="without a distribution"),
        pytest.param(drafted(ROOT, 1, 1, 0, 0, 0), id="with a distribution that it is not in"),
    ],
)
def test_rejection_takes_a_drafted_node_it_cannot_verify_for_a_guess(node: ProposalNode) -> None:
    source = ScriptedSource()
    assert verify_rejection(tree_of(node), RecordedDistributions(certain(1)), 0, source).token_ids == (1, 1)
    assert verify_rejection(tree_of(node), RecordedDistributions(certain(2)), 0, source) == Outcome(
        (2,), (RECOVERED,), ()
    )
    assert source.probabilities == []


def test_rejection_normalises_what_the_draft_reports() -> None:
    node = ProposalNode(ROOT, 0, NodeKind.DRAFTED, SparseDistribution((0, 1), (0.5 + 4e-7, 0.5 + 4e-7)))
    source = ScriptedSource(True)
    verify_rejection(tree_of(node), RecordedDistributions(distribution(0.25, 0.25, 0.5, 0)), 0, source)
    assert source.probabilities == [0.5]


def test_rejection_of_equal_laws_is_certain_to_accept() -> None:
    weights = (0.1, 0.2, 0.3, 0.4)
    tree = tree_of(drafted(ROOT, 3, *weights), drafted(1, 0, *weights))
    outcome = verify_rejection(tree, RecordedDistributions(distribution(*weights)), 0, KeyedSource(0))
    assert len(outcome.path) == 2


def test_greedy_rejection_keeps_what_the_target_says() -> None:
    even = (0.25, 0.25, 0.25, 0.25)
    tree = tree_of(drafted(ROOT, 1, *even), drafted(1, 3, *even))
    for seed in range(20):
        outcome = verify_rejection(tree, RecordedDistributions({ROOT: certain(1), 1: certain(2)}), 0, KeyedSource(seed))
        assert outcome == Outcome((1, 2), (ACCEPTED, RECOVERED), (1,))


def test_the_residual_is_what_the_target_has_beyond_the_draft() -> None:
    residual = residual_distribution(distribution(0.5, 0.3, 0.2), distribution(0.2, 0.7, 0.1))
    assert residual.tolist() == pytest.approx([0.75, 0, 0.25])
    scaled = residual_distribution(distribution(0.5, 0.3, 0.2), distribution(0.2, 0.7, 0.1), 0.5)
    assert scaled.tolist() == [1, 0, 0]


def test_a_residual_without_mass_is_the_target() -> None:
    target = distribution(0.5, 0.5)
    assert torch.equal(residual_distribution(target, target), target)
    assert torch.equal(residual_distribution(target, distribution(0.5, 0.5 + 2**-52)), target)


def test_a_residual_of_one_unit_in_the_last_place_is_not_lost() -> None:
    assert residual_distribution(distribution(0.5, 0.5), distribution(0.5 - 2**-54, 0.5 + 2**-54)).tolist() == [1, 0]


def test_residuals_leave_their_arguments_alone() -> None:
    target, draft = distribution(0.5, 0.5), distribution(0.9, 0.1)
    residual_distribution(target, draft)
    assert (target.tolist(), draft.tolist()) == ([0.5, 0.5], [0.9, 0.1])


def test_the_coupled_draft_uses_the_targets_noise() -> None:
    source = KeyedSource(3)
    weights = distribution(0.1, 0.2, 0.3, 0.4)
    for position in range(20):
        own = coupled(ProposalTree(), RecordedDistributions(weights), position, source).token_ids[0]
        assert draft_coupled(weights, position, source) == own


def test_the_rejection_drafts_counters_name_base_and_chain() -> None:
    source = ScriptedSource()
    draft_rejection(certain(1), 5, 6, source)
    draft_rejection(certain(1), 5, 6, source, segment=3)
    assert source.counters == [Counter(Purpose.DRAFT, 6, 5), Counter(Purpose.DRAFT, 6, 5, 3)]
