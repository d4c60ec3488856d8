"""A model and `suffix` in one drafter: whose nodes are proposed, when the model drafts, and what either forgets."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from outrider.control.pass_times import PassTimes
from outrider.drafters import combined
from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.drafter import Drafter, DrafterInfo, DraftTerms, OpenProposal, StepRows
from outrider.drafters.features import Features
from outrider.drafters.loading import load_drafter
from outrider.drafters.options import DrafterKind, DrafterOptions, SuffixScope
from outrider.drafters.suffix import SuffixDrafter
from outrider.errors import Overloaded
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.tokens import NodeKind, ProposalNode, ProposalTree
from tests.draft_service.conftest import draft, proposal, terms
from tests.drafters.models import MARKOV, RecordedModel, markov, model_drafter

GREEDY = terms(SamplingParameters(temperature=0, max_tokens=10_000))
REJECTION = terms(SamplingParameters(seed=5, max_tokens=10_000), AcceptanceRule.REJECTION)
REPEATING = (1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5)
"""Tokens 6, 7, 8, 9 follow the text's end elsewhere."""


def suffix(budget_bytes: int = 1 << 24) -> SuffixDrafter:
    return SuffixDrafter(SuffixScope.TENANT, budget_bytes, 4096, only_guesses=True)


def drafter(main: Drafter | None = None) -> CombinedDrafter:
    return CombinedDrafter(main or model_drafter(), suffix())


def paths(nodes: Sequence[ProposalNode]) -> dict[tuple[int, ...], str]:
    """Returns the tokens down to each node with its drafter; fails where the nodes are no tree."""
    tree, found = ProposalTree(), dict[tuple[int, ...], str]()
    for node in nodes:
        number = tree.append(node)
        found[tuple(tree.node(step).token_id for step in tree.path(number))] = node.drafter
    return found


class Scripted(Drafter):
    """A head that proposes what it is told, a step for each token; it waits for features, or refuses, where told to."""

    def __init__(self, *token_ids: int) -> None:
        self.times = PassTimes()
        self.token_ids = token_ids
        self.missing_from: int | None = None
        self.refuses = self.goes_on = False
        self.num_steps, self.num_tokens_per_step = 0, 1
        self.steps: dict[OpenProposal, int] = {}
        self.forgotten: list[str] = []

    @property
    def info(self) -> DrafterInfo:
        return DrafterInfo.of_lookup("eagle3", 4096)

    @property
    def used_bytes(self) -> int:
        return 0

    @property
    def tokens_per_step(self) -> int:
        return self.num_tokens_per_step

    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        self.num_steps += 1
        for item in proposals:
            if self.refuses:
                item.refuse(Overloaded("the budget is full"))
            elif self.missing_from is not None:
                item.missing_features_from = self.missing_from
            else:
                steps = self.steps[item] = self.steps.get(item, 0) + 1
                if steps == item.num_speculative_tokens:
                    tokens = self.token_ids[:steps]
                    item.fill([ProposalNode(place, token, NodeKind.GUESSED) for place, token in enumerate(tokens)])
        return StepRows(len(proposals))

    def advance(self, proposal: OpenProposal, token_ids: Sequence[int]) -> bool:
        return self.goes_on

    def give(self, session_id: str, features: Features) -> bool:
        self.missing_from = None
        return False

    def forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)


def round_of(item: CombinedDrafter, token_ids: Sequence[int], num: int = 4, given: DraftTerms = GREEDY) -> OpenProposal:
    found = proposal(token_ids, num, given=given)
    draft(item, found)
    return found


def test_the_nodes_of_both_are_proposed_under_their_names() -> None:
    found = paths(round_of(drafter(Scripted(6, 7, 1, 1)), REPEATING).nodes)
    assert found == {
        (6,): "eagle3+suffix",
        (6, 7): "eagle3+suffix",
        (6, 7, 1): "eagle3",
        (6, 7, 1, 1): "eagle3",
        (6, 7, 8): "suffix",
        (6, 7, 8, 9): "suffix",
    }


def test_its_identity_is_that_of_the_model_under_both_names() -> None:
    main = model_drafter()
    assert drafter(main).info == replace(main.info, drafter="model+suffix")
    block = Scripted(6, 7)
    block.num_tokens_per_step = 5
    assert (drafter(main).tokens_per_step, drafter(block).tokens_per_step) == (1, 5)


def test_a_request_bounds_the_nodes_of_both_together() -> None:
    bounded, chain = (proposal(REPEATING, 4, given=GREEDY) for _ in range(2))
    bounded.max_nodes, chain.max_nodes = 5, 4
    draft(drafter(Scripted(1, 1, 1, 1)), bounded)
    assert len(bounded.nodes) == 5
    draft(drafter(Scripted(1, 1, 1, 1)), chain)
    assert [node.parent for node in chain.nodes] == [0, 1, 2, 3]


