"""Drafting ahead of the text: what becomes a node, that each continues its own path, and nothing is run twice."""

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import product

import pytest
import torch

from outrider.drafters.choices import Choice, Place
from outrider.drafters.drafter import OpenProposal
from outrider.drafters.model import ModelDrafter
from outrider.drafters.node_values import NodeValues, least_value
from outrider.drafters.tree import DraftTree
from outrider.drafters.tree_order import URGENCY, Node, NodeOrder
from outrider.parameters import REPLAYABLE_RULES, AcceptanceRule, SamplingParameters
from outrider.speculation.proposal_tree import Lookahead
from outrider.speculation.randomness import Counter, KeyedSource, Purpose
from outrider.tokens import NodeKind
from tests.draft_service.conftest import terms
from tests.drafters.models import MARKOV, ByLikelihood, RecordedModel, markov, model_drafter

GREEDY = SamplingParameters(temperature=0, max_tokens=10_000)
SAMPLED = SamplingParameters(seed=11, max_tokens=10_000)
BUDGET = 24


TABLE = markov()


def _proposal(
    token_ids: list[int], parameters: SamplingParameters = GREEDY, rule: AcceptanceRule = AcceptanceRule.COUPLED
) -> OpenProposal:
    found = OpenProposal("s", token_ids, terms(parameters, rule), 4)
    found.lookahead = BUDGET
    return found


def _finish(drafter: ModelDrafter, proposal: OpenProposal) -> None:
    for _ in range(200):
        if proposal.complete:
            return
        drafter.step([proposal])
    raise AssertionError("the drafter does not come to an end")


def _go_on(drafter: ModelDrafter, proposal: OpenProposal, token_ids: list[int]) -> bool:
    assert isinstance(proposal.token_ids, list)
    proposal.token_ids += token_ids
    return drafter.advance(proposal, token_ids)


def _ranking(token_ids: list[int], parameters: SamplingParameters) -> list[int]:
    """Returns all tokens as the draft ranks them behind these."""
    scores = TABLE.transitions[TABLE.context(token_ids)].log()
    if not parameters.is_greedy:
        scores = scores - KeyedSource(11).exponential(torch.arange(24), Counter(Purpose.TARGET, len(token_ids))).log()
    return scores.argsort(descending=True).tolist()


def _check(proposal: OpenProposal, planted: list[int], parameters: SamplingParameters) -> None:
    """Checks that the children of each node are the best of the ranking behind its own path."""
    paths: dict[int, list[int]] = {0: []}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(proposal.nodes, 1):
        paths[number] = [*paths[node.parent], node.token_id]
        children[node.parent].append(node.token_id)
    for parent, found in children.items():
        assert found == _ranking([*planted, *paths[parent]], parameters)[: len(found)]


@pytest.mark.parametrize("parameters", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(3))
def test_each_node_continues_its_own_path_however_the_text_goes_on(parameters: SamplingParameters, seed: int) -> None:
    draw = random.Random(seed)
    drafter, planted = model_drafter(), [4, 7, 1]
    proposal = _proposal(list(planted), parameters)
    tree = Lookahead(3)
    num_followed = 0
    for _ in range(20):
        for _ in range(draw.randrange(1, 6)):
            if not proposal.complete:
                drafter.step([proposal])
        for node in proposal.nodes[tree.num_numbered :]:
            tree.add(node)
        number, path = tree.root, []
        for _ in range(draw.randrange(1, 5)):
            if below := tree.children(number):
                number = draw.choice(below)
                path.append(tree.node(number).token_id)
        if not path:
            continue
        tree.follow(path)
        assert _go_on(drafter, proposal, path)
        num_followed += len(path)
        _check(proposal, planted, parameters)
    assert num_followed > 20


