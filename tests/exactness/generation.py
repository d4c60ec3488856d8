"""Generation in rounds, as production drives the rules: draft a tree, verify it, go on behind the output."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.speculation.verification import DecisionSource, Outcome, TargetLaw, draft_rejection
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree, SparseDistribution
from tests.exactness.models import MarkovChain, Model, Text, V
from tests.exactness.sources import every_run

Rule = Callable[[ProposalTree, TargetLaw, int, DecisionSource], Outcome]
Truncation = Callable[[Tensor], Tensor]


class Drafter(Protocol):
    """Proposes a tree behind a text."""

    def __call__(self, text: Text, source: DecisionSource) -> ProposalTree: ...


def full(law: Tensor) -> Tensor:
    return law


def sparse(law: Tensor) -> Tensor:
    """Keeps the two most likely tokens."""
    kept = law.masked_fill(law < law.topk(2).values[-1], 0.0)
    return kept / kept.sum()


def greedy(law: Tensor) -> Tensor:
    return torch.zeros_like(law).index_fill_(0, law.argmax(), 1.0)


TRUNCATIONS: dict[str, Truncation] = {"full": full, "sparse": sparse, "greedy": greedy}


def distribution(law: Tensor) -> SparseDistribution:
    token_ids = law.nonzero().squeeze(1).tolist()
    return SparseDistribution(tuple(token_ids), tuple(law[token_ids].tolist()))


@dataclass(frozen=True)
class ChainDrafter:
    """Drafts a chain of `num` nodes; shorter where it meets `stop_token_id`, as production ends at stop tokens."""

    model: MarkovChain
    truncation: Truncation = full
    num: int = 2
    stop_token_id: int | None = None

    def __call__(self, text: Text, source: DecisionSource) -> ProposalTree:
        tree = ProposalTree()
        self.extend(tree, ROOT, text, source, self.num)
        return tree

    def extend(self, tree: ProposalTree, start: int, text: Text, source: DecisionSource, num: int) -> None:
        """Drafts `num` nodes below `start`; `text` is what the tree continues."""
        number = start
        for _ in range(num):
            behind = (*text, *(tree.node(node).token_id for node in tree.path(number)))
            law = self.truncation(self.model.law(behind))
            token_id = draft_rejection(law, len(text), len(behind), source, start)
            number = tree.append(ProposalNode(number, token_id, NodeKind.DRAFTED, distribution(law)))
            if token_id == self.stop_token_id:
                return


@dataclass(frozen=True)
class TreeDrafter:
    """Drafts a chain, guesses beside its first `num_guessed_at` nodes, and drafts a node below the first guess."""

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
    """Drafts a tree of a shape drawn for each text: chains below guesses, guesses below guesses, laws left out."""

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
        behind = (*text, *(tree.node(node).token_id for node in tree.path(parent)))
        law = self.model.law(behind)
        token_id = draft_rejection(law, len(text), len(behind), source, segment)
        told = distribution(law) if shape.random() < 0.8 else None
        return tree.append(ProposalNode(parent, token_id, NodeKind.DRAFTED, told))


def verify_round(text: Text, tree: ProposalTree, target: Model, rule: Rule, source: DecisionSource) -> Outcome:
    def law(number: int) -> Tensor:
        return target.law((*text, *(tree.node(node).token_id for node in tree.path(number))))

    return rule(tree, law, len(text), source)


def generate(num: int, target: MarkovChain, drafter: Drafter, rule: Rule, source: DecisionSource) -> Text:
    """Generates at least `num` tokens in as many rounds as it takes."""
    text: Text = ()
    while len(text) < num:
        text += verify_round(text, drafter(text, source), target, rule, source).token_ids
    return text


def output_law(num: int, target: MarkovChain, drafter: Drafter, rule: Rule) -> dict[Text, float]:
    """Returns the joint law of the first `num` output tokens.

    Rounds are enumerated once for each text they can continue, and weighed with that text's probability: what a round
    decides is independent of the rounds before, given the text, iff no counter decides twice (see `check_counters`).
    """
    open_texts: dict[Text, float] = {(): 1.0}
    finished: dict[Text, float] = {}
    while open_texts:
        # Shortest first, because only shorter texts lead to a text: its weight is complete then.
        text = min(open_texts, key=len)
        weight = open_texts.pop(text)

        def one_round(source: DecisionSource, text: Text = text) -> Text:
            return verify_round(text, drafter(text, source), target, rule, source).token_ids

        for token_ids, probability in every_run(one_round):
            longer = (*text, *token_ids)[:num]
            texts = open_texts if len(longer) < num else finished
            texts[longer] = texts.get(longer, 0.0) + weight * probability
    return finished


def joint_output_law(num: int, target: MarkovChain, drafter: Drafter, rule: Rule) -> dict[Text, float]:
    """Returns the same law by enumerating whole generations, all rounds of each."""
    law: dict[Text, float] = {}
    for text, probability in every_run(lambda source: generate(num, target, drafter, rule, source)[:num]):
        law[text] = law.get(text, 0.0) + probability
    return law
