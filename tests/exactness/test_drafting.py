"""The production draft trees follow the target's distribution, both with and without lookahead."""

import random
from collections.abc import Sequence
from functools import partial
from itertools import islice

import pytest
import torch
from torch import Tensor

from outrider.control.policy import WorkerStatistics
from outrider.drafters.choices import Choice, Place, SampledChoices, TreeOptions
from outrider.drafters.drafter import DraftTerms, OpenProposal
from outrider.drafters.node_values import NodeValues
from outrider.drafters.tree import DraftTree
from outrider.drafters.tree_order import Node
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.speculation.verification import DecisionSource, verify_rejection
from outrider.tokens import Base, ProposalPart
from target_service.engine.commands import SpeculationTerms
from target_service.engine.speculation import Speculation
from tests.exactness.models import PAIRS, MarkovChain, Text, V, total_variation
from tests.exactness.sources import RecordingSource, every_run

TOLERANCE = 1e-9
TERMS = DraftTerms(SamplingParameters(seed=1, max_tokens=100), AcceptanceRule.REJECTION, 0, frozenset())
VOCABULARY = DraftVocabulary(torch.arange(V), V)


class Draft:
    """Grows the trees of one session step by step."""

    def __init__(self, model: MarkovChain, source: DecisionSource, kind: type[DraftTree], sizes: Sequence[int]) -> None:
        self._model, self._source, self._kind, self._sizes = model, source, kind, sizes
        self._values = ByLikelihood.of_one_session() if kind is WrongTree else NodeValues.of_one_session()
        self._text: list[int] = []
        self._start_tree()

    def _start_tree(self) -> None:
        proposal = OpenProposal("s", self._text, TERMS, *self._sizes)
        kind_of_choices = WeighedChoices if self._kind is WrongTree else SampledChoices
        self._tree = self._kind(
            proposal, 0, kind_of_choices(proposal, TreeOptions(), VOCABULARY, self._source), self._values
        )
        self._base, self._num_sent = tuple(self._text), 0

    def advance(self, news: Text) -> None:
        """Append tokens to the text."""
        self._text += news
        if not self._tree.follow(news):
            self._start_tree()

    def step(self) -> ProposalPart | None:
        """Run the next step; return the nodes to send."""
        tree = self._tree
        nodes = [node for _, node in tree.frontier(2)] if tree.has_run_root else [tree.root]
        if not nodes:
            return None
        texts = [(*self._text, *_path(tree, node)) for node in nodes]
        tree.expand(nodes, torch.stack([self._model.distribution(text).log() for text in texts]))
        made = tuple(tree.take())
        first, self._num_sent = self._num_sent + 1, self._num_sent + len(made)
        base = Base(len(self._base), 1)
        return ProposalPart(base, first, made, complete=False, known_len=len(self._text)) if made else None


def _path(tree: DraftTree, node: Node) -> Text:
    path: Text = ()
    while node is not tree.root and node.parent is not None:
        path, node = (node.token_id, *path), node.parent
    return path


class WrongTree(DraftTree):
    """Orders and sends sampled tokens by their draft probability, which is allowed under `coupled` alone."""

    _compares = True  # type: ignore[assignment]

    def _is_sent_at_once(self, node: Node) -> bool:
        return False


class WeighedChoices(SampledChoices):
    """Sampled tokens with a likelihood, by which they are ordered among the guesses."""

    def after(self, places: Sequence[Place], logits: Tensor, num: int) -> list[list[Choice]]:
        rows = zip(logits.exp(), super().after(places, logits, num), strict=True)
        weighed = [
            [item._replace(likelihood=float(distribution[item.token_id])) for item in row] for distribution, row in rows
        ]
        return [sorted(row, key=lambda item: -item.likelihood) for row in weighed]


class ByLikelihood(NodeValues):
    """Values of nodes that equal their likelihoods."""

    def value(self, depth: int, rank: int, likelihood: float) -> float:
        return likelihood


def generate(
    source: DecisionSource,
    *,
    num: int,
    pair: str,
    seed: int,
    sizes: Sequence[int],
    kind: type[DraftTree] = DraftTree,
) -> Text:
    """Generate `num` tokens with a timing that depends on the round alone."""
    target, model = PAIRS[pair]
    (depth, _, ahead), draft = sizes, Draft(model, source, kind, sizes)
    speculation = Speculation(
        SpeculationTerms(depth, 1.0, ahead), TERMS.acceptance_rule, WorkerStatistics(), adapts=False
    )
    text: Text = ()
    for round_ in range(num):
        when = random.Random(f"{seed} {round_}")
        for _ in range(when.randrange(1, 4) if ahead else depth):
            if (part := draft.step()) is not None:
                speculation.receive(part, text, 0.0)
        speculation.begin(num - len(text), 0.0)
        must, may = speculation.offer(num - len(text))
        tree = speculation.tree([*must, *(item.number for item in islice(may, when.randrange(4)))])

        def distribution_after(number: int, text: Text = text) -> Tensor:
            return target.distribution((*text, *(tree.node(node).token_id for node in tree.path(number))))  # noqa: B023

        news = verify_rejection(tree, distribution_after, len(text), source).token_ids
        text = (*text, *news)
        speculation.advance(news, len(text))
        if len(text) >= num:
            break
        draft.advance(news)
    return text[:num]


def _distance(num: int, pair: str, **how: object) -> float:
    """Return the total variation between the distribution of texts and that of the target."""
    distribution: dict[Text, float] = {}
    for text, probability in every_run(partial(generate, num=num, pair=pair, **how)):  # type: ignore[arg-type]
        distribution[text] = distribution.get(text, 0.0) + probability
    return total_variation(distribution, PAIRS[pair][0].joint(num))


SIZES = {"chain, waits": (2, 2, 0), "tree, waits": (2, 4, 0), "ahead": (2, 0, 6), "ahead, bounded": (2, 3, 6)}
"""Tokens that a round verifies along one path, maximum nodes of a proposal, and lookahead."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pair", PAIRS)
def test_trees_follow_the_target(pair: str, size: str) -> None:
    assert _distance(2, pair, seed=0, sizes=SIZES[size]) < TOLERANCE


def test_an_order_by_the_value_of_sampled_tokens_is_caught() -> None:
    assert _distance(2, "disagreeing", seed=0, sizes=(1, 2, 0)) < TOLERANCE
    assert _distance(2, "disagreeing", seed=0, sizes=(1, 2, 0), kind=WrongTree) > 1e-3


@pytest.mark.parametrize("size", SIZES)
def test_no_counter_decides_twice(size: str) -> None:
    for seed in range(20):
        generate(RecordingSource(seed), num=8, pair="disagreeing", seed=seed, sizes=SIZES[size])