def test_the_best_of_an_endless_tree_are_made_and_no_others() -> None:
    drafter, proposal = model_drafter(), _proposal([4, 7, 1], SAMPLED, AcceptanceRule.REJECTION)
    _finish(drafter, proposal)
    assert BUDGET - 1 <= len(proposal.nodes) <= BUDGET
    fresh, values = NodeValues.of_one_session(), {0: (1.0, 0)}
    ranks: defaultdict[int, int] = defaultdict(int)
    for number, node in enumerate(proposal.nodes, 1):
        ranks[node.parent] += 1
        value, depth = values[node.parent]
        values[number] = (URGENCY * value * fresh.ranks(depth + 1)[ranks[node.parent] - 1], depth + 1)
    least = least_value(lambda depth: [URGENCY * value for value in fresh.ranks(depth)], 0, BUDGET)
    assert min(value for value, _ in values.values()) >= least - 1e-12
    beside = [sum(1 for node in proposal.nodes if node.parent == number) for number in _main_line(proposal)]
    assert beside == sorted(beside, reverse=True), "fewer alternatives the deeper"
    assert beside[0] >= 3 and len(beside) > 6


def _main_line(proposal: OpenProposal) -> list[int]:
    first = {}
    for number, node in enumerate(proposal.nodes, 1):
        first.setdefault(node.parent, number)
    line, number = [], 0
    while number in first:
        line.append(number)
        number = first[number]
    return line


def test_nothing_is_run_twice_and_passes_stay_small() -> None:
    model = RecordedModel(markov())
    drafter = model_drafter(model)
    proposal = _proposal([4, 7, 1])
    _finish(drafter, proposal)
    assert model.passes[0] == [3]
    assert all(rows == [1] * len(rows) for rows in model.passes[1:])
    num_run = sum(len(rows) for rows in model.passes[1:])
    assert num_run <= len(proposal.nodes)
    line = [proposal.nodes[number - 1].token_id for number in _main_line(proposal)[1:4]]
    model.passes.clear()
    assert _go_on(drafter, proposal, line)
    _finish(drafter, proposal)
    assert all(rows == [1] * len(rows) for rows in model.passes), "what the text went along is not run again"


def test_an_awaited_line_grows_in_every_step_beside_sessions_with_better_nodes() -> None:
    drafter = model_drafter(markov(f"{MARKOV},row_s=0.001,padding=4"), chunk=4)
    others = [_proposal([4, 7, number]) for number in range(16)]
    for number, other in enumerate(others):
        other.session_id, other.num_speculative_tokens, other.lookahead = f"other {number}", 1, 64
    for _ in range(3):
        drafter.step(others)
    late = _proposal([9, 9, 9])
    lengths = []
    while len(_main_line(late)) < late.num_speculative_tokens:
        drafter.step([late, *(other for other in others if not other.complete)])
        lengths.append(len(_main_line(late)))
    assert lengths == [1, 2, 3, 4]


@pytest.mark.parametrize("budget", [4, 8, 12, 24, 64])
@pytest.mark.parametrize("rule", REPLAYABLE_RULES)
def test_no_more_nodes_are_live_than_are_allowed(rule: AcceptanceRule, budget: int) -> None:
    draw = random.Random(0)
    drafter, proposal = model_drafter(), _proposal([4, 7, 1], SAMPLED, rule)
    proposal.lookahead = budget
    seen, num_followed = Lookahead(3), 0
    for _ in range(40):
        for _ in range(draw.randrange(1, 9)):
            if not proposal.complete:
                drafter.step([proposal])
        for node in proposal.nodes[seen.num_numbered :]:
            seen.add(node)
        assert len(seen) <= budget
        if not (below := seen.children(seen.root)):
            continue
        token_id = seen.node(draw.choice([below[0], draw.choice(below)])).token_id
        seen.follow([token_id])
        assert _go_on(drafter, proposal, [token_id])
        num_followed += 1
    assert num_followed > 20


def test_a_text_that_takes_another_way_has_a_new_tree_planted() -> None:
    model = RecordedModel(markov())
    drafter = model_drafter(model)
    proposal = _proposal([4, 7, 1])
    _finish(drafter, proposal)
    first = proposal.nodes[0].token_id
    unlikely = _ranking([4, 7, 1, first], GREEDY)[-1]
    assert not _go_on(drafter, proposal, [first, unlikely])
    drafter.end(proposal)
    model.passes.clear()
    other = _proposal([4, 7, 1, first, unlikely])
    _finish(drafter, other)
    assert model.passes[0] == [1], "of the text only the last token is new"
    _check(other, [4, 7, 1, first, unlikely], GREEDY)


