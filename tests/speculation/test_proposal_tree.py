"""A proposal tree that outlives rounds: following, pruning and catching up, compared with brute force."""

import random
from dataclasses import replace

import pytest

from outrider.speculation.acceptance import AcceptanceRates
from outrider.speculation.proposal_tree import Lookahead
from outrider.tokens import ROOT, NodeKind, ProposalNode


def _guess(parent: int, token_id: int) -> ProposalNode:
    return ProposalNode(parent, token_id, NodeKind.GUESSED)


def _planted() -> Lookahead:
    """Return a tree: 5 7 9 along the first branch, 6 as a sibling of 5 with 8 below it."""
    tree = Lookahead(10)
    for node in (_guess(0, 5), _guess(0, 6), _guess(1, 7), _guess(2, 8), _guess(3, 9)):
        tree.add(node)
    return tree


def test_a_branch_that_is_followed_becomes_the_tree() -> None:
    tree = _planted()
    assert (len(tree), tree.max_depth, tree.is_caught_up) == (5, 3, True)
    tree.follow([5])
    assert (tree.root, len(tree), tree.max_depth, tree.root_depth) == (1, 2, 2, 1)
    assert not tree.is_live(2) and not tree.is_live(4)
    assert tree.add(_guess(2, 1)) == 6, "what comes for a branch that is gone is numbered, and nothing else"
    assert len(tree) == 2
    tree.follow([7, 9])
    assert (tree.root, len(tree), tree.is_caught_up) == (5, 0, True)
    assert tree.add(_guess(5, 3)) == 7
    assert tree.max_depth == 1


def test_a_text_that_is_ahead_is_caught_up_with_by_nodes_that_come_late() -> None:
    tree = _planted()
    tree.follow([5, 7, 9, 1, 2])
    assert not tree.is_caught_up and len(tree) == 0 and tree.max_depth == 0
    assert list(tree.candidates(9)) == []
    tree.add(_guess(5, 4))
    tree.add(_guess(5, 1))
    assert tree.root == 7 and not tree.is_caught_up
    tree.add(_guess(6, 2))
    assert tree.root == 7, "below another branch"
    tree.add(_guess(7, 2))
    assert tree.is_caught_up and tree.root == 9
    tree.add(_guess(9, 3))
    assert tree.max_depth == 1


def test_what_is_no_tree_is_refused_and_takes_no_number() -> None:
    tree = _planted()
    for node in (_guess(6, 1), _guess(-1, 1), _guess(0, 5)):
        with pytest.raises(ValueError):
            tree.add(node)
    tree.add(ProposalNode(0, 1))
    with pytest.raises(ValueError, match="second drafted"):
        tree.add(ProposalNode(0, 2))
    assert tree.num_numbered == 6


def test_candidates_come_by_value_with_parents_first() -> None:
    tree = _planted()
    numbers = [item.number for item in tree.candidates(9)]
    values = [item.value for item in tree.candidates(9)]
    assert set(numbers) == {1, 2, 3, 4, 5} and numbers[0] == 1
    assert values == sorted(values, reverse=True)
    assert [item.number for item in tree.candidates(1)] == [1, 2]
    found = tree.tree(numbers)
    assert [found.node(number).token_id for number in range(1, 6)] == [tree.node(number).token_id for number in numbers]
    assert tree.path(5) == (1, 3, 5)


def test_the_drafted_line_ends_where_nothing_was_drafted() -> None:
    tree = Lookahead(0)
    for node in (_guess(0, 4), ProposalNode(0, 5), ProposalNode(2, 6), _guess(3, 7), ProposalNode(4, 8)):
        tree.add(node)
    assert tree.drafted_line(9) == [2, 3]
    assert tree.drafted_line(1) == [2]
    tree.follow([5])
    assert tree.drafted_line(9) == [3]


def test_rates_learn_from_nodes_in_time_and_late() -> None:
    rates = AcceptanceRates()
    before = rates.values(1)
    for _ in range(100):
        tree = Lookahead(0, rates)
        tree.add(_guess(0, 1))
        tree.add(_guess(0, 2))
        tree.follow([2])
        late = Lookahead(0, rates)
        late.follow([2, 3])
        late.add(_guess(0, 1))
        late.add(_guess(0, 2))
        late.add(_guess(2, 3))
    assert rates.value(1, 1) < 0.1 < before[0]
    assert rates.value(1, 2) > 0.9
    assert rates.value(2, 1) > 0.9


