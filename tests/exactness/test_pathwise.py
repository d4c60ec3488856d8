"""Under `coupled` the output equals that of plain decoding, token by token, whatever was proposed.

All tests run `decide_all`, as the target's engine calls it: logits in, results out, with keyed noise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.speculation.randomness import Counter, KeyedSource, Purpose
from outrider.speculation.sampling import SamplingMetadata, TokenHistory, target_distribution
from outrider.speculation.verification import draft_coupled
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree
from target_service.engine.results import RoundResult
from target_service.engine.rounds import Round, decide_all
from tests.exactness.checks import PathError
from tests.exactness.judged import MAX_LEN, Judge, judge, request_of
from tests.exactness.models import PAIRS, MarkovChain, Text, V, random_chain

MAX_NODES = 6
PREFIX: Text = (2, 0, 1)

Forest = tuple["Forest | None", ...]
"""A node as its children: one element per token id."""


def forests(num_nodes: int) -> Iterator[Forest]:
    """Yield every node with this number of nodes below it."""
    yield from _children(num_nodes, V)


def _children(num_nodes: int, num_places: int) -> Iterator[Forest]:
    if num_places == 0:
        if num_nodes == 0:
            yield ()
        return
    for rest in _children(num_nodes, num_places - 1):
        yield (None, *rest)
    for num_below in range(num_nodes):
        for child in forests(num_below):
            for rest in _children(num_nodes - 1 - num_below, num_places - 1):
                yield (child, *rest)


def tree_of(forest: Forest) -> ProposalTree:
    tree = ProposalTree()

    def grow(parent: int, node: Forest) -> None:
        for token_id, child in enumerate(node):
            if child is not None:
                grow(tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED)), child)

    grow(ROOT, forest)
    return tree


TREES = [tree_of(forest) for num_nodes in range(MAX_NODES + 1) for forest in forests(num_nodes)]

PARAMETERS = [
    SamplingParameters(seed=1),
    SamplingParameters(seed=2, temperature=0.7, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=-0.5),
    SamplingParameters(seed=3, top_k=2, temperature=1.5),
    SamplingParameters(seed=2**64 - 1, top_p=0.8, frequency_penalty=1.0),
    SamplingParameters(seed=5, min_p=0.3, logit_bias={1: 0.5}),
    SamplingParameters(seed=6, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.7),
]
"""Noise, temperature, penalties that differ between branches, and each kind of truncation."""


@dataclass
class AnyLogits:
    """A model that depends on the whole text: logits for each text of up to `MAX_NODES` tokens after the prefix."""

    seed: int
    rows: dict[Text, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.logits = torch.randn(sum(V**num for num in range(MAX_NODES + 1)), V, generator=generator)

    def row(self, prefix: Text) -> int:
        """Return the row of `logits` after these tokens."""
        return self.rows.setdefault(prefix, len(self.rows))


def plain_decoding(model: AnyLogits, parameters: SamplingParameters) -> Text:
    """Return the tokens of plain decoding, picked from the target's distributions one by one."""
    text = PREFIX
    while len(text) <= len(PREFIX) + MAX_NODES:
        prefix = text[len(PREFIX) :]
        history = TokenHistory(PREFIX, prefix, parameters)
        distribution = target_distribution(model.logits[model.row(prefix)], SamplingMetadata(parameters, history, ()))
        text = (*text, KeyedSource(parameters.seed or 0).pick(distribution, Counter(Purpose.TARGET, len(text))))
    return text[len(PREFIX) :]


