"""What a drafter over features proposes is what its head (EAGLE-3, block), run over the whole text, would say."""

import pytest
import torch

from outrider.drafters.choices import TreeOptions
from outrider.drafters.drafter import DraftTerms, OpenProposal
from outrider.errors import Overloaded
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.speculation.randomness import Counter, KeyedSource, Purpose
from outrider.tokens import ROOT, NodeKind, ProposalTree
from tests.draft_service.conftest import draft, proposal, terms
from tests.drafters.heads import PUBLISHED, VOCABULARY, TinyBlock, TinyEagle3, TinyPublished, V

GREEDY = terms(SamplingParameters(temperature=0.0))
TEXT = tuple(3 + 7 * index % (V - 3) for index in range(40))


@pytest.fixture(params=["eagle3", "block", *PUBLISHED])
def tiny(request: pytest.FixtureRequest) -> TinyEagle3:
    if request.param in PUBLISHED:
        return TinyPublished.read(request.param)
    return TinyBlock.make() if request.param == "block" else TinyEagle3.make()


def greedy_chain(tiny: TinyEagle3, token_ids: tuple[int, ...], num: int) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    for _ in range(num):
        path = (*path, int(VOCABULARY.token_ids[tiny.logits(token_ids, path).argmax()]))
    return path


def confidences(tiny: TinyEagle3, given: DraftTerms, path: tuple[int, ...]) -> torch.Tensor:
    scores = tiny.logits(TEXT[:12], path)
    if not given.parameters.is_greedy:
        counter = Counter(Purpose.TARGET, 12 + len(path))
        scores = scores.log_softmax(-1) - KeyedSource(5).exponential(VOCABULARY.token_ids, counter).log()
    return scores.log_softmax(-1)


@pytest.mark.parametrize("chunk", [4, 64])
def test_a_chain_is_the_heads_own_continuation(tiny: TinyEagle3, chunk: int) -> None:
    drafter = tiny.drafter(chunk=chunk)
    drafter.give("s", tiny.span(0, 11))
    assert draft(drafter, proposal(TEXT[:12], 4, given=GREEDY)) == [greedy_chain(tiny, TEXT[:12], 4)]


def test_a_session_goes_on_from_its_columns(tiny: TinyEagle3) -> None:
    drafter = tiny.drafter()
    for length, start in ((12, 0), (14, 11), (15, 13), (30, 14)):
        drafter.give("s", tiny.span(start, length - 1))
        assert draft(drafter, proposal(TEXT[:length], 3, given=GREEDY)) == [greedy_chain(tiny, TEXT[:length], 3)]


def test_sessions_of_different_lengths_draft_together(tiny: TinyEagle3) -> None:
    drafter = tiny.drafter(chunk=8)
    wanted, open_ones = [], []
    for number, length in enumerate((2, 5, 12, 33)):
        drafter.give(f"s{number}", tiny.span(0, length - 1))
        open_ones.append(proposal(TEXT[:length], 3, f"s{number}", GREEDY))
        wanted.append(greedy_chain(tiny, TEXT[:length], 3))
    assert draft(drafter, *open_ones) == wanted


@pytest.mark.parametrize("given", [GREEDY, terms(SamplingParameters(temperature=1.0, seed=5))])
def test_children_are_what_the_head_is_surest_of_behind_their_own_paths(tiny: TinyEagle3, given: DraftTerms) -> None:
    drafter = tiny.drafter()
    drafter.give("s", tiny.span(0, 11))
    found = proposal(TEXT[:12], 3, given=given)
    found.max_nodes = 9
    draft(drafter, found)
    tree = ProposalTree()
    for node in found.nodes:
        tree.append(node)
    assert len(tree) == 9 and 2 <= tree.max_depth <= 3
    for number in range(len(tree) + 1):
        children = [tree.node(child).token_id for child in tree.children(number)]
        path = tuple(tree.node(step).token_id for step in tree.path(number))
        best = VOCABULARY.token_ids[confidences(tiny, given, path).topk(len(children) + 1).indices].tolist()
        # bfloat16 leaves the order of near-equals open, at the edge only.
        assert set(children) <= set(best) and children[:1] == best[: min(1, len(children))]


def test_under_rejection_the_main_line_brings_its_laws_and_guesses_stand_beside_it(tiny: TinyEagle3) -> None:
    drafter = tiny.drafter(tree=TreeOptions(top_k=64))
    drafter.give("s", tiny.span(0, 11))
    given = terms(SamplingParameters(temperature=1.0, seed=5), AcceptanceRule.REJECTION)
    found = proposal(TEXT[:12], 3, given=given)
    found.max_nodes = 8
    draft(drafter, found)
    line, guesses = found.nodes[:3], found.nodes[3:]
    path: tuple[int, ...] = ()
    for depth, node in enumerate(line):
        assert node.kind is NodeKind.DRAFTED and node.parent == depth
        distribution = node.draft_distribution
        assert distribution is not None and node.token_id in distribution.token_ids
        wanted = tiny.logits(TEXT[:12], path).double().softmax(-1)
        places = VOCABULARY.indices(torch.tensor(distribution.token_ids))
        # The drafter's products are in 8 bits.
        assert (wanted[places] - torch.tensor(distribution.probabilities)).abs().max() < 0.05
        path = (*path, node.token_id)
    assert len(guesses) == 5
    assert all(node.kind is NodeKind.GUESSED and node.parent <= 2 for node in guesses)
    tree = ProposalTree()
    for node in found.nodes:
        tree.append(node)  # no token stands twice below a node
    assert tree.drafted_child(ROOT) == 1


