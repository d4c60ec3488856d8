"""Trees of two drafters: names, order, bounds, and what is learnt from the text."""

import pytest

from outrider.drafters.combined_tree import CombinedNode, CombinedTree
from outrider.speculation.acceptance import AcceptanceRates
from outrider.tokens import NodeKind, ProposalNode, ProposalTree

NAMES = ("model", "suffix")


def line(tree: CombinedTree, drafter: str, *token_ids: int, must_be_sent: bool = False) -> list[CombinedNode]:
    """Adds a path below the root; returns its nodes."""
    nodes = [tree.root]
    for token_id in token_ids:
        node = ProposalNode(0, token_id, NodeKind.GUESSED)
        nodes.append(tree.add(nodes[-1], node, drafter, must_be_sent=must_be_sent))
    return nodes[1:]


def paths(nodes: list[ProposalNode]) -> dict[tuple[int, ...], str]:
    """Returns the tokens down to each node, in order, with its drafter."""
    tree, found = ProposalTree(), dict[tuple[int, ...], str]()
    for node in nodes:
        number = tree.append(node)
        found[tuple(tree.node(step).token_id for step in tree.path(number))] = node.drafter
    return found


def rates_of(**are_right: bool) -> AcceptanceRates:
    """Returns rates of drafters that have always been right, or wrong."""
    rates = AcceptanceRates()
    for drafter, is_right in are_right.items():
        for depth in (*range(1, 5),) * 100:
            rates.of(drafter).observe(depth, [0.0], 1 if is_right else None)
    return rates


def test_nodes_have_the_names_of_those_that_proposed_them() -> None:
    tree = CombinedTree(NAMES, AcceptanceRates())
    line(tree, "model", 1, 2, 3)
    line(tree, "suffix", 1, 2, 4)
    sent = tree.take(0, is_chain=False)
    assert paths(sent) == {
        (1,): "model+suffix",
        (1, 2): "model+suffix",
        (1, 2, 3): "model",
        (1, 2, 4): "suffix",
    }
    # What was sent keeps its name, and nobody is named twice.
    for _ in range(3):
        line(tree, "suffix", 1, 2, 3, 5)
    line(tree, "model", 1, 2, 3, 5)
    more = paths(sent + tree.take(0, is_chain=False))
    assert (more[1, 2, 3], more[1, 2, 3, 5]) == ("model", "model+suffix")


@pytest.mark.parametrize("best", ["model", "suffix"])
def test_those_worth_most_are_sent_first_and_alone_where_there_is_no_room(best: str) -> None:
    tree = CombinedTree(NAMES, rates_of(model=best == "model", suffix=best == "suffix"))
    line(tree, "model", 1, 2, 3)
    line(tree, "suffix", 4, 5, 6)
    expected = (1, 2, 3) if best == "model" else (4, 5, 6)
    sent = tree.take(3, is_chain=False)
    assert list(paths(sent)) == [expected[:1], expected[:2], expected]
    assert tree.take(3, is_chain=False) == []
    assert len(tree.take(5, is_chain=False)) == 2


def test_of_equal_places_what_its_drafter_is_surer_of_comes_first() -> None:
    rates = AcceptanceRates()
    for number in range(100):
        is_right = number % 2 == 0
        rates.of("suffix").observe(1, [0.9 if is_right else 0.3], 1 if is_right else None)
        rates.of("model").observe(1, [0.0], 1 if is_right else None)
    for likelihood, expected in ((0.9, [4, 1]), (0.3, [1, 4])):
        tree = CombinedTree(NAMES, rates)
        line(tree, "model", 1)
        tree.add(tree.root, ProposalNode(0, 4, NodeKind.GUESSED, likelihood=likelihood), "suffix")
        sent = tree.take(0, is_chain=False)
        assert [node.token_id for node in sent] == expected
        assert {node.token_id: node.likelihood for node in sent} == {1: 0.0, 4: likelihood}


def test_a_chain_goes_along_the_better_of_two_lines() -> None:
    tree = CombinedTree(NAMES, rates_of(model=False, suffix=True))
    line(tree, "model", 1, 2)
    line(tree, "suffix", 1, 3)
    assert list(paths(tree.take(8, is_chain=True))) == [(1,), (1, 3)]
    # And goes on where it was sent, though another would be better now.
    line(tree, "model", 1, 3, 7)
    line(tree, "suffix", 8, 9)
    assert [node.token_id for node in tree.take(8, is_chain=True)] == [7]


def test_what_must_be_sent_is_whatever_it_is_worth() -> None:
    tree = CombinedTree(NAMES, rates_of(model=False, suffix=True))
    line(tree, "suffix", 4, 5)
    line(tree, "model", 1, 2, must_be_sent=True)
    assert list(paths(tree.take(1, is_chain=False))) == [(1,), (1, 2)]
    assert [node.token_id for node in tree.take(4, is_chain=False)] == [4, 5]


def test_the_root_follows_the_text_and_drops_what_cannot_be_accepted() -> None:
    tree = CombinedTree(NAMES, AcceptanceRates())
    line(tree, "model", 1, 2, 3)
    line(tree, "suffix", 9)
    sent = tree.take(0, is_chain=False)
    assert tree.follow([1, 2]) == (True, [("model",), ("model",)])
    line(tree, "suffix", 3, 4)
    # Numbers go on where they were.
    assert list(paths(sent + tree.take(0, is_chain=False)))[-1] == (1, 2, 3, 4)
    assert tree.follow([3, 5]) == (False, [("model", "suffix")])


def test_what_was_not_sent_cannot_be_gone_on_from() -> None:
    tree = CombinedTree(NAMES, AcceptanceRates())
    line(tree, "model", 1, 2)
    tree.take(1, is_chain=False)
    assert tree.follow([1, 2]) == (False, [("model",), ("model",)])


def test_rates_learn_by_drafter_and_rank() -> None:
    rates = AcceptanceRates()
    for _ in range(200):
        tree = CombinedTree(NAMES, rates)
        line(tree, "model", 1)
        line(tree, "suffix", 2)
        line(tree, "suffix", 3)
        line(tree, "model", 4)
        line(tree, "suffix", 4)
        tree.take(0, is_chain=False)
        tree.follow([3])
    assert rates.of("suffix").value(1, 2) > 0.9
    assert rates.of("suffix").value(1, 1) < 0.1
    assert rates.of("model").value(1, 1) < 0.1
    assert rates.of("model+suffix").value(1, 1) < 0.1
    # Nothing was told about the draft as a whole here; see `outrider.speculation.proposal_tree`.
    assert rates.value(1, 1) == pytest.approx(AcceptanceRates().value(1, 1))