def check_trees(model: AnyLogits, trees: Sequence[ProposalTree], judges: Judge, num_cases: int = 1) -> None:
    """Raise `PathError` unless every round outputs the tokens of plain decoding, as far as they were proposed.

    All rounds are decided in one pass. A tree is tested with `num_cases` of `PARAMETERS`, in turn.
    """
    plain = {parameters.seed: plain_decoding(model, parameters) for parameters in PARAMETERS}
    rounds: list[Round] = []
    rows: list[int] = []
    for number, tree in enumerate(trees):
        own = [model.row(())] + [model.row(_tokens(tree, node)) for node in range(1, 1 + len(tree))]
        for case in range(num_cases):
            parameters = PARAMETERS[(number + case) % len(PARAMETERS)]
            rounds.append(Round(request_of(PREFIX, parameters, prompt_len=len(PREFIX)), len(rows), tree))
            rows += own
    results = judges(rounds, model.logits[rows], MAX_LEN)
    for item, result in zip(rounds, results, strict=True):
        path = _path(item.tree, plain[item.request.parameters.seed])
        expected = plain[item.request.parameters.seed][: len(path) + 1]
        if (result.token_ids, result.kept_path) != (expected, path):
            raise PathError(f"{result.token_ids} in place of {expected} with {item.tree}")


def _tokens(tree: ProposalTree, number: int) -> Text:
    return tuple(tree.node(node).token_id for node in tree.path(number))


def _path(tree: ProposalTree, plain: Text) -> tuple[int, ...]:
    """Return the nodes of the tokens of plain decoding, as far as they were proposed."""
    path: list[int] = []
    while (child := tree.child(path[-1] if path else ROOT, plain[len(path)])) is not None:
        path.append(child)
    return tuple(path)


def test_every_small_tree_is_there() -> None:
    # Ternary trees with 1 to 7 nodes, the root among them: binomial(3n, n) / (2n + 1).
    assert len(TREES) == 1 + 3 + 12 + 55 + 273 + 1428 + 7752
    assert len({tuple((node.parent, node.token_id) for node in tree.nodes) for tree in TREES}) == len(TREES)


def test_every_small_tree_gives_plain_decodings_tokens() -> None:
    check_trees(AnyLogits(0), TREES, decide_all)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_every_small_tree_gives_plain_decodings_tokens_under_all_parameters(seed: int) -> None:
    check_trees(AnyLogits(seed), TREES, decide_all, num_cases=len(PARAMETERS))


def test_rounds_without_proposals_are_plain_decoding() -> None:
    model = AnyLogits(0)
    for parameters in PARAMETERS:
        plain = plain_decoding(model, parameters)
        request = request_of(PREFIX, parameters, prompt_len=len(PREFIX))
        for num in range(MAX_NODES + 1):
            result = judge(request, model.logits[[model.row(plain[:num])]], ProposalTree())
            assert result.token_ids == plain[num : num + 1]
            request.resident.token_ids += result.token_ids


def noise_by_base(rounds: Sequence[Round], logits: Tensor, max_len: int) -> list[RoundResult]:
    """Count positions from the base, so that the noise depends on the rounds."""
    return decide_all([_with_request(item, _without_tokens(item)) for item in rounds], logits, max_len)


def _without_tokens(item: Round) -> dict[str, object]:
    return {"resident": replace(item.request.resident, token_ids=[]), "prompt_len": 0}


def by_rejection(rounds: Sequence[Round], logits: Tensor, max_len: int) -> list[RoundResult]:
    """Decide with the target's distribution, but not with its draws."""
    return decide_all([_with_request(item, {"rule": AcceptanceRule.REJECTION}) for item in rounds], logits, max_len)


def rows_of_the_node_before(rounds: Sequence[Round], logits: Tensor, max_len: int) -> list[RoundResult]:
    """Use the row of each node for the next one."""
    return decide_all(rounds, logits.roll(1, 0), max_len)


def history_of_the_base(rounds: Sequence[Round], logits: Tensor, max_len: int) -> list[RoundResult]:
    """Omit a branch's own tokens from its penalties."""

    def histories(item: Round) -> list[TokenHistory]:
        return [TokenHistory(PREFIX, (), item.request.parameters)] * (1 + len(item.tree))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("target_service.engine.rounds._histories", histories)
        return decide_all(rounds, logits, max_len)


