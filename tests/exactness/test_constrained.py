"""The output of a constrained target, summed over all outcomes, is the target's within the constraint at each position.

The constraint decides by a real grammar over single bytes, and every round is judged as the engine judges it. Drafts
know the constraint, or do not.
"""

import pytest
import torch
from torch import Tensor

from outrider.constraint import Constraint
from outrider.errors import ConstraintFailed
from outrider.grammar.compilation import compiled, load_tokenizer
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.matcher import OutputMatcher
from outrider.lm.byte_tokenizer import EOS, VOCABULARY_SIZE, byte_tokenizer
from outrider.lm.tokenizer import TOKENIZER_NAME
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.speculation.verification import DecisionSource, draft_rejection, verify_rejection
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree, SparseDistribution
from target_service.engine.constraints import Constraints, Offered
from target_service.engine.request import Request
from target_service.engine.request_constraint import RequestConstraint
from target_service.engine.rounds import Round, decide_all
from tests.exactness.judged import MAX_LEN, request_of
from tests.exactness.models import Text, total_variation
from tests.exactness.sources import every_run
from tests.repetition import seeds

A, B, C, D = 64, 65, 66, 67
TOLERANCE = 1e-12
REGEX = "a[bc]|b(a|cb?)|cab"
_TOKENIZER = load_tokenizer(byte_tokenizer().files[TOKENIZER_NAME].decode(), VOCABULARY_SIZE, [EOS])
_GRAMMAR = compiled(Constraint(regex=REGEX), _TOKENIZER)


class Grammar:
    """A grammar that is compiled already."""

    is_ready = True

    def __init__(self) -> None:
        self.matcher = OutputMatcher(_GRAMMAR.deep_copy)


def logits_of(seed: int) -> Tensor:
    """Return the logits after each token, and at the beginning: [V + 1, V]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCABULARY_SIZE + 1, VOCABULARY_SIZE, generator=generator, dtype=torch.float64) * 1.5


def rows_after(logits: Tensor, text: Text, tree: ProposalTree) -> Tensor:
    last = text[-1] if text else VOCABULARY_SIZE
    return logits[[last, *(node.token_id for node in tree.nodes)]]


def allowed_after(text: Text) -> list[int]:
    matcher = _GRAMMAR.deep_copy()
    assert not text or matcher.consume_tokens(list(text))
    mask = matcher.compute_bitmask()
    return [token_id for token_id in range(VOCABULARY_SIZE) if mask[token_id // 8] >> token_id % 8 & 1]


def wanted(logits: Tensor) -> dict[Text, float]:
    """Return the probability of each output: at every position the target's, among the tokens that are allowed."""
    found: dict[Text, float] = {}
    open_texts: list[tuple[Text, float]] = [((), 1.0)]
    for text, weight in open_texts:
        token_ids = allowed_after(text)
        row = logits[text[-1] if text else VOCABULARY_SIZE]
        for token_id, share in zip(token_ids, row[token_ids].softmax(0).tolist(), strict=True):
            longer = (*text, token_id)
            if token_id == EOS:
                found[longer] = weight * share
            else:
                open_texts.append((longer, weight * share))
    return found


def drafted(logits: Tensor, text: Text, source: DecisionSource, *, knows: bool, num: int = 2) -> ProposalTree:
    """Draft a chain, and guess beside its first token; a draft that knows the constraint samples what is allowed."""
    tree, number = ProposalTree(), ROOT
    for _ in range(num):
        path = (*text, *(tree.node(node).token_id for node in tree.path(number)))
        token_ids = allowed_after(path) if knows else [A, B, C, D]
        weights = torch.zeros(VOCABULARY_SIZE, dtype=torch.float64)
        weights[token_ids] = logits[path[-1] if path else VOCABULARY_SIZE][token_ids].softmax(0)
        token_id = draft_rejection(weights, len(text), len(path), source, ROOT)
        sparse = SparseDistribution(tuple(token_ids), tuple(weights[token_ids].tolist()))
        number = tree.append(ProposalNode(number, token_id, NodeKind.DRAFTED, sparse))
        if token_id == EOS:
            break
    for token_id in (A, C):
        if tree.child(ROOT, token_id) is None:
            tree.append(ProposalNode(ROOT, token_id, NodeKind.GUESSED))
    return tree


def round_of(text: Text, tree: ProposalTree, logits: Tensor, source: DecisionSource) -> Text:
    """Judge a round as the engine does: masks before the pass, then `decide_all`."""
    parameters = SamplingParameters(max_tokens=50, constraint=Constraint(regex=REGEX))
    request: Request = request_of(list(text), parameters, AcceptanceRule.REJECTION, stop_token_ids={EOS}, source=source)
    request.constraint = RequestConstraint(Grammar(), request, (EOS,))  # type: ignore[arg-type]
    request.constraint.follow()
    [(kept, masks)] = Constraints(None, VOCABULARY_SIZE, (EOS,)).masked([Offered(request, tree)])
    [result] = decide_all([Round(request, 0, kept, masks)], rows_after(logits, text, kept), MAX_LEN)
    return result.token_ids


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_the_output_follows_the_target_within_the_constraint(seed: int, knows: bool) -> None:
    target, draft = logits_of(seed), logits_of(seed + 100)
    open_texts: dict[Text, float] = {(): 1.0}
    finished: dict[Text, float] = {}
    while open_texts:
        text = min(open_texts, key=len)
        weight = open_texts.pop(text)

        def one_round(source: DecisionSource, text: Text = text) -> Text:
            return round_of(text, drafted(draft, text, source, knows=knows), target, source)

        for token_ids, probability in every_run(one_round):
            longer = (*text, *token_ids)
            texts = finished if longer[-1] == EOS else open_texts
            texts[longer] = texts.get(longer, 0.0) + weight * probability
    assert total_variation(finished, wanted(target)) < TOLERANCE


