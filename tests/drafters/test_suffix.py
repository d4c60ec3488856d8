from dataclasses import replace

import pytest

from outrider.drafters.drafter import DraftTerms, OpenProposal
from outrider.drafters.options import SuffixScope
from outrider.drafters.suffix import SuffixDrafter
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.tenants import cache_salt
from outrider.tokens import NodeKind
from tests.draft_service.conftest import draft, proposal, terms

COUPLED = AcceptanceRule.COUPLED
ONE, OTHER, DEFAULT = cache_salt("one"), cache_salt("other"), cache_salt("default")
SAID = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def drafter(scope: SuffixScope = SuffixScope.TENANT, budget_bytes: int = 1 << 24) -> SuffixDrafter:
    return SuffixDrafter(scope, budget_bytes, 4096)


def asked(session_id: str, token_ids: tuple[int, ...], salt: bytes, rule: AcceptanceRule = COUPLED) -> OpenProposal:
    given = terms(rule=rule)
    return proposal(token_ids, 4, session_id, DraftTerms(given.parameters, rule, len(token_ids), frozenset(), salt))


def test_the_longest_match_is_continued() -> None:
    tokens = [1, 2, 3, 4, 9, 8, 3, 4, 5, 9, 1, 2, 3, 4]
    found = proposal(tokens)
    assert draft(drafter(), found)[0][:3] == (9, 8, 3)
    assert all(node.kind is NodeKind.GUESSED and node.draft_distribution is None for node in found.nodes)
    # What stands once behind a long match is all but certain, and the more so the longer the match gets.
    likelihoods = [node.likelihood for node in found.nodes[:3]]
    assert 0.8 < likelihoods[0] < likelihoods[-1] < 1


def test_without_a_match_nothing_is_proposed() -> None:
    assert draft(drafter(), proposal([1, 2, 3]), proposal([1], session_id="t")) == [(), ()]


@pytest.mark.parametrize(
    ("scope", "first", "second", "learns"),
    [
        (SuffixScope.TENANT, ONE, ONE, True),
        (SuffixScope.TENANT, ONE, OTHER, False),
        (SuffixScope.TENANT, DEFAULT, DEFAULT, False),
        (SuffixScope.TENANT, b"", b"", False),
        (SuffixScope.ALL, DEFAULT, DEFAULT, True),
        (SuffixScope.ALL, ONE, OTHER, False),
        (SuffixScope.SESSION, ONE, ONE, False),
    ],
)
def test_sessions_learn_from_those_of_their_tenant(
    scope: SuffixScope, first: bytes, second: bytes, learns: bool
) -> None:
    learning = drafter(scope)
    draft(learning, asked("a", SAID, first))
    assert draft(learning, asked("b", (0, 3, 4, 5), second)) == [(6, 7, 8, 9) if learns else ()]


def test_under_rejection_a_session_has_its_own_text_alone_as_a_point_mass() -> None:
    learning = drafter()
    draft(learning, asked("a", SAID, ONE))
    assert draft(learning, asked("b", (0, 3, 4, 5), ONE, AcceptanceRule.REJECTION)) == [()]
    found = asked("c", (5, 6, 7, 8, 0, 5, 6, 7), ONE, AcceptanceRule.REJECTION)
    draft(learning, found)
    assert found.nodes
    for node in found.nodes:
        assert node.kind is NodeKind.DRAFTED
        assert node.draft_distribution is not None
        assert node.draft_distribution.token_ids == (node.token_id,)
        assert not node.likelihood
    # Nor do other sessions learn from it, until a request of its own goes by another rule.
    assert draft(learning, asked("d", (1, 8, 0, 5), ONE)) == [()]
    draft(learning, asked("c", (5, 6, 7, 8, 0, 5, 6, 7), ONE))
    assert draft(learning, asked("d", (1, 8, 0, 5), ONE)) == [(6, 7)]


def predicting(token_ids: tuple[int, ...], prediction: tuple[int, ...], **changes: object) -> OpenProposal:
    """A proposal of a request with a prompt of two tokens."""
    given = DraftTerms(terms().parameters, COUPLED, 2, frozenset(), ONE, prediction=prediction)
    return proposal(token_ids, 4, "p", replace(given, **changes))  # type: ignore[arg-type]