def _with_request(item: Round, changes: dict[str, object]) -> Round:
    return item._replace(request=replace(item.request, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [noise_by_base, by_rejection, rows_of_the_node_before, history_of_the_base])
def test_other_rules_do_not_pass(wrong: Judge) -> None:
    trees = TREES[:: len(TREES) // 200]
    check_trees(AnyLogits(0), trees, decide_all)
    with pytest.raises(PathError):
        check_trees(AnyLogits(0), trees, wrong)


@dataclass
class Session:
    """A session whose draft uses the target's noise."""

    pair: tuple[MarkovChain, MarkovChain]
    num: int
    width: int
    seed: int

    def __post_init__(self) -> None:
        self.source = KeyedSource(self.seed)
        self.request = request_of((), SamplingParameters(seed=self.seed))

    @property
    def text(self) -> Text:
        return tuple(self.request.resident.token_ids)

    def tree(self) -> ProposalTree:
        """Return a chain of the draft's draws, with its next choices as siblings."""
        tree, number = ProposalTree(), ROOT
        for _ in range(self.num):
            prefix = (*self.text, *_tokens(tree, number))
            first, *others = _ranked(self.pair[1].distribution(prefix), len(prefix), self.source)[: self.width]
            parent, number = number, tree.append(ProposalNode(number, first))
            for token_id in others:
                tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED))
        return tree

    def logits(self, tree: ProposalTree) -> Tensor:
        """Return the target's logits after the text, and after each node."""
        target = self.pair[0]
        return torch.stack(
            [target.distribution((*self.text, *_tokens(tree, node))).log() for node in range(1 + len(tree))]
        )


def _ranked(distribution: Tensor, position: int, source: KeyedSource) -> list[int]:
    """Return the tokens that a draft can propose, ranked by its distribution and the target's noise."""
    scores = distribution / source.exponential(torch.arange(V), Counter(Purpose.TARGET, position))
    ranked = [token_id for token_id in scores.argsort(descending=True).tolist() if distribution[token_id] > 0]
    assert ranked[0] == draft_coupled(distribution, position, source)
    return ranked


def run(sessions: Sequence[Session], num: int) -> list[RoundResult]:
    """Generate at least `num` tokens in each session, batched in passes; return all results."""
    results: list[RoundResult] = []
    while any(len(session.text) < num for session in sessions):
        trees = [session.tree() for session in sessions]
        logits = [session.logits(tree) for session, tree in zip(sessions, trees, strict=True)]
        starts = torch.tensor([0] + [len(rows) for rows in logits]).cumsum(0).tolist()
        rounds = [Round(*parts) for parts in zip((one.request for one in sessions), starts, trees, strict=False)]
        found = decide_all(rounds, torch.cat(logits), MAX_LEN)
        for session, result in zip(sessions, found, strict=True):
            session.request.resident.token_ids += result.token_ids
        results += found
    return results


@cache
def plain_text(pair: str, seed: int) -> Text:
    """Return the text of plain decoding, picked from the target's distributions."""
    text: Text = ()
    source = KeyedSource(seed)
    while len(text) < MAX_LEN:
        text = (*text, source.pick(PAIRS[pair][0].distribution(text), Counter(Purpose.TARGET, len(text))))
    return text


SHAPES = [(0, 1), (1, 1), (1, 2), (4, 1), (4, 2)]
"""Length of a chain, and number of the draft's choices at each of its positions."""


def test_generations_of_many_rounds_are_plain_decoding() -> None:
    given = [(pair, num, width, seed) for pair in PAIRS for num, width in SHAPES for seed in (0, 1)]
    cases = [(pair, Session(PAIRS[pair], num, width, seed)) for pair, num, width, seed in given]
    run([session for _, session in cases], 12)
    for pair, session in cases:
        assert session.text == plain_text(pair, session.seed)[: len(session.text)]


def test_a_draft_that_is_the_target_is_always_right() -> None:
    target = random_chain(1)
    results = run([Session((target, target), 4, 1, seed) for seed in range(20)], 1)
    assert {result.num_accepted for result in results} == {4}
