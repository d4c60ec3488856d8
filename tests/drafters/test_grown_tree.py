"""Trees that are grown natively are those that `tree` grows in steps, and learn as much from the text."""

import functools
import random
from collections.abc import Sequence

import pytest
import torch

from outrider import native
from outrider.drafters.choices import TreeOptions
from outrider.drafters.drafter import DraftTerms, OpenProposal
from outrider.drafters.grown_tree import TreeGrower
from outrider.lm.heads.passes import HeadPasses
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.tokens import ProposalNode
from tests.draft_service.conftest import draft, proposal, terms
from tests.drafters.heads import BLOCK_SIZE, TinyBlock, V
from tests.native.test_product import BEST

pytestmark = pytest.mark.skipif(BEST is None, reason="no native operators here")
VARIANTS = [item for item in native.Variant if BEST is not None and item <= BEST]
NUM_ROUNDS = 12
PARAMETERS = (
    SamplingParameters(temperature=0.0, max_tokens=70),
    SamplingParameters(seed=2**63 + 5, max_tokens=1000),
    SamplingParameters(seed=3, temperature=4.0, max_tokens=1000),
    SamplingParameters(seed=3, temperature=1e-12, max_tokens=1000),
)
GROWN = [terms(item, stop_token_ids=stops) for item in PARAMETERS for stops in ((), (5, 6, 11, 17))]
NOT_GROWN = [
    terms(SamplingParameters(seed=4, top_p=0.5)),
    terms(SamplingParameters(temperature=0.0, presence_penalty=1.5)),
    terms(SamplingParameters(seed=4), AcceptanceRule.REJECTION),
]


@pytest.fixture(params=VARIANTS, ids=lambda item: item.name)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> native.Variant:
    """Each that this CPU can run, which is the best for this test."""
    best = functools.cache(lambda: request.param)
    monkeypatch.setattr(native, "best_variant", best)
    return best()  # type: ignore[no-any-return]


@pytest.fixture
def num_grown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many proposals each call of the operator is for."""
    nums: list[int] = []
    grow = TreeGrower.grow

    def counted(self: TreeGrower, proposals: Sequence[OpenProposal], *rest: object) -> object:
        nums.append(len(proposals))
        return grow(self, proposals, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TreeGrower, "grow", counted)
    return nums


def _drafted(given: Sequence[DraftTerms], tree: TreeOptions, seed: int) -> list[list[ProposalNode]]:
    """Drafts for sessions whose texts go on along the trees, more or less, and returns all proposals' nodes."""
    tiny, draw, found = TinyBlock.make(), random.Random(seed), []
    drafter = tiny.drafter(tree=tree)
    texts = [[draw.randrange(3, V) for _ in range(draw.randint(2, 30))] for _ in given]
    for _ in range(NUM_ROUNDS):
        items = [
            OpenProposal(f"{number}", tuple(text), item, draw.randint(1, BLOCK_SIZE + 1), draw.choice((0, 2, 7, 20)))
            for number, (text, item) in enumerate(zip(texts, given, strict=True))
        ]
        for item in items:
            drafter.give(item.session_id, tiny.span(drafter.resume(item.session_id), len(item.token_ids) - 1))
        draft(drafter, *items)
        for text, item in zip(texts, items, strict=True):
            assert item.refusal is None
            found.append(list(item.nodes))
            news = _continuation(item.nodes, draw)
            text += news
            drafter.advance(item, news)
    return found


def _continuation(nodes: Sequence[ProposalNode], draw: random.Random) -> list[int]:
    """Returns tokens along a path of a tree, and one that may be any."""
    at, token_ids = 0, list[int]()
    while below := [number for number, node in enumerate(nodes, 1) if node.parent == at]:
        if draw.random() < 0.4:
            break
        at = draw.choice(below)
        token_ids.append(nodes[at - 1].token_id)
    return [*token_ids, draw.randrange(3, V)]


@pytest.mark.parametrize("tree", [TreeOptions(), TreeOptions(max_nodes=9), TreeOptions(p_min=0.1)])
@pytest.mark.parametrize("given", [GROWN[:1], GROWN[2:3], GROWN, [*GROWN[:4], *NOT_GROWN]])
def test_trees_are_those_grown_in_steps(
    given: list[DraftTerms],
    tree: TreeOptions,
    variant: native.Variant,
    num_grown: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = _drafted(given, tree, seed=1)
    assert sum(num_grown) == NUM_ROUNDS * sum(item in GROWN for item in given)
    monkeypatch.setattr(TreeGrower, "can_grow", lambda *_: False)
    num_grown.clear()
    assert found == _drafted(given, tree, seed=1)
    assert not num_grown
    assert max(map(len, found)) > BLOCK_SIZE


def test_the_text_s_end_ends_a_tree(num_grown: list[int]) -> None:
    """Of a text of 12 tokens that may have three more, or none."""
    tiny = TinyBlock.make()
    text = tuple(3 + 7 * index % (V - 3) for index in range(12))
    for num, most in ((3, 3), (0, 0)):
        drafter = tiny.drafter()
        drafter.give("s", tiny.span(0, 11))
        found = proposal(text, BLOCK_SIZE, given=terms(SamplingParameters(temperature=0, max_tokens=11 + num)))
        assert len(draft(drafter, found)[0]) == most
    assert num_grown == [1]


def test_a_step_that_fails_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TinyBlock.make()
    drafter = tiny.drafter()
    text = tuple(range(3, 15))
    drafter.give("s", tiny.span(0, 11))
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="broken"):
        patched.setattr(HeadPasses, "columns", _fail)
        drafter.step([proposal(text)])
    drafter.forget("s")
    drafter.give("s", tiny.span(0, 11))
    found = proposal(text)
    drafter.step([found])
    assert found.complete and len(found.nodes) == 4


def _fail(*_: object) -> torch.Tensor:
    raise RuntimeError("broken")
