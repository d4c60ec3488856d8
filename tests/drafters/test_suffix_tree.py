from array import array
from collections.abc import Sequence

from outrider.drafters.suffix_corpus import Occurrence
from outrider.drafters.suffix_tree import SuffixTree, TreeSizes

SIZES = TreeSizes(num_nodes=8, depth=4, width=8, least_value=0.1)


def at(*token_ids: int, position: int = 0, length: int = 8) -> Occurrence:
    """An occurrence after which these tokens follow."""
    return Occurrence(array("I", token_ids), position, length)


def grown(text: Sequence[int], sizes: TreeSizes, occurrences: list[Occurrence]) -> list[tuple[int, int]]:
    """Parents and tokens of a tree's nodes; their values fall from one to the next."""
    nodes = SuffixTree(text, sizes).grow(occurrences)
    assert [node.value for node in nodes] == sorted((node.value for node in nodes), reverse=True)
    assert all(0 < node.value <= 1 for node in nodes)
    return [(node.parent, node.token_id) for node in nodes]


def test_a_single_match_is_a_line_to_its_end() -> None:
    assert grown((), SIZES, [at(5, 6, 7)]) == [(0, 5), (1, 6), (2, 7)]
    assert grown((), SIZES, [at(1, 2, 3, 4, 5, 6)]) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert grown((), SIZES, []) == []


def test_a_short_match_gives_a_short_line_that_grows_with_its_length() -> None:
    sizes = TreeSizes(num_nodes=64, depth=64, width=8, least_value=0.3)
    nums = [len(grown((), sizes, [at(*range(64), length=length)])) for length in range(2, 17)]
    assert nums == sorted(nums)
    assert nums[0] == 1 < nums[2] < nums[-1] < 64


def test_it_branches_where_matches_differ_the_likelier_first() -> None:
    found = grown((), SIZES, [at(1, 9), at(1, 3), at(2, 4), at(1, 3)])
    assert found[:2] == [(0, 1), (1, 3)]
    assert sorted(found) == [(0, 1), (0, 2), (1, 3), (1, 9), (found.index((0, 2)) + 1, 4)]


def test_a_longer_match_counts_for_more() -> None:
    found = grown((), SIZES, [at(1), at(1), at(1), at(2, length=8)])
    assert found[0] == (0, 1)
    found = grown((), SIZES, [at(1, length=2), at(1, length=2), at(1, length=2), at(2, length=8)])
    assert found[0] == (0, 2)


def test_a_chain_follows_the_likelier_token_only() -> None:
    sizes = TreeSizes(num_nodes=8, depth=8, width=1, least_value=0.0)
    assert grown((), sizes, [at(1, 9), at(2, 4), at(1, 9)]) == [(0, 1), (1, 9)]


def test_a_match_in_the_text_itself_goes_on_into_what_was_drafted() -> None:
    text = array("I", (7, 8, 7, 8))
    sizes = TreeSizes(num_nodes=5, depth=5, width=8, least_value=0.0)
    assert grown(text, sizes, [Occurrence(text, 2, 2)]) == [(0, 7), (1, 8), (2, 7), (3, 8), (4, 7)]
    # Another text ends where it ends.
    assert grown((), sizes, [Occurrence(text, 2, 2)]) == [(0, 7), (1, 8)]


def test_stop_tokens_and_improbable_ones_end_a_path() -> None:
    stopping = TreeSizes(num_nodes=8, depth=8, width=8, least_value=0.0, stop_token_ids=frozenset((6,)))
    assert grown((), stopping, [at(5, 6, 7)]) == [(0, 5), (1, 6)]
    sure = TreeSizes(num_nodes=8, depth=8, width=8, least_value=0.0, least_probability=0.8)
    assert grown((), sure, [at(1), at(1), at(1, 2), at(3)]) == []
    assert grown((), sure, [at(1, 2), at(1, 3)]) == [(0, 1)]