def test_a_prediction_is_proposed_from_its_beginning_and_behind_differences() -> None:
    learning, prediction = drafter(), tuple(range(20, 40))
    assert draft(learning, predicting((1, 2), prediction)) == [(20, 21, 22, 23)]
    assert draft(learning, predicting((1, 2, 20, 21), prediction)) == [(22, 23, 24, 25)]
    assert draft(learning, predicting((1, 2, 20, 21, 7), prediction)) == [()]
    assert draft(learning, predicting((1, 2, 20, 21, 7, 23, 24, 25), prediction)) == [(26, 27, 28, 29)]
    assert draft(learning, predicting((1, 2, *prediction), prediction)) == [()]
    # A text that changed is followed from its beginning.
    learning.truncate("p", 4)
    assert draft(learning, predicting((1, 2, 20, 21, 22), prediction)) == [(23, 24, 25, 26)]


def test_no_other_request_is_drafted_from_a_prediction() -> None:
    learning, prediction = drafter(), tuple(range(20, 40))
    draft(learning, predicting((1, 2), prediction))
    assert draft(learning, asked("other", (1, 2, 20, 21, 22), ONE)) == [()]
    # The session's next request has none.
    assert draft(learning, predicting((1, 2, 20, 21, 22, 23), ())) == [()]
    assert not learning._predictions


def test_under_rejection_a_prediction_is_a_point_mass_too() -> None:
    found = predicting((1, 2), (5, 6, 7), acceptance_rule=AcceptanceRule.REJECTION)
    assert draft(drafter(), found) == [(5, 6, 7)]
    assert all(node.kind is NodeKind.DRAFTED for node in found.nodes)


def test_what_a_session_fed_goes_with_it() -> None:
    learning = drafter()
    draft(learning, asked("a", SAID, ONE))
    learning.forget("a")
    assert draft(learning, asked("b", (3, 4, 5), ONE)) == [()]
    learning.forget("b")
    learning.forget("unknown")
    alone = drafter(SuffixScope.SESSION)
    draft(alone, asked("a", SAID, ONE))
    assert alone.used_bytes > 0
    alone.forget("a")
    assert alone.used_bytes == 0


@pytest.mark.parametrize("scope", [SuffixScope.SESSION, SuffixScope.TENANT])
def test_a_text_that_changes_is_learnt_again(scope: SuffixScope) -> None:
    learning = drafter(scope)
    draft(learning, asked("a", (1, 2, 3, 4, 5, 6, 1, 2), ONE))
    learning.truncate("a", 4)
    assert draft(learning, asked("a", (1, 2, 3, 4, 7, 1, 2, 3, 4), ONE)) == [(7, 1, 2, 3)]
    learning.truncate("a", 9)
    assert draft(learning, asked("a", (1, 2, 3, 4, 7, 1, 2, 3, 4, 7), ONE)) == [(1, 2, 3, 4)]


def test_texts_stay_within_their_budget() -> None:
    for scope in SuffixScope:
        learning = drafter(scope, budget_bytes=200_000)
        for number in range(40):
            salt = cache_salt(str(number % 3))
            draft(learning, asked(str(number), tuple(range(number, number + 100)), salt))
            assert 0 < learning.used_bytes <= 200_000
    assert len(learning._corpora) == 3


def test_a_long_text_is_learnt_in_parts_beside_other_sessions() -> None:
    learning = drafter()
    long, short = asked("a", tuple(range(3000)) + SAID[:4], ONE), asked("b", (1, 2, 3, 0, 1, 2, 3), OTHER)
    learning.step([long, short])
    assert short.complete
    assert not long.complete
    draft(learning, long)
    assert [node.token_id for node in long.nodes] == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("max_nodes", "lookahead", "num_nodes", "depth"),
    [(0, 0, 4, 4), (2, 0, 2, 2), (0, 9, 9, 9), (6, 9, 6, 6), (9, 0, 9, 4)],
)
def test_a_proposal_is_as_large_as_its_sizes_allow(max_nodes: int, lookahead: int, num_nodes: int, depth: int) -> None:
    text = [*range(50), 1, *range(10, 40), 2, *range(10, 40), *range(90, 99), *range(20, 30)]
    found = OpenProposal("s", text, terms(), 4, max_nodes, lookahead)
    draft(drafter(), found)
    depths = [0]
    for node in found.nodes:
        depths.append(depths[node.parent] + 1)
    assert len(found.nodes) <= num_nodes
    assert max(depths) == depth


def test_a_proposal_ends_with_the_request() -> None:
    ending = terms(SamplingParameters(seed=5, max_tokens=5))  # one of four tokens is the prompt
    assert draft(drafter(), OpenProposal("s", (7, 8, 7, 8), ending, 4)) == [(7, 8)]
    assert draft(drafter(), OpenProposal("s", (7, 8, 7, 8), terms(), 4, max_len=5)) == [(7,)]
    assert draft(drafter(), OpenProposal("s", (7, 8, 7, 8), terms(), 4, max_len=4)) == [()]