def test_a_drafted_token_that_is_withheld_for_the_constraint_would_show() -> None:
    """The proof has power: leaving out a drafted token because it is not allowed changes the distribution."""
    target, draft = logits_of(0), logits_of(100)
    found: dict[Text, float] = {}

    def one_round(source: DecisionSource) -> Text:
        tree = drafted(draft, (), source, knows=False, num=1)
        if tree.nodes[0].token_id == D:
            tree = ProposalTree()
        return round_of((), tree, target, source)[:1]

    for token_ids, probability in every_run(one_round):
        found[token_ids] = found.get(token_ids, 0.0) + probability
    first: dict[Text, float] = {}
    for text, probability in wanted(target).items():
        first[text[:1]] = first.get(text[:1], 0.0) + probability
    assert total_variation(found, first) > 0.01


@pytest.mark.parametrize("seed", seeds(3, 20))
def test_a_chain_ends_with_a_node_that_nothing_can_follow(seed: int) -> None:
    """Nothing can follow token 0: it is output as often as the target would, whatever was drafted below it."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = (torch.rand(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    target, draft = (rows / rows.sum(dim=1, keepdim=True) for rows in (target, draft))

    def one_round(source: DecisionSource) -> Text:
        tree, number, last = ProposalTree(), ROOT, 3
        for depth in range(3):
            token_id = draft_rejection(draft[last], 0, depth, source, ROOT)
            sparse = SparseDistribution((0, 1, 2), tuple(draft[last].tolist()))
            number, last = tree.append(ProposalNode(number, token_id, NodeKind.DRAFTED, sparse)), token_id

        def after(number: int) -> Tensor:
            last = 3 if number == ROOT else tree.node(number).token_id
            if last == 0:
                raise ConstraintFailed("nothing can follow")
            return target[last]

        return verify_rejection(tree, after, 0, source).token_ids

    found: dict[Text, float] = {}
    for token_ids, probability in every_run(one_round):
        # What the round did not output is the target's in the next one.
        rest = [(token_ids[:2], 1.0)]
        if len(token_ids) == 1 and token_ids != (0,):
            rest = [((*token_ids, token_id), float(target[token_ids[0]][token_id])) for token_id in range(3)]
        for text, share in rest:
            found[text] = found.get(text, 0.0) + probability * share
    law = {(0,): float(target[3][0])}
    law |= {(a, b): float(target[3][a] * target[a][b]) for a in (1, 2) for b in range(3)}
    assert total_variation(found, law) < TOLERANCE


def test_a_drafted_token_beyond_a_bound_is_judged_by_its_distribution() -> None:
    """After `aa` the library reaches a bound: plain decoding fails there, and a draft gets there no more often."""
    weights = torch.full((VOCABULARY_SIZE,), -torch.inf, dtype=torch.float64)
    weights[[A, B, C]] = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logits = weights.expand(VOCABULARY_SIZE + 1, -1).clone()
    logits[:, EOS] = logits[:, A]
    support = (A, B, C)
    compiler = GrammarCompiler(byte_tokenizer().files[TOKENIZER_NAME].decode(), VOCABULARY_SIZE, [EOS])
    constraint = Constraint(regex="a{60000}|[bc]")
    num_anew = 0

    def one_round(source: DecisionSource) -> Text:
        nonlocal num_anew
        tree = ProposalTree()
        shares = torch.zeros(VOCABULARY_SIZE, dtype=torch.float64)
        shares[list(support)] = torch.tensor([0.6, 0.1, 0.3], dtype=torch.float64)
        for position in range(2):
            token_id = draft_rejection(shares, 0, position, source, ROOT)
            sparse = SparseDistribution(support, tuple(shares[list(support)].tolist()))
            tree.append(ProposalNode(position, token_id, NodeKind.DRAFTED, sparse))
        tree.append(ProposalNode(ROOT, EOS, NodeKind.GUESSED))
        request = request_of(
            [],
            SamplingParameters(max_tokens=50, constraint=constraint),
            AcceptanceRule.REJECTION,
            stop_token_ids={EOS},
            source=source,
        )
        made = Constraints(compiler, VOCABULARY_SIZE, (EOS,))
        made.attach(request, made.begin(request.parameters), lambda: None)
        own = request.constraint
        assert own is not None and own.grammar.matcher
        own.follow()
        [found] = made.masked([Offered(request, tree)])
        if found is None:
            num_anew += 1
            assert own.grammar.matcher and not own.takes_proposals
            own.follow()
            [found] = made.masked([Offered(request, ProposalTree())])
            assert found is not None
        [result] = decide_all([Round(request, 0, *found)], rows_after(logits, (), found[0]), MAX_LEN)
        return result.token_ids[:1]

    found: dict[Text, float] = {}
    try:
        for token_ids, probability in every_run(one_round):
            found[token_ids] = found.get(token_ids, 0.0) + probability
    finally:
        compiler.close()
    assert num_anew
    assert total_variation(found, {(A,): 0.2, (B,): 0.5, (C,): 0.3}) < TOLERANCE