def test_under_rejection_a_sampled_child_comes_first_with_its_law_whatever_it_is() -> None:
    drafter = model_drafter()
    proposal = _proposal([4, 7, 1], SAMPLED, AcceptanceRule.REJECTION)
    planted = [4, 7, 1]
    _finish(drafter, proposal)
    line = [proposal.nodes[number - 1].token_id for number in _main_line(proposal)[1:3]]
    assert _go_on(drafter, proposal, line)
    _finish(drafter, proposal)
    paths: dict[int, list[int]] = {0: []}
    segments, seen = {0: 0}, set()
    source = KeyedSource(11)
    for number, node in enumerate(proposal.nodes, 1):
        paths[number] = [*paths[node.parent], node.token_id]
        is_first = node.parent not in seen
        seen.add(node.parent)
        assert (node.kind is NodeKind.DRAFTED) == is_first
        segments[number] = segments[node.parent] if is_first else number
        if node.draft_distribution is not None:
            distribution = torch.zeros(24, dtype=torch.float64)
            distribution[list(node.draft_distribution.token_ids)] = torch.tensor(
                node.draft_distribution.probabilities, dtype=torch.float64
            )
            counter = Counter(Purpose.DRAFT, 3 + len(paths[number]) - 1, 3, segments[node.parent])
            assert node.token_id == source.pick(distribution, counter)
            context = [*planted, *paths[node.parent]]
            torch.testing.assert_close(distribution, TABLE.transitions[TABLE.context(context)])
        else:
            assert node.kind is NodeKind.GUESSED


def test_it_ends_where_the_request_does() -> None:
    drafter = model_drafter()
    short = SamplingParameters(temperature=0, max_tokens=4)
    proposal = OpenProposal("s", [4, 7, 1], terms(short, prompt_len=3), 4)
    proposal.lookahead = BUDGET
    _finish(drafter, proposal)
    assert len(_main_line(proposal)) == 4
    assert _go_on(drafter, proposal, [proposal.nodes[0].token_id])
    _finish(drafter, proposal)
    assert len(_main_line(proposal)) == 4


def test_stop_tokens_are_not_continued() -> None:
    stop = _ranking([4, 7, 1], GREEDY)[0]
    drafter = model_drafter()
    proposal = OpenProposal("s", [4, 7, 1], terms(GREEDY, stop_token_ids=[stop]), 4)
    proposal.lookahead = BUDGET
    _finish(drafter, proposal)
    stops = {number for number, node in enumerate(proposal.nodes, 1) if node.token_id == stop}
    assert stops and not any(node.parent in stops for node in proposal.nodes)


def test_branches_give_their_memory_back() -> None:
    model = markov()
    drafter = model_drafter(model)
    proposal = _proposal(list(range(20)))
    _finish(drafter, proposal)
    assert drafter.used_bytes > 0
    drafter.end(proposal)
    assert model.kv_usage.num_held == 2, "the text's pages of 16, and a little of the main line"
    drafter.forget("s")
    assert model.kv_usage.num_held == 0
    assert drafter.used_bytes == 0


def test_a_branch_weighs_the_page_that_it_copies() -> None:
    model = markov()
    drafter = model_drafter(model)
    proposal = _proposal(list(range(20)))
    _finish(drafter, proposal)
    page_bytes = model.new_cache().missing_bytes(1)
    assert drafter.used_bytes == model.kv_usage.num_held * page_bytes, "each page once, and those copied too"


