"""A block is drafted in one pass, whatever its size, and for all sessions together."""

import pytest

from outrider.parameters import SamplingParameters
from tests.draft_service.conftest import draft, proposal, terms
from tests.drafters.heads import BLOCK_SIZE, PUBLISHED, TinyBlock, TinyEagle3, TinyPublished, V

GREEDY = terms(SamplingParameters(temperature=0.0))
TEXT = tuple(3 + 7 * index % (V - 3) for index in range(40))


@pytest.fixture(params=["block", *PUBLISHED])
def tiny(request: pytest.FixtureRequest) -> TinyEagle3:
    return TinyBlock.make() if request.param == "block" else TinyPublished.read(request.param)


def test_a_whole_tree_takes_one_step(tiny: TinyEagle3) -> None:
    drafter = tiny.drafter()
    drafter.give("s", tiny.span(0, 11))
    found = proposal(TEXT[:12], 4, given=GREEDY)
    found.max_nodes = 12
    rows = drafter.step([found])
    assert found.complete and len(found.nodes) == 12
    assert drafter.tokens_per_step == BLOCK_SIZE
    # The columns of a text of this length count as rows that decode: eleven, and three mask rows behind the last.
    assert rows.num_rows == 11 + 3


def test_more_tokens_than_a_block_has_are_not_promised(tiny: TinyEagle3) -> None:
    drafter = tiny.drafter()
    drafter.give("s", tiny.span(0, 11))
    [chain] = draft(drafter, proposal(TEXT[:12], 9, given=GREEDY))
    assert len(chain) == BLOCK_SIZE


@pytest.mark.parametrize("size", [1, 2, 5])
def test_fewer_tokens_are_the_first_of_more(tiny: TinyEagle3, size: int) -> None:
    chains = []
    for num in (size, BLOCK_SIZE):
        drafter = tiny.drafter()
        drafter.give("s", tiny.span(0, 11))
        chains += draft(drafter, proposal(TEXT[:12], num, given=GREEDY))
    assert chains[0] == chains[1][:size]


def test_what_was_drafted_before_is_no_part_of_the_text(tiny: TinyEagle3) -> None:
    """The mask rows' keys and values lie where the next columns will."""
    drafter, fresh = tiny.drafter(), tiny.drafter()
    for start, end in ((0, 12), (11, 14), (13, 15), (14, 30)):
        drafter.give("s", tiny.span(start, end - 1))
        again = draft(drafter, proposal(TEXT[:end], 4, given=GREEDY))
    fresh.give("s", tiny.span(0, 29))
    assert again == draft(fresh, proposal(TEXT[:30], 4, given=GREEDY))


def test_a_longer_block_of_the_same_text_is_drafted_anew() -> None:
    tiny = TinyBlock.make()
    drafter, fresh = tiny.drafter(), tiny.drafter()
    for one in (drafter, fresh):
        one.give("s", tiny.span(0, 11))
    draft(drafter, proposal(TEXT[:12], 2, given=GREEDY))
    longer = proposal(TEXT[:12], 4, given=GREEDY)
    drafter.step([longer])
    assert longer.missing_features_from == 10
    longer.missing_features_from = None
    drafter.give("s", tiny.span(10, 11))
    assert draft(drafter, longer) == draft(fresh, proposal(TEXT[:12], 4, given=GREEDY))
