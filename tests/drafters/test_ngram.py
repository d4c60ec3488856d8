import random

import pytest

from outrider.drafters.drafter import OpenProposal
from outrider.drafters.ngram import NgramDrafter, NgramIndex
from outrider.parameters import AcceptanceRule
from tests.draft_service.conftest import draft, ngram_drafter, proposal, terms


def _continuation_by_search(token_ids: list[int], shortest: int, longest: int) -> int | None:
    """The definition, by looking everywhere."""
    for size in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        for end in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[end - size : end] == token_ids[-size:]:
                return end
    return None


def test_the_latest_occurrence_of_the_longest_ngram_is_continued() -> None:
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 9, 1, 2, 3]
    assert draft(ngram_drafter(), proposal(tokens, 3)) == [(4, 9, 2)]
    assert draft(NgramDrafter(1, 2, 1 << 20, 4096), proposal(tokens, 3)) == [(5, 9, 1)]


def test_without_an_earlier_occurrence_nothing_is_proposed() -> None:
    assert draft(ngram_drafter(), proposal([1, 2, 3])) == [()]
    assert draft(ngram_drafter(), proposal([1])) == [()]


def test_a_repetition_is_continued_past_its_end() -> None:
    assert draft(ngram_drafter(), proposal([7, 8, 7, 8], 5)) == [(7, 8, 7, 8, 7)]


def test_a_branch_ends_with_a_stop_token() -> None:
    assert draft(ngram_drafter(), proposal([1, 2, 3, 4, 1], 4, given=terms(stop_token_ids=[3]))) == [(2, 3)]


def test_under_rejection_a_lookup_is_a_point_mass() -> None:
    item = proposal([7, 8, 7], 2, given=terms(rule=AcceptanceRule.REJECTION))
    draft(ngram_drafter(), item)
    distributions = [node.draft_distribution for node in item.nodes]
    assert [(distribution.token_ids, distribution.probabilities) for distribution in distributions if distribution] == [
        ((8,), (1.0,)),
        ((7,), (1.0,)),
    ]


def test_the_index_follows_growth_and_truncation_exactly() -> None:
    chance = random.Random(3)
    for shortest, longest in ((1, 1), (1, 3), (2, 4)):
        index, tokens = NgramIndex(shortest, longest), list[int]()
        for _ in range(400):
            if chance.random() < 0.2:
                length = chance.randint(0, len(tokens))
                del tokens[length:]
                index.truncate(length)
            more = [chance.randrange(4) for _ in range(chance.randint(0, 4))]
            tokens += more
            index.extend(more)
            assert index.continuation() == _continuation_by_search(tokens, shortest, longest)
        index.truncate(0)
        assert index.num_bytes == 0


def test_sessions_do_not_see_each_other_and_a_forgotten_one_starts_again() -> None:
    drafter = ngram_drafter()
    first, second = proposal([1, 2, 1], session_id="a"), proposal([1, 3, 1], session_id="b")
    assert draft(drafter, first, second) == [(2, 1, 2, 1), (3, 1, 3, 1)]
    drafter.forget("a")
    assert draft(drafter, proposal([1, 5, 1], session_id="a")) == [(5, 1, 5, 1)]


def test_indexes_stay_within_their_budget() -> None:
    drafter = NgramDrafter(1, 3, budget_bytes=100_000, max_session_len=4096)
    for number in range(20):
        draft(drafter, proposal(list(range(100)), session_id=str(number)))
        assert 0 < drafter.used_bytes <= 100_000


def test_a_lookup_costs_no_more_in_a_long_session() -> None:
    drafter = ngram_drafter()
    tokens = list(range(3000))
    draft(drafter, proposal(tokens))
    index = drafter._indexes.use("s")
    seen: list[int] = []
    index_extend = index.extend
    index.extend = lambda more: (seen.append(len(more)), index_extend(more))[1]  # type: ignore[method-assign]
    draft(drafter, proposal([*tokens, 5]))
    assert seen == [1]


@pytest.mark.parametrize(("max_nodes", "lookahead", "num"), [(0, 0, 4), (2, 0, 2), (0, 9, 9), (6, 9, 6), (9, 0, 4)])
def test_a_proposal_is_as_long_as_its_sizes_allow(max_nodes: int, lookahead: int, num: int) -> None:
    found = OpenProposal("s", (1, 1, 1), terms(), 4, max_nodes, lookahead)
    assert draft(ngram_drafter(), found) == [(1,) * num]
