"""Drafting ahead of verdicts follows the target's distribution, whatever the timing.

The tree, the selection of nodes and the advance of the root are the target's code; the draft here makes nodes by the
production rules, through a source that forks on every decision. The times of nodes and verdicts are random per round,
independent of the tokens.
"""

import random
from itertools import islice

import pytest
import torch
from torch import Tensor

from outrider.control.policy import WorkerStatistics
from outrider.parameters import AcceptanceRule
from outrider.speculation.proposal_tree import Lookahead
from outrider.speculation.randomness import Counter, Purpose
from outrider.speculation.verification import DecisionSource, draft_rejection, verify_rejection
from outrider.tokens import ROOT, Base, NodeKind, ProposalNode, ProposalPart
from target_service.engine.commands import SpeculationTerms
from target_service.engine.speculation import Speculation
from tests.exactness.generation import sparse_distribution
from tests.exactness.models import PAIRS, MarkovChain, Text, V, total_variation
from tests.exactness.rules import RULES
from tests.exactness.sources import CounterReusedError, RecordingSource, every_run
from tests.repetition import seeds

TOLERANCE = 1e-9


class RunningDraft:
    """Makes the nodes of a tree by expanding one node after another."""

    def __init__(self, model: MarkovChain, rule: AcceptanceRule, source: DecisionSource) -> None:
        self._model, self._rule, self._source = model, rule, source
        self.start_tree(())

    def start_tree(self, text: Text) -> None:
        self._base = text
        self._tree = Lookahead(len(text))
        self._expanded: set[int] = set()
        self._segments = {ROOT: ROOT}
        self._paths: dict[int, Text] = {ROOT: ()}

    def advance(self, text: Text, news: Text) -> None:
        """Continue after `news` was appended to the text, which is now `text`."""
        if self._tree.is_caught_up and self._tree.has_path(news):
            self._tree.follow(news)
        else:
            self.start_tree(text)

    def expand(self, place: int) -> ProposalPart | None:
        """Make the children of one of the live nodes without children."""
        live = [number for number in self._paths if self._tree.is_live(number) and number not in self._expanded]
        if not live:
            return None
        parent = live[place % len(live)]
        self._expanded.add(parent)
        first_node, nodes = self._tree.num_numbered + 1, self._children(parent)
        for node in nodes:
            number = self._tree.add(node)
            self._paths[number] = (*self._paths[parent], node.token_id)
            self._segments[number] = self._segments[parent] if node.kind is NodeKind.DRAFTED else number
        base = Base(len(self._base), 1)
        return ProposalPart(base, first_node, tuple(nodes), complete=False, known_len=base.len)

    def _children(self, parent: int) -> list[ProposalNode]:
        prefix = (*self._base, *self._paths[parent])
        distribution = self._model.distribution(prefix)
        if self._rule is AcceptanceRule.COUPLED:
            # The source forks on it; that a draft uses the target's noise is tested by the pathwise proof.
            return [ProposalNode(parent, int(distribution.argmax()), NodeKind.GUESSED)]
        token_id = draft_rejection(distribution, len(self._base), len(prefix), self._source, self._segments[parent])
        drafted = ProposalNode(parent, token_id, NodeKind.DRAFTED, sparse_distribution(distribution))
        guess = (token_id + 1) % V
        return [drafted, ProposalNode(parent, guess, NodeKind.GUESSED)]


def generate(
    num: int,
    pair: tuple[MarkovChain, MarkovChain],
    rule: AcceptanceRule,
    seed: int,
    source: DecisionSource,
    stocks: list[int] | None = None,
) -> Text:
    """Generate `num` tokens while a draft runs ahead; `stocks` receives the nodes left after each verdict."""
    target, model = pair
    text: Text = ()
    unheard: Text = ()
    draft = RunningDraft(model, rule, source)
    speculation = Speculation(SpeculationTerms(2, 1.0, 64), rule, WorkerStatistics(), adapts=False)
    for round_ in range(num):
        # The timing depends on the round alone.
        when = random.Random(f"{seed} {round_}")
        if when.random() < 0.7 and unheard:
            draft.advance(text, unheard)
            unheard = ()
        _run(draft, speculation, text, when)
        speculation.begin(num - len(text), 0.0)
        must, may = speculation.offer(num - len(text))
        tree = speculation.tree([*must, *(item.number for item in islice(may, when.randrange(4)))])
        _run(draft, speculation, text, when)

        def distribution_after(number: int, text: Text = text) -> Tensor:
            return target.distribution((*text, *(tree.node(node).token_id for node in tree.path(number))))  # noqa: B023

        token_ids = RULES[rule.value](tree, distribution_after, len(text), source).token_ids
        text, unheard = (*text, *token_ids), (*unheard, *token_ids)
        speculation.advance(token_ids, len(text))
        if stocks is not None:
            line, beside = speculation.offer(9)
            stocks.append(len([*line, *beside]))
        if len(text) >= num:
            break
    return text[:num]


