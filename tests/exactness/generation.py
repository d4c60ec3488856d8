"""Generation in rounds, as in production: draft a tree, verify it, append the output."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.speculation.verification import DecisionSource, Outcome, TargetDistributions, draft_rejection
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree, SparseDistribution
from tests.exactness.models import MarkovChain, Model, Text, V
from tests.exactness.sources import every_run

Rule = Callable[[ProposalTree, TargetDistributions, int, DecisionSource], Outcome]
Truncation = Callable[[Tensor], Tensor]


class Drafter(Protocol):
    """A drafter that proposes a tree after a text."""

    def __call__(self, text: Text, source: DecisionSource) -> ProposalTree: ...


def full(distribution: Tensor) -> Tensor:
    return distribution


def sparse(distribution: Tensor) -> Tensor:
    """Keep the two most likely tokens."""
    kept = distribution.masked_fill(distribution < distribution.topk(2).values[-1], 0.0)
    return kept / kept.sum()


def greedy(distribution: Tensor) -> Tensor:
    return torch.zeros_like(distribution).index_fill_(0, distribution.argmax(), 1.0)


TRUNCATIONS: dict[str, Truncation] = {"full": full, "sparse": sparse, "greedy": greedy}


def sparse_distribution(distribution: Tensor) -> SparseDistribution:
    token_ids = distribution.nonzero().squeeze(1).tolist()
    return SparseDistribution(tuple(token_ids), tuple(distribution[token_ids].tolist()))


@dataclass(frozen=True)
class ChainDrafter:
    """Drafts a chain of `num` nodes, which ends at `stop_token_id`, as in production."""

    model: MarkovChain
    truncation: Truncation = full
    num: int = 2
    stop_token_id: int | None = None

    def __call__(self, text: Text, source: DecisionSource) -> ProposalTree:
        tree = ProposalTree()
        self.extend(tree, ROOT, text, source, self.num)
        return tree

    def extend(self, tree: ProposalTree, start: int, text: Text, source: DecisionSource, num: int) -> None:
        """Draft `num` nodes below `start` in a tree that continues `text`."""
        number = start
        for _ in range(num):
            prefix = (*text, *(tree.node(node).token_id for node in tree.path(number)))
            distribution = self.truncation(self.model.distribution(prefix))
            token_id = draft_rejection(distribution, len(text), len(prefix), source, start)
            number = tree.append(ProposalNode(number, token_id, NodeKind.DRAFTED, sparse_distribution(distribution)))
            if token_id == self.stop_token_id:
                return


@dataclass(frozen=True)
class TreeDrafter:
    """Drafts a chain, guesses siblings of its first `num_guessed_at` nodes, and drafts a node below the first guess."""

    chain: ChainDrafter
    num_guessed_at: int = 2

    def __call__(self, text: Text, source: DecisionSource) -> ProposalTree:
        tree = self.chain(text, source)
        guesses = [
            tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED))
            for parent in range(self.num_guessed_at)
            for token_id in range(V)
            if tree.child(parent, token_id) is None
        ]
        self.chain.extend(tree, guesses[0], text, source, 1)
        return tree


@dataclass(frozen=True)
class AnyTreeDrafter:
    """Drafts a tree of a random shape per text: chains and guesses below guesses, some without distributions."""

    model: MarkovChain
    seed: int
    max_nodes: int = 6

    def __call__(self, text: Text, source: DecisionSource) -> ProposalTree:
        shape = random.Random(hash((self.seed, text)))
        tree = ProposalTree()
        segments = {ROOT: ROOT}
        for parent in range(self.max_nodes):
            if parent > len(tree):
                break
            # A node's drafted child comes before its guesses, which then avoid its token.
            if shape.random() < 0.7 and len(tree) < self.max_nodes:
                segments[self._draft(tree, parent, text, source, segments[parent], shape)] = segments[parent]
            for token_id in shape.sample(range(V), shape.randrange(V)):
                if len(tree) < self.max_nodes and tree.child(parent, token_id) is None:
                    number = tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED))
                    segments[number] = number
        return tree

    def _draft(
        self, tree: ProposalTree, parent: int, text: Text, source: DecisionSource, segment: int, shape: random.Random
    ) -> int:
        prefix = (*text, *(tree.node(node).token_id for node in tree.path(parent)))
        distribution = self.model.distribution(prefix)
        token_id = draft_rejection(distribution, len(text), len(prefix), source, segment)
        reported = sparse_distribution(distribution) if shape.random() < 0.8 else None
        return tree.append(ProposalNode(parent, token_id, NodeKind.DRAFTED, reported))


def verify_round(text: Text, tree: ProposalTree, target: Model, rule: Rule, source: DecisionSource) -> Outcome:
    def distribution_after(number: int) -> Tensor:
        return target.distribution((*text, *(tree.node(node).token_id for node in tree.path(number))))

    return rule(tree, distribution_after, len(text), source)


def generate(num: int, target: MarkovChain, drafter: Drafter, rule: Rule, source: DecisionSource) -> Text:
    """Generate at least `num` tokens in as many rounds as it takes."""
    text: Text = ()
    while len(text) < num:
        text += verify_round(text, drafter(text, source), target, rule, source).token_ids
    return text


def output_distribution(num: int, target: MarkovChain, drafter: Drafter, rule: Rule) -> dict[Text, float]:
    """Return the joint distribution of the first `num` output tokens.

    Rounds are enumerated once per text that they can continue, and weighted with its probability: what a round
    decides is independent of the rounds before, given the text, iff no counter decides twice (see `check_counters`).
    """
    open_texts: dict[Text, float] = {(): 1.0}
    finished: dict[Text, float] = {}
    while open_texts:
        # Shortest first, because only shorter texts lead to a text, so that its weight is complete.
        text = min(open_texts, key=len)
        weight = open_texts.pop(text)

        def one_round(source: DecisionSource, text: Text = text) -> Text:
            return verify_round(text, drafter(text, source), target, rule, source).token_ids

        for token_ids, probability in every_run(one_round):
            longer = (*text, *token_ids)[:num]
            texts = open_texts if len(longer) < num else finished
            texts[longer] = texts.get(longer, 0.0) + weight * probability
    return finished


def joint_output_distribution(num: int, target: MarkovChain, drafter: Drafter, rule: Rule) -> dict[Text, float]:
    """Return the same distribution by enumerating whole generations, all rounds of each."""
    distribution: dict[Text, float] = {}
    for text, probability in every_run(lambda source: generate(num, target, drafter, rule, source)[:num]):
        distribution[text] = distribution.get(text, 0.0) + probability
    return distribution
