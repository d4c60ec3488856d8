"""Spans, distributions and proposal trees."""

import math

import pytest

from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree, SparseDistribution, TokenSpan
from tests.proposals import chain


def guessed(parent: int, token_id: int) -> ProposalNode:
    return ProposalNode(parent, token_id, NodeKind.GUESSED)


def test_a_span_ends_behind_its_last_token() -> None:
    assert TokenSpan(3, (7, 8)).end == 5
    assert TokenSpan(0, ()).end == 0


def test_a_span_does_not_start_before_the_session() -> None:
    with pytest.raises(ValueError, match="start"):
        TokenSpan(-1, (1,))


@pytest.mark.parametrize(
    ("token_ids", "probabilities"),
    [
        ((), ()),
        ((1,), ()),
        ((1, 1), (0.5, 0.5)),
        ((1, 2), (1.0, 0.0)),
        ((1, 2), (1.5, -0.5)),
        ((1, 2), (0.5, 0.4)),
        ((1, 2), (0.5, math.nan)),
        ((1,), (math.inf,)),
    ],
)
def test_what_is_no_distribution_is_refused(token_ids: tuple[int, ...], probabilities: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="draft_distribution"):
        SparseDistribution(token_ids, probabilities)


def test_a_distribution_may_be_off_by_rounding() -> None:
    SparseDistribution((1, 2), (0.5, 0.5 + 5e-7))
    SparseDistribution((1,), (1 + 1e-12,))


def test_an_empty_tree_is_a_root() -> None:
    tree = ProposalTree()
    assert (len(tree), tree.max_depth, tree.children(ROOT), tree.child(ROOT, 1), tree.path(ROOT)) == (
        0,
        0,
        (),
        None,
        (),
    )
    assert tree.drafted_child(ROOT) is None


def test_nodes_are_numbered_in_order_and_found_again() -> None:
    tree = ProposalTree()
    nodes = [ProposalNode(ROOT, 5), guessed(ROOT, 6), guessed(1, 5), ProposalNode(3, 9)]
    assert [tree.append(node) for node in nodes] == [1, 2, 3, 4]
    assert [tree.node(number) for number in range(1, 5)] == nodes
    assert [tree.depth(number) for number in range(5)] == [0, 1, 1, 2, 3]
    assert (tree.children(ROOT), tree.children(1), tree.children(2)) == ((1, 2), (3,), ())
    assert (tree.child(ROOT, 6), tree.child(1, 6), tree.child(3, 9)) == (2, None, 4)
    assert (tree.path(4), tree.path(2), tree.max_depth) == ((1, 3, 4), (2,), 3)
    assert (tree.drafted_child(ROOT), tree.drafted_child(1), tree.drafted_child(3)) == (1, None, 4)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (guessed(3, 1), "parent"),
        (guessed(-1, 1), "parent"),
        (guessed(ROOT, 5), "repeats"),
        (ProposalNode(ROOT, 7), "second drafted"),
    ],
)
def test_nodes_that_make_no_tree_are_refused_and_leave_it_as_it_was(node: ProposalNode, reason: str) -> None:
    tree = chain((5, 6))
    with pytest.raises(ValueError, match=reason):
        tree.append(node)
    assert (len(tree), tree.children(ROOT), tree.max_depth) == (2, (1,), 2)
    assert tree.append(guessed(ROOT, 8)) == 3


def test_a_chain_has_one_branch_of_drafted_nodes() -> None:
    tree = chain((4, 4, 2))
    assert [tree.node(number).token_id for number in tree.path(3)] == [4, 4, 2]
    assert all(node.kind is NodeKind.DRAFTED for node in tree.nodes)
    assert len(chain(())) == 0


def test_trees_share_nothing() -> None:
    one, other = ProposalTree(), ProposalTree()
    one.append(guessed(ROOT, 1))
    assert (len(other), other.max_depth, other.children(ROOT)) == (0, 0, ())