def _run(draft: RunningDraft, speculation: Speculation, text: Text, when: random.Random) -> None:
    for _ in range(when.randrange(3)):
        part = draft.expand(when.randrange(3))
        if part is not None:
            speculation.receive(part, text, 0.0)


def _distribution(num: int, pair: str, rule: AcceptanceRule, seed: int) -> dict[Text, float]:
    distribution: dict[Text, float] = {}
    for text, probability in every_run(lambda source: generate(num, PAIRS[pair], rule, seed, source)):
        distribution[text] = distribution.get(text, 0.0) + probability
    return distribution


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_sampled_lines_and_guesses_follow_the_target(seed: int, pair: str) -> None:
    distribution = _distribution(3, pair, AcceptanceRule.REJECTION, seed)
    assert total_variation(distribution, PAIRS[pair][0].joint(3)) < TOLERANCE


@pytest.mark.parametrize("seed", seeds(6, 12))
def test_any_tree_follows_the_target_under_coupled(seed: int) -> None:
    distribution = _distribution(4, "disagreeing", AcceptanceRule.COUPLED, seed)
    assert total_variation(distribution, PAIRS["disagreeing"][0].joint(4)) < TOLERANCE


@pytest.mark.parametrize("seed", seeds(10, 40))
@pytest.mark.parametrize("pair", PAIRS)
def test_no_counter_decides_twice(pair: str, seed: int) -> None:
    for text_seed in range(3):
        generate(8, PAIRS[pair], AcceptanceRule.REJECTION, seed, RecordingSource(text_seed))


def test_trees_are_followed_here() -> None:
    """Check that verdicts leave nodes, so that the tests above cover trees that outlive rounds."""
    stocks: list[int] = []
    for seed in range(100):
        generate(8, PAIRS["disagreeing"], AcceptanceRule.REJECTION, seed, RecordingSource(seed), stocks)
    assert sum(stock > 0 for stock in stocks) > 0.05 * len(stocks)


def test_verifying_what_a_verdict_has_judged_already_would_be_caught() -> None:
    """Check a wrong rule: the drafted chain is verified again after it was cut, as after a full window."""
    target, model = PAIRS["disagreeing"]

    def wrong(source: DecisionSource) -> Text:
        distribution = model.distribution(())
        token_id = draft_rejection(distribution, 0, 0, source)
        first = ProposalNode(ROOT, token_id, NodeKind.DRAFTED, sparse_distribution(distribution))
        second_distribution = model.distribution((token_id,))
        second = ProposalNode(
            1,
            draft_rejection(second_distribution, 0, 1, source),
            NodeKind.DRAFTED,
            sparse_distribution(second_distribution),
        )
        tree = Lookahead(0)
        tree.add(first)
        tree.add(second)
        both = tree.tree([1, 2])
        found = verify_rejection(
            both,
            lambda number: target.distribution(tuple(both.node(step).token_id for step in both.path(number))),
            0,
            source,
        ).token_ids
        if len(found) < 3 or found[0] != token_id:
            return (
                found[:2]
                if len(found) > 1
                else (*found, source.pick(target.distribution(found), Counter(Purpose.TARGET, 1)))
            )
        # Both were accepted; only the first is kept, and the second, which was accepted once, is verified again.
        again = Lookahead(1)
        again.add(ProposalNode(ROOT, second.token_id, NodeKind.DRAFTED, sparse_distribution(second_distribution)))
        rest = verify_rejection(
            again.tree([1]), lambda number: target.distribution((token_id, second.token_id)[: number + 1]), 1, source
        )
        return (token_id, rest.token_ids[0])

    distribution: dict[Text, float] = {}
    for text, probability in every_run(wrong):
        distribution[text] = distribution.get(text, 0.0) + probability
    assert total_variation(distribution, target.joint(2)) > 0.01


def test_reused_noise_would_be_caught() -> None:
    source, distribution = RecordingSource(1), torch.full((V,), 1 / V, dtype=torch.float64)
    draft_rejection(distribution, 4, 5, source)
    with pytest.raises(CounterReusedError):
        draft_rejection(distribution, 4, 5, source)
