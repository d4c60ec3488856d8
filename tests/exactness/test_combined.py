"""Drafts that combine a model with guesses follow the target's distribution under `rejection`."""

import random
from collections.abc import Sequence
from functools import partial
from itertools import islice

import pytest
import torch

from outrider.control.pass_times import PassTimes
from outrider.control.policy import WorkerStatistics
from outrider.drafters.choices import SampledChoices, TreeOptions
from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.combined_tree import CombinedNode, CombinedTree
from outrider.drafters.drafter import Drafter, DrafterInfo, DraftTerms, OpenProposal, StepRows
from outrider.drafters.node_values import NodeValues
from outrider.drafters.tree import DraftTree
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.speculation.verification import DecisionSource, verify_rejection
from outrider.tokens import Base, NodeKind, ProposalNode, ProposalPart
from target_service.engine.commands import SpeculationTerms
from target_service.engine.speculation import Speculation
from tests.exactness.models import PAIRS, MarkovChain, Text, V, total_variation
from tests.exactness.sources import RecordingSource, every_run
from tests.exactness.test_drafting import _path

TERMS = DraftTerms(SamplingParameters(seed=1, max_tokens=100), AcceptanceRule.REJECTION, 0, frozenset())
VOCABULARY = DraftVocabulary(torch.arange(V), V)
SIZES = {"chain": (2, 2), "tree": (2, 4), "tree of its own size": (2, 0)}
"""Tokens that a round verifies along one path, and most nodes of a proposal."""


class SampledTrees(Drafter):
    """A drafter over a chain of known distribution, with the trees of production."""

    def __init__(self, model: MarkovChain, source: DecisionSource) -> None:
        self.times = PassTimes()
        self._model, self._source = model, source
        self._values = NodeValues.of_one_session()
        self._trees: dict[OpenProposal, DraftTree] = {}

    @property
    def info(self) -> DrafterInfo:
        return DrafterInfo.of_lookup("model", 100)

    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        for item in proposals:
            if item not in self._trees:
                choices = SampledChoices(item, TreeOptions(), VOCABULARY, self._source)
                self._trees[item] = DraftTree(item, 4, choices, self._values)
            tree = self._trees[item]
            nodes = [node for _, node in tree.frontier(2)] if tree.has_run_root else [tree.root]
            texts = [(*item.token_ids, *_path(tree, node)) for node in nodes]
            tree.expand(nodes, torch.stack([self._model.distribution(text).log() for text in texts]))
            if not tree.frontier():
                item.fill(tree.take())
        return StepRows()


class Guesses(Drafter):
    """Guesses two lines after every text, which follow from the text; it is as often right as not."""

    def __init__(self) -> None:
        self.times = PassTimes()

    @property
    def info(self) -> DrafterInfo:
        return DrafterInfo.of_lookup("suffix", 100)

    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        for item in proposals:
            first = sum(item.token_ids) % V
            lines = [(0, first), (1, 1), (0, (first + 1) % V)]
            item.fill([ProposalNode(*node, NodeKind.GUESSED) for node in lines], [0.5, 0.25, 0.1])
        return StepRows()


class GuessesFirst(CombinedTree):
    """Takes a guess for what was sampled where both have the same token: then the sampled one is never judged."""

    def add(
        self, parent: CombinedNode, node: ProposalNode, drafter: str, *, must_be_sent: bool = False
    ) -> CombinedNode:
        if must_be_sent and node.token_id == 1:
            node = ProposalNode(node.parent, node.token_id, NodeKind.GUESSED)
        return super().add(parent, node, drafter, must_be_sent=must_be_sent)


def generate(source: DecisionSource, *, num: int, pair: str, seed: int, sizes: tuple[int, int]) -> Text:
    """Generate `num` tokens; which nodes are verified depends on the round alone."""
    target, model = PAIRS[pair]
    drafter = CombinedDrafter(SampledTrees(model, source), Guesses())
    speculation = Speculation(
        SpeculationTerms(sizes[0], 1.0, 0), TERMS.acceptance_rule, WorkerStatistics(), adapts=False
    )
    text: Text = ()
    for round_ in range(num):
        when = random.Random(f"{seed} {round_}")
        proposal = OpenProposal("s", text, TERMS, *sizes)
        while not proposal.complete:
            drafter.step([proposal])
        part = ProposalPart(Base(len(text), 1), 1, tuple(proposal.nodes), complete=True, known_len=len(text))
        speculation.receive(part, text, 0.0)
        speculation.begin(num - len(text), 0.0)
        must, may = speculation.offer(num - len(text))
        tree = speculation.tree([*must, *(item.number for item in islice(may, when.randrange(5)))])

        def distribution_after(number: int, text: Text = text) -> torch.Tensor:
            return target.distribution((*text, *(tree.node(node).token_id for node in tree.path(number))))  # noqa: B023

        news = verify_rejection(tree, distribution_after, len(text), source).token_ids
        text = (*text, *news)
        speculation.advance(news, len(text))
        if len(text) >= num:
            break
        assert not drafter.advance(proposal, news)
        drafter.end(proposal)
    return text[:num]


def distance(num: int, pair: str, sizes: tuple[int, int]) -> float:
    """Return the total variation between the distribution of texts and that of the target."""
    distribution: dict[Text, float] = {}
    for text, probability in every_run(partial(generate, num=num, pair=pair, seed=0, sizes=sizes)):
        distribution[text] = distribution.get(text, 0.0) + probability
    return total_variation(distribution, PAIRS[pair][0].joint(num))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pair", PAIRS)
def test_combinations_follow_the_target(pair: str, size: str) -> None:
    assert distance(2, pair, SIZES[size]) < 1e-9


def test_a_guess_in_place_of_a_sampled_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.drafters.combined.CombinedTree", GuessesFirst)
    assert distance(2, "disagreeing", (1, 1)) > 1e-3


@pytest.mark.parametrize("size", SIZES)
def test_no_counter_decides_twice(size: str) -> None:
    for seed in range(20):
        generate(RecordingSource(seed), num=8, pair="disagreeing", seed=seed, sizes=SIZES[size])