def test_branches_make_room_for_the_text_of_another_session() -> None:
    model = markov()
    page_bytes = model.new_cache().missing_bytes(1)
    drafter = model_drafter(model, kv_budget_bytes=8 * page_bytes)
    first, second = _proposal(list(range(20))), _proposal([7] * 50)
    second.session_id = "t"
    for _ in range(20):
        if drafter.used_bytes < 6 * page_bytes:
            drafter.step([first])
    assert drafter.used_bytes >= 6 * page_bytes
    for _ in range(50):
        drafter.step([item for item in (first, second) if not item.complete] or [second])
        if second.nodes:
            break
    assert second.refusal is first.refusal is None
    assert second.nodes and first.complete


def test_without_memory_for_branches_the_main_line_goes_on() -> None:
    model = markov()
    drafter = model_drafter(model)
    model._pool._num_pages = 4
    proposal = _proposal(list(range(20)))
    _finish(drafter, proposal)
    assert len(_main_line(proposal)) > 4
    _check(proposal, list(range(20)), GREEDY)


def test_an_evicted_tree_is_planted_anew() -> None:
    drafter, proposal = model_drafter(), _proposal([4, 7, 1])
    drafter.step([proposal])
    drafter.step([proposal])
    drafter.forget("s")
    drafter.step([proposal])
    assert proposal.complete
    assert not _go_on(drafter, proposal, [proposal.nodes[0].token_id])


class Made:
    """Choices of a made-up distribution."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def ranked(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        weights = [random.Random(f"{self._seed} {path} {token_id}").random() ** 4 for token_id in range(6)]
        found = [(token_id, weight / sum(weights)) for token_id, weight in enumerate(weights)]
        return sorted(found, key=lambda item: -item[1])

    def after(self, places: Sequence[Place], logits: torch.Tensor, num: int) -> list[list[Choice]]:
        return [[Choice(*item) for item in self.ranked(place.path)[:num]] for place in places]


def test_no_choice_is_worth_more_than_one_that_the_draft_prefers() -> None:
    root = Node(None, 0, Choice(0))
    root.children = [Node(root, 1, Choice(5, 0.3)), Node(root, 2, Choice(6, 0.6)), Node(root, 3, Choice(7, 0.1))]
    order = NodeOrder(_proposal([1, 2, 3]), ByLikelihood.of_one_session())
    found = [(node.token_id, round(value / URGENCY, 6)) for value, node in order.best_first(root, 1)]
    assert found == [(5, 0.3), (6, 0.3), (7, 0.1)]


def _whole(depth: int, max_nodes: int, seed: int, stops: Sequence[int] = ()) -> tuple[list[tuple[int, ...]], int]:
    """Returns the paths of a tree that waits, and the steps that it took."""
    proposal = OpenProposal("s", (1, 2, 3), terms(GREEDY, stop_token_ids=stops), depth, max_nodes)
    tree = DraftTree(proposal, 0, Made(seed), ByLikelihood.of_one_session())
    edge, steps, paths = [tree.root], 0, {0: ()}
    while edge:
        tree.expand(edge, torch.empty(len(edge), 1))
        edge, steps = [node for _, node in tree.frontier()], steps + 1
    for number, node in enumerate(tree.take(), 1):
        paths[number] = (*paths[node.parent], node.token_id)
    return list(paths.values())[1:], steps


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_nodes", [5, 12])
def test_a_tree_that_waits_has_the_best_paths_of_all(seed: int, num_nodes: int) -> None:
    scores: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(1, 5):
        for path in product(range(6), repeat=length):
            scores[path] = scores[path[:-1]] * dict(Made(seed).ranked(path[:-1]))[path[-1]]
    del scores[()]
    paths, steps = _whole(4, num_nodes, seed)
    assert set(paths) == set(sorted(scores, key=lambda path: -scores[path])[:num_nodes])
    assert steps <= 4


def test_as_many_nodes_as_levels_are_a_chain() -> None:
    for max_nodes in (0, 4):
        paths, steps = _whole(4, max_nodes, 1)
        assert [len(path) for path in paths] == [1, 2, 3, 4] and steps == 4


def test_nothing_stands_below_a_stop_token() -> None:
    stop = Made(3).ranked(())[0][0]
    paths, _ = _whole(3, 12, 3, [stop])
    assert (stop,) in paths and not any(stop in path[:-1] for path in paths)