def test_settings_bound_proposals_whose_requests_do_not() -> None:
    bounded = CombinedDrafter(Scripted(1, 1, 1, 1), suffix(), max_nodes=6)
    assert len(round_of(bounded, REPEATING).nodes) == 6
    asked = proposal((*REPEATING, 6), 4, given=GREEDY)
    asked.max_nodes = 7
    draft(bounded, asked)
    assert len(asked.nodes) == 7


def test_under_rejection_the_models_nodes_are_what_they_are_alone_and_guesses_follow_them() -> None:
    alone = proposal(REPEATING, 4, given=REJECTION)
    alone.max_nodes = 6
    draft(model_drafter(), alone)
    together = proposal(REPEATING, 4, given=REJECTION)
    together.max_nodes = 6
    draft(drafter(), together)
    assert [replace(node, drafter="") for node in together.nodes] == alone.nodes
    unbounded = round_of(drafter(), REPEATING, given=REJECTION).nodes
    num = sum("model" in node.drafter for node in unbounded)
    assert all("model" in node.drafter for node in unbounded[:num])
    guesses = unbounded[num:]
    assert guesses
    assert all(node.kind is NodeKind.GUESSED and node.draft_distribution is None for node in guesses)
    assert paths(unbounded)


def take(item: CombinedDrafter, steps_s: float, rest_s: float) -> None:
    """Has the steps of the model and the rest of a round have taken so long."""
    for mean, seconds in ((item._round_times.steps_s, steps_s), (item._round_times.rest_s, rest_s)):
        mean.restart()
        mean.observe(seconds, is_certain=True)


def test_the_model_does_not_draft_where_what_was_found_is_worth_enough() -> None:
    main = Scripted(5, 5, 5, 5)
    item = drafter(main)
    take(item, 0.1, 0.01)
    found = round_of(item, REPEATING)
    assert set(paths(found.nodes).values()) == {"suffix"}
    assert (main.num_steps, found.took_steps) == (0, False)
    # Under rejection it always does.
    assert "eagle3" in paths(round_of(item, (*REPEATING, 6, 7), given=REJECTION).nodes).values()


def test_the_model_drafts_again_where_what_is_found_is_wrong() -> None:
    main = Scripted(5, 5, 5, 5)
    item = drafter(main)
    text = list(REPEATING)
    for num_rounds in range(60):
        take(item, 0.01, 0.02)
        found = round_of(item, text)
        if main.num_steps:
            break
        # Each time something else follows.
        news = [100 + num_rounds, 200 + num_rounds]
        text += news
        assert not item.advance(found, news)
        item.end(found)
        text += list(REPEATING)
    assert 3 < num_rounds < 59


def test_ahead_of_verdicts_it_goes_on_below_the_text_with_new_nodes_of_both() -> None:
    item, tokens = drafter(), list(REPEATING)
    found = OpenProposal("s", tokens, GREEDY, 2, lookahead=12)
    for _ in range(8):
        item.step([found])
    assert 0 < len(found.nodes) <= 12
    first = next(node for node in found.nodes if "model" in node.drafter)
    tokens.append(first.token_id)
    assert item.advance(found, [first.token_id])
    num = len(found.nodes)
    for _ in range(8):
        item.step([found])
    assert len(found.nodes) > num
    paths(found.nodes)
    # The text leaves the tree: another one begins.
    other = next(number for number in range(24) if (first.token_id, number) not in paths(found.nodes))
    tokens.append(other)
    assert not item.advance(found, [other])


def test_ahead_of_verdicts_under_rejection_the_model_is_alone() -> None:
    item = drafter()
    found = OpenProposal("s", REPEATING, REJECTION, 2, lookahead=8)
    for _ in range(8):
        item.step([found])
    assert found.nodes
    assert set(paths(found.nodes).values()) == {"model"}


def test_it_waits_for_the_features_that_the_head_waits_for() -> None:
    main = Scripted(5, 5, 5, 5)
    item, found = drafter(main), proposal(REPEATING, 4, given=GREEDY)
    main.missing_from = 7
    item.step([found])
    assert found.missing_features_from == 7
    item.give("s", Features(7, torch.empty(0, 16, dtype=torch.bfloat16)))
    found.missing_features_from = None
    while not found.complete:
        item.step([found])
    assert {"eagle3", "suffix"} <= set(paths(found.nodes).values())


def test_where_the_model_refuses_what_was_found_is_proposed() -> None:
    main = Scripted(5)
    main.refuses = True
    found = round_of(drafter(main), REPEATING)
    assert found.refusal is None
    assert set(paths(found.nodes).values()) == {"suffix"}
    nothing = round_of(drafter(main), (1, 2, 3))
    assert isinstance(nothing.refusal, Overloaded)