@pytest.mark.parametrize("seed", range(30))
def test_it_is_what_the_paths_say_in_whichever_order_nodes_and_text_come(seed: int) -> None:
    """A brute-force model over paths: a node is live iff the text can still reach it."""
    draw = random.Random(seed)
    tree, paths, text = Lookahead(0), {ROOT: ()}, []
    for _ in range(60):
        if draw.random() < 0.75:
            parent = draw.randrange(len(paths))
            token_id = draw.randrange(3)
            if (*paths[parent], token_id) in paths.values():
                continue
            number = tree.add(_guess(parent, token_id))
            paths[number] = (*paths[parent], token_id)
        else:
            below = [
                path[len(text)] for path in paths.values() if path[: len(text)] == tuple(text) and len(path) > len(text)
            ]
            token_id = draw.choice(below) if below and draw.random() < 0.8 else draw.randrange(3)
            text.append(token_id)
            tree.follow([token_id])
        known = max((path for path in paths.values() if path == tuple(text[: len(path)])), key=len)
        assert tree.root_depth == len(known)
        assert tree.is_caught_up == (len(known) == len(text))
        if tree.is_caught_up:
            live = {path for path in paths.values() if path[: len(text)] == tuple(text)}
            assert {paths[number] for number in paths if tree.is_live(number)} == live
            assert tree.max_depth == max(len(path) for path in live) - len(text)


def named(parent: int, token_id: int, drafter: str) -> ProposalNode:
    return ProposalNode(parent, token_id, NodeKind.GUESSED, drafter=drafter)


@pytest.mark.parametrize("is_late", [False, True])
def test_nodes_of_several_drafters_are_worth_what_their_own_drafter_is(is_late: bool) -> None:
    rates = AcceptanceRates()
    nodes = [named(0, 1, "model"), named(0, 2, "suffix"), named(0, 3, "model"), named(0, 4, "suffix"), _guess(0, 5)]
    for _ in range(100):
        tree = Lookahead(0, rates)
        if is_late:
            tree.follow([4])
        for node in nodes:
            tree.add(node)
        if not is_late:
            tree.follow([4])
    tree = Lookahead(0, rates)
    numbers = {node.token_id: tree.add(node) for node in nodes}
    values = {token_id: tree.value(number) for token_id, number in numbers.items()}
    # The second choice of its drafter, and the fourth of the draft as a whole.
    assert values[4] > 0.9
    assert rates.of("suffix").value(1, 2) == values[4]
    assert max(values[token_id] for token_id in (1, 2, 3, 5)) < 0.1
    assert rates.value(1, 4) > 0.8
    assert next(tree.candidates(1)).number == numbers[4]


@pytest.mark.parametrize("is_late", [False, True])
def test_nodes_that_their_draft_is_surer_of_are_worth_more(is_late: bool) -> None:
    rates = AcceptanceRates()

    def nodes(first: float) -> list[ProposalNode]:
        return [replace(_guess(0, token_id), likelihood=item) for token_id, item in ((1, first), (2, 1 - first))]

    for number in range(200):
        tree, is_sure, text = Lookahead(0, rates), number % 2 == 0, [1 if number % 4 else 2]
        if is_late:
            tree.follow(text)
        for node in nodes(0.95 if is_sure == (text == [1]) else 0.55):
            tree.add(node)
        if not is_late:
            tree.follow(text)
    sure, unsure = Lookahead(0, rates), Lookahead(0, rates)
    for tree, first in ((sure, 0.95), (unsure, 0.55)):
        for node in nodes(first):
            tree.add(node)
    assert sure.value(1) > rates.value(1, 1) > unsure.value(1)
    assert sure.value(2) < rates.value(1, 2) < unsure.value(2)


def test_the_drafters_along_a_text() -> None:
    tree = Lookahead(0)
    for node in (named(0, 1, "model"), named(1, 2, "model+suffix"), named(2, 3, "suffix")):
        tree.add(node)
    assert tree.drafters([1, 2, 9, 3]) == ("model", "model+suffix")
    tree.follow([1])
    assert tree.drafters([2, 3]) == ("model+suffix", "suffix")
    tree.follow([7])
    assert tree.drafters([2]) == ()
