"""Which nodes a tree gets, given how probable each token is."""

import math
import random
from itertools import product

import pytest

from outrider.drafters.search import MAX_BRANCHING, TreeSearch
from outrider.tokens import ProposalNode, ProposalTree

V = 6


def law(seed: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
    """Returns a made-up law after a path, the likeliest token first."""
    weights = [random.Random(f"{seed} {path} {token_id}").random() ** 4 for token_id in range(V)]
    logs = [(token_id, math.log(weight / sum(weights))) for token_id, weight in enumerate(weights)]
    return sorted(logs, key=lambda item: -item[1])


def found(search: TreeSearch, seed: int) -> list[ProposalNode]:
    while search.frontier:
        search.expand([law(seed, search.path(number))[: search.branching] for number in search.frontier])
    return search.nodes()


def paths_of(nodes: list[ProposalNode]) -> list[tuple[int, ...]]:
    tree = ProposalTree()
    for node in nodes:
        tree.append(node)
    return [tuple(tree.node(step).token_id for step in tree.path(number)) for number in range(1, len(tree) + 1)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_nodes", [5, 12])
def test_the_most_confident_paths_are_found(seed: int, num_nodes: int) -> None:
    depth = 4
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    for length in range(1, depth + 1):
        for path in product(range(V), repeat=length):
            scores[path] = scores[path[:-1]] + dict(law(seed, path[:-1]))[path[-1]]
    del scores[()]
    best = sorted(scores, key=lambda path: -scores[path])[:num_nodes]
    assert set(paths_of(found(TreeSearch(depth, num_nodes), seed))) == set(best)


def test_as_many_nodes_as_levels_are_a_chain() -> None:
    assert [node.parent for node in found(TreeSearch(4, 4), 1)] == [0, 1, 2, 3]
    assert [node.parent for node in found(TreeSearch(4, 2), 1)] == [0, 1]


def test_parents_come_first_and_the_likeliest_child_before_others() -> None:
    for seed in range(10):
        nodes = found(TreeSearch(3, 10), seed)
        assert all(node.parent < number for number, node in enumerate(nodes, 1))
        firsts: dict[int, int] = {}
        for node in nodes:
            firsts.setdefault(node.parent, node.token_id)
        assert firsts[0] == law(seed, ())[0][0]


def test_nothing_stands_below_a_stop_token() -> None:
    stop = law(3, ())[0][0]
    paths = paths_of(found(TreeSearch(3, 12, {stop}), 3))
    assert (stop,) in paths
    assert not any(stop in path[:-1] for path in paths)


def test_certain_tokens_make_a_deep_tree() -> None:
    search = TreeSearch(5, 8)
    while search.frontier:
        search.expand([[(1, 0.0), (2, -20.0)] for _ in search.frontier])
    assert (1, 1, 1, 1, 1) in paths_of(search.nodes())


def test_where_nothing_is_proposed_the_tree_is_empty() -> None:
    search = TreeSearch(3, 8)
    assert search.branching == min(MAX_BRANCHING, 8)
    search.expand([[]])
    assert not search.frontier and not search.nodes()