def test_missing_features_are_named_and_waited_for(tiny: TinyEagle3) -> None:
    drafter = tiny.drafter()
    drafter.give("s", tiny.span(0, 5))
    waiting = proposal(TEXT[:12], 3, given=GREEDY)
    assert drafter.step([waiting]).num_rows == 0
    assert waiting.missing_features_from == 5 and not waiting.complete
    drafter.give("s", tiny.span(8, 11))  # behind a gap: of no use
    drafter.give("s", tiny.span(3, 11))  # in part here already
    waiting.missing_features_from = None
    assert draft(drafter, waiting) == [greedy_chain(tiny, TEXT[:12], 3)]


def test_other_tokens_need_other_features(tiny: TinyEagle3) -> None:
    drafter = tiny.drafter()
    drafter.give("s", tiny.span(0, 19))
    draft(drafter, proposal(TEXT[:20], 3, given=GREEDY))
    other = (*TEXT[:9], 1, 2, 3)
    drafter.truncate("s", 9)
    waiting = proposal(other, 3, given=GREEDY)
    drafter.step([waiting])
    assert waiting.missing_features_from == 8
    waiting.missing_features_from = None
    drafter.give("s", tiny.span(8, 11))
    assert draft(drafter, waiting) == [greedy_chain(tiny, other, 3)]


def test_the_same_base_can_be_asked_again(tiny: TinyEagle3) -> None:
    drafter = tiny.drafter()
    drafter.give("s", tiny.span(0, 11))
    first = draft(drafter, proposal(TEXT[:12], 4, given=GREEDY))
    assert draft(drafter, proposal(TEXT[:12], 4, given=GREEDY)) == first


def test_a_session_that_is_opened_again_keeps_its_columns(tiny: TinyEagle3) -> None:
    drafter = tiny.drafter()
    assert drafter.resume("s") == 0
    drafter.give("s", tiny.span(0, 11))
    draft(drafter, proposal(TEXT[:12], 3, given=GREEDY))
    drafter.give("s", tiny.span(11, 20))
    assert drafter.resume("s") == 11
    waiting = proposal(TEXT[:21], 3, given=GREEDY)
    drafter.step([waiting])
    assert waiting.missing_features_from == 11  # what was given before may have been of other tokens


def test_a_stop_token_is_not_continued(tiny: TinyEagle3) -> None:
    chain = greedy_chain(tiny, TEXT[:12], 4)
    drafter = tiny.drafter()
    drafter.give("s", tiny.span(0, 11))
    stopping = terms(SamplingParameters(temperature=0.0), stop_token_ids=[chain[1]])
    assert draft(drafter, proposal(TEXT[:12], 4, given=stopping)) == [chain[: chain.index(chain[1]) + 1]]


def test_idle_sessions_make_room_and_are_asked_again(tiny: TinyEagle3) -> None:
    one_state = 2 * tiny.num_kv_heads * 256 * 8 * 2
    drafter = tiny.drafter(budget=int(2.5 * one_state))
    for name in ("a", "b", "c"):
        drafter.give(name, tiny.span(0, 11))
        draft(drafter, proposal(TEXT[:12], 3, name, GREEDY))
    assert drafter.used_bytes <= 2.5 * one_state
    again = proposal(TEXT[:12], 3, "a", GREEDY)
    drafter.step([again])
    assert again.missing_features_from == 0


def test_a_session_too_long_for_the_budget_is_refused(tiny: TinyEagle3) -> None:
    drafter = tiny.drafter(budget=1 << 10)
    long = OpenProposal("s", TEXT * 10, GREEDY, 3)
    drafter.step([long])
    assert isinstance(long.refusal, Overloaded)


def test_penalties_count_drafted_tokens(tiny: TinyEagle3) -> None:
    given = terms(SamplingParameters(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0), prompt_len=12)
    drafter = tiny.drafter()
    drafter.give("s", tiny.span(0, 11))
    path: tuple[int, ...] = ()
    for _ in range(4):
        logits = tiny.logits(TEXT[:12], path)
        for token_id in path:
            place = int(VOCABULARY.indices(torch.tensor([token_id])))
            logits[place] -= 4.0
        path = (*path, int(VOCABULARY.token_ids[logits.argmax()]))
    assert len(set(path)) == 4
    assert draft(drafter, proposal(TEXT[:12], 4, given=given)) == [path]


def test_nothing_is_guessed_behind_a_single_token(tiny: TinyEagle3) -> None:
    assert draft(tiny.drafter(), proposal(TEXT[:1], 3, given=GREEDY)) == [()]
