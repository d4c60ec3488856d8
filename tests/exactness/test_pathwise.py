"""Under `coupled` the output is plain decoding's, token by token, whatever was proposed."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from outrider.randomness import Counter, KeyedSource
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree
from outrider.verification import (
    DecisionSource,
    Outcome,
    TargetLaw,
    draft_coupled,
    rank_coupled,
    verify_coupled,
    verify_rejection,
)
from tests.exactness.checks import PathError, check_path, plain_decoding
from tests.exactness.generation import Rule, verify_round
from tests.exactness.models import PAIRS, MarkovChain, Text, V, random_chain

MAX_NODES = 6
PREFIX: Text = (2, 0, 1)

Forest = tuple["Forest | None", ...]
"""A node by its children: one place for each token id."""


def forests(num_nodes: int) -> Iterator[Forest]:
    """Yields every node with that many nodes below it."""
    yield from _children(num_nodes, V)


def _children(num_nodes: int, num_places: int) -> Iterator[Forest]:
    if num_places == 0:
        if num_nodes == 0:
            yield ()
        return
    for rest in _children(num_nodes, num_places - 1):
        yield (None, *rest)
    for num_below in range(num_nodes):
        for child in forests(num_below):
            for rest in _children(num_nodes - 1 - num_below, num_places - 1):
                yield (child, *rest)


def tree_of(forest: Forest) -> ProposalTree:
    tree = ProposalTree()

    def grow(parent: int, node: Forest) -> None:
        for token_id, child in enumerate(node):
            if child is not None:
                grow(tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED)), child)

    grow(ROOT, forest)
    return tree


TREES = [tree_of(forest) for num_nodes in range(MAX_NODES + 1) for forest in forests(num_nodes)]


class CachedSource(KeyedSource):
    """Draws each counter's noise once, because thousands of trees meet the same."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._noise: dict[Counter, Tensor] = {}

    def exponential(self, token_ids: Tensor, counter: Counter) -> Tensor:
        if counter not in self._noise:
            self._noise[counter] = super().exponential(torch.arange(V), counter)
        return self._noise[counter][token_ids]


@dataclass
class AnyLaw:
    """A law that depends on all the text: one drawn for each text."""

    seed: int
    laws: dict[Text, Tensor] = field(default_factory=dict)

    def law(self, text: Text) -> Tensor:
        if text not in self.laws:
            generator = torch.Generator().manual_seed(hash((self.seed, text)) % 2**63)
            self.laws[text] = torch.randn(V, generator=generator, dtype=torch.float64).softmax(-1)
        return self.laws[text]


def test_every_small_tree_is_there() -> None:
    # Ternary trees with 1 to 7 nodes, the root among them: binomial(3n, n) / (2n + 1).
    assert len(TREES) == 1 + 3 + 12 + 55 + 273 + 1428 + 7752
    assert len({tuple((node.parent, node.token_id) for node in tree.nodes) for tree in TREES}) == len(TREES)


@pytest.mark.parametrize("seed", range(4))
def test_every_small_tree_gives_plain_decodings_tokens(seed: int) -> None:
    check_every_tree(AnyLaw(seed), verify_coupled, CachedSource(seed))


def check_every_tree(model: AnyLaw, rule: Rule, source: KeyedSource) -> None:
    plain = plain_decoding(PREFIX, MAX_NODES + 1, model, source)
    for tree in TREES:

        def law(number: int, tree: ProposalTree = tree) -> Tensor:
            return model.law((*PREFIX, *(tree.node(node).token_id for node in tree.path(number))))

        check_path(PREFIX, plain, tree, law, rule, source)


def noise_by_base(tree: ProposalTree, law: TargetLaw, base_len: int, source: DecisionSource) -> Outcome:
    """Counts positions from the base, so that the noise depends on how rounds fell."""
    return verify_coupled(tree, law, 0, source)


@pytest.mark.parametrize("rule", [noise_by_base, verify_rejection])
def test_other_rules_do_not_pass(rule: Rule) -> None:
    with pytest.raises(PathError):
        for seed in range(4):
            check_every_tree(AnyLaw(seed), rule, CachedSource(seed))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 4])
@pytest.mark.parametrize("width", [1, 2])
def test_generations_of_many_rounds_are_plain_decoding(pair: str, num_speculative_tokens: int, width: int) -> None:
    target, draft = PAIRS[pair]
    for seed in range(5):
        source = KeyedSource(seed)
        text: Text = ()
        while len(text) < 30:
            tree = coupled_tree(text, draft, source, num_speculative_tokens, width)
            text += verify_round(text, tree, target, verify_coupled, source).token_ids
        assert text == plain_decoding((), len(text), target, source)


def coupled_tree(text: Text, draft: MarkovChain, source: KeyedSource, num: int, width: int) -> ProposalTree:
    """Returns a chain of the draft's own draws, with its runners-up beside it."""
    tree = ProposalTree()
    number = ROOT
    for _ in range(num):
        behind = (*text, *(tree.node(node).token_id for node in tree.path(number)))
        ranked = rank_coupled(draft.law(behind), len(behind), source, width)
        assert ranked[0] == draft_coupled(draft.law(behind), len(behind), source)
        kinds = [NodeKind.DRAFTED] + [NodeKind.GUESSED] * (len(ranked) - 1)
        numbers = [
            tree.append(ProposalNode(number, token_id, kind)) for token_id, kind in zip(ranked, kinds, strict=True)
        ]
        number = numbers[0]
    return tree


def test_a_draft_that_is_the_target_is_always_right() -> None:
    target = random_chain(1)
    for seed in range(20):
        source = KeyedSource(seed)
        outcome = verify_round((), coupled_tree((), target, source, 4, 1), target, verify_coupled, source)
        assert outcome.num_accepted == 4