def test_sessions_are_drafted_for_together() -> None:
    model = RecordedModel(markov())
    item = drafter(model_drafter(model))
    proposals = [proposal((*REPEATING, number), 3, str(number), GREEDY) for number in range(4)]
    draft(item, *proposals)
    assert max(map(len, model.passes)) == 4
    assert all(paths(found.nodes) for found in proposals)


def test_a_session_is_forgotten_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    main = Scripted(5, 5, 5, 5)
    item = drafter(main)
    found = round_of(item, REPEATING)
    assert item.used_bytes > 0
    item.end(found)
    item.forget("s")
    assert (item.used_bytes, main.forgotten, len(item._sessions)) == (0, ["s"], 0)
    # A proposal whose state is gone stands as it is.
    found = OpenProposal("a", REPEATING, GREEDY, 2, lookahead=8)
    item = drafter()
    item.step([found])
    assert found.nodes and not found.complete
    item.forget("a")
    item.step([found])
    assert found.complete
    assert not item.advance(found, [1])


def test_sessions_that_draft_are_kept_and_idle_ones_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combined, "_MAX_SESSIONS", 2)
    item = drafter()
    proposals = [proposal(REPEATING, 2, str(number), GREEDY) for number in range(5)]
    draft(item, *proposals)
    assert all(found.nodes for found in proposals)
    for found in proposals:
        item.end(found)
    round_of(item, REPEATING)
    assert len(item._sessions) <= 5
    for number in range(8):
        found = proposal(REPEATING, 2, f"later {number}", GREEDY)
        draft(item, found)
        item.end(found)
    assert len(item._sessions) <= 5


def test_a_text_for_which_there_is_no_room_leaves_the_model_alone() -> None:
    main = Scripted(5, 5, 5, 5)
    item = CombinedDrafter(main, suffix(budget_bytes=1 << 16))
    texts = [[(number * 31 + place * 7) % 997 for place in range(3000)] for number in range(3)]
    for _ in range(3):
        proposals = [proposal(text, 4, str(number), GREEDY) for number, text in enumerate(texts)]
        draft(item, *proposals)
        assert all([node.token_id for node in found.nodes][:1] == [5] for found in proposals)
        for found in proposals:
            item.end(found)
    assert item.used_bytes <= 1 << 16


def test_a_refusal_is_of_its_round_alone() -> None:
    main = Scripted(6, 7, 8, 9)
    item, tokens = drafter(main), list(REPEATING)
    found = OpenProposal("s", tokens, GREEDY, 4)
    main.refuses = main.goes_on = True
    draft(item, found)
    assert found.refusal is None
    tokens.append(6)
    assert not item.advance(found, [6])
    item.end(found)
    main.refuses = False
    again = OpenProposal("s", tokens, GREEDY, 4)
    draft(item, again)
    assert again.refusal is None


def test_ahead_of_verdicts_under_rejection_it_goes_on_as_the_model_does() -> None:
    item, tokens = drafter(), list(REPEATING)
    found = OpenProposal("s", tokens, REJECTION, 2, lookahead=8)
    for _ in range(10):
        item.step([found])
        number, drafted = 0, []
        for place, node in enumerate(found.nodes, start=1):
            if node.parent == number and node.kind is NodeKind.DRAFTED:
                number, drafted = place, [*drafted, node.token_id]
        news = drafted[len(tokens) - len(REPEATING) :][:1]
        if not news:
            continue
        tokens += news
        assert item.advance(found, news)
    assert len(tokens) > len(REPEATING) + 4
    # Once it waits, texts are looked up, and what follows is another tree.
    found.lookahead = 0
    item.step([found])
    assert len(paths(found.nodes)) == len(found.nodes)


def test_a_model_that_takes_many_steps_sends_what_is_here() -> None:
    item = drafter()
    found = proposal(REPEATING, 6, given=GREEDY)
    sent = []
    while not found.complete:
        item.step([found])
        sent.append(len(found.nodes))
    assert 0 < sent[0] < sent[-1]
    # A bound leaves room for the best only, which are known at the end.
    found = proposal(REPEATING, 6, "bounded", GREEDY)
    found.max_nodes = 7
    item.step([found])
    assert not found.nodes
    draft(item, found)
    assert len(found.nodes) == 7


@pytest.mark.parametrize("rule", [AcceptanceRule.COUPLED, AcceptanceRule.REJECTION])
def test_settings_load_it(rule: AcceptanceRule) -> None:
    options = DrafterOptions(drafter=DrafterKind("model+suffix"), model=MARKOV, kv_budget_bytes=1 << 20)
    item = load_drafter(options)
    assert item.info.drafter == "model+suffix"
    given = terms(SamplingParameters(seed=5, max_tokens=10_000), rule)
    found = paths(round_of(item, REPEATING, given=given).nodes)  # type: ignore[arg-type]
    assert any("suffix" in name for name in found.values())
    assert any("model" in name for name in found.values())
