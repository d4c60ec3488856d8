"""A matcher's masks follow from the output alone, whichever way it came there."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from outrider.constraint import Constraint, StructuralTag, StructuralTags
from outrider.errors import ConstraintFailed
from outrider.grammar.compilation import compiled, load_tokenizer
from outrider.grammar.compiler import token_ids_of
from outrider.grammar.masks import MatchedTree, NodeMasks, allowed_tree, masks_apart, node_masks, token_words
from outrider.grammar.matcher import OutputMatcher
from outrider.lm.byte_tokenizer import EOS, VOCABULARY_SIZE
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree, SparseDistribution

SCHEMA = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "tags": {"type": "array",
"items": {"enum": ["red", "green", "blue"]}, "maxItems": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 199},
"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}, "required": ["name", "tags"], "additionalProperties": false}"""
CONSTRAINTS = (
    Constraint(json_schema=SCHEMA),
    Constraint(json_schema=SCHEMA, any_whitespace=True),
    Constraint(regex="(ab|a|b[0-9]{2,4})*-x"),
    Constraint(choice=["yes", "yes sir", "no", "nobody"]),
    Constraint(grammar='start: "(" (start | /[a-z]+/)* ")"'),
    # A special token stands in the grammar by its id.
    Constraint(
        structural_tags=StructuralTags([StructuralTag("<|im_start|>{", SCHEMA, "}<|im_start|>", "<|im_start|>")])
    ),
    Constraint(regex="a{1,40}", reasoning_end="</think>"),
)
SIZE = 49152


def bits(mask: bytes) -> set[int]:
    return set(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little").nonzero()[0].tolist())


def tokens_of(words: torch.Tensor) -> set[int]:
    return bits(words.numpy().tobytes())


class Grammars:
    """Compiled constraints, and outputs that they allow."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self._compiled = [compiled(constraint, tokenizer) for constraint in CONSTRAINTS]

    def fresh(self, number: int) -> LLMatcher:
        return self._compiled[number].deep_copy()

    def mask_after(self, number: int, output: list[int]) -> set[int]:
        matcher = self.fresh(number)
        assert not output or matcher.consume_tokens(output)
        return bits(matcher.compute_bitmask())

    def walk(self, number: int, draw: random.Random, num: int) -> list[int]:
        """Return a random output of up to `num` tokens, without its end."""
        matcher, output = self.fresh(number), []
        for _ in range(num):
            allowed = sorted(bits(matcher.compute_bitmask()) - set(self.tokenizer.eos_tokens))
            if not allowed:
                break
            output.append(draw.choice(allowed))
            assert matcher.consume_token(output[-1])
        return output


@pytest.fixture(scope="module")
def grammars(embedded: LLTokenizer) -> Grammars:
    return Grammars(embedded)


@settings(max_examples=25, deadline=None)
@given(number=st.integers(0, len(CONSTRAINTS) - 1), seed=st.integers(0, 2**32))
def test_after_any_way_the_mask_is_a_fresh_matchers(grammars: Grammars, number: int, seed: int) -> None:
    """Go on, back, to another branch, over copies and masks of trees: the mask depends on the output only."""
    draw = random.Random(seed)
    walks = [grammars.walk(number, draw, 24) for _ in range(3)]
    matcher = OutputMatcher(lambda: grammars.fresh(number))
    for _ in range(6):
        walk = draw.choice(walks)
        output = walk[: draw.randrange(len(walk) + 1)]
        matcher.follow(output)
        tree = tree_below(draw, walk[len(output) :])
        masks = node_masks([MatchedTree(matcher, tree)], SIZE)[0]
        assert tokens_of(masks[ROOT]) == grammars.mask_after(number, output)
        apart = masks_apart(lambda: OutputMatcher(lambda: grammars.fresh(number)), output, tree, SIZE)
        assert torch.equal(apart.words, masks.words)
        kept, numbers = allowed_tree(tree, masks, keeps_drafted=False)
        for place, kept_number in enumerate(numbers, start=1):
            path = [kept.node(node).token_id for node in kept.path(place)]
            assert path == [tree.node(node).token_id for node in tree.path(kept_number)]
            assert tokens_of(masks[kept_number]) == grammars.mask_after(number, output + path)
        assert matcher.forced() == matcher_at(grammars, number, output).forced()


def matcher_at(grammars: Grammars, number: int, output: list[int]) -> OutputMatcher:
    matcher = OutputMatcher(lambda: grammars.fresh(number))
    matcher.follow(output)
    return matcher


def tree_below(draw: random.Random, walk: list[int]) -> ProposalTree:
    """Return a tree with a line that is allowed, and nodes beside and below it that mostly are not."""
    tree, number = ProposalTree(), ROOT
    for token_id in walk[: draw.randrange(6)]:
        number = tree.append(ProposalNode(number, token_id, NodeKind.GUESSED))
    for _ in range(draw.randrange(6)):
        parent, token_id = draw.randrange(len(tree) + 1), draw.randrange(SIZE)
        if tree.child(parent, token_id) is None:
            tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED))
    return tree


def test_masks_of_many_requests_are_those_of_each(grammars: Grammars) -> None:
    draw = random.Random(3)
    items = []
    for number in range(len(CONSTRAINTS)):
        walk = grammars.walk(number, draw, 16)
        matcher = matcher_at(grammars, number, walk[:4])
        items.append(MatchedTree(matcher, tree_below(draw, walk[4:]) if number else ProposalTree()))
    together = node_masks(items, SIZE)
    for item, masks in zip(items, together, strict=True):
        assert torch.equal(masks.words, node_masks([item], SIZE)[0].words)
    assert node_masks([], SIZE) == []


def test_forced_tokens_are_the_only_ones(grammars: Grammars) -> None:
    matcher, output = OutputMatcher(lambda: grammars.fresh(0)), []
    forced = matcher.forced()
    assert forced
    for token_id in forced:
        assert grammars.mask_after(0, output) == {token_id}
        output.append(token_id)


def test_an_output_that_is_not_allowed_is_an_error_for_good(grammars: Grammars, embedded: LLTokenizer) -> None:
    matcher = OutputMatcher(lambda: grammars.fresh(3))
    for _ in range(2):
        with pytest.raises(ConstraintFailed, match="constraint fails after"):
            matcher.follow(embedded.tokenize_str("maybe"))


def test_only_what_is_allowed_is_kept_of_a_tree(grammars: Grammars, embedded: LLTokenizer) -> None:
    """Under `rejection` a drafted token stays whatever it is, and nothing below one that is not allowed."""
    yes, no, other = (embedded.tokenize_str(text)[0] for text in ("yes", "no", "xy"))
    drafted = SparseDistribution((other,), (1.0,))
    tree = ProposalTree()
    tree.append(ProposalNode(ROOT, other, NodeKind.DRAFTED, drafted))
    tree.append(ProposalNode(1, yes, NodeKind.DRAFTED, SparseDistribution((yes,), (1.0,))))
    tree.append(ProposalNode(ROOT, yes, NodeKind.GUESSED))
    tree.append(ProposalNode(ROOT, 7, NodeKind.GUESSED))
    tree.append(ProposalNode(3, other, NodeKind.GUESSED))
    masks = node_masks([MatchedTree(OutputMatcher(lambda: grammars.fresh(3)), tree)], SIZE)[0]
    assert masks.allow_any()[:3] == [True, False, False]
    assert allowed_tree(tree, masks, keeps_drafted=False)[1] == [3]
    kept, numbers = allowed_tree(tree, masks, keeps_drafted=True)
    assert numbers == [1, 3]
    assert [(node.parent, node.token_id) for node in kept.nodes] == [(ROOT, other), (ROOT, yes)]
    # What ends the output has nothing below it either.
    assert allowed_tree(tree, masks, [yes], keeps_drafted=True)[1] == [1, 3]
    assert masks.allows([ROOT, ROOT, ROOT], [yes, no, other]) == [True, True, False]
    assert len(masks.only(numbers)) == 3


def test_what_is_allowed_besides_some_tokens(grammars: Grammars) -> None:
    masks = node_masks([MatchedTree(OutputMatcher(lambda: grammars.fresh(3)), ProposalTree())], SIZE)[0]
    allowed = tokens_of(masks[ROOT])
    for token_ids, is_more in (([], True), (list(allowed)[1:], True), (allowed, False)):
        assert masks.allow_besides(token_words(token_ids, SIZE)) == [is_more]
    every = NodeMasks(torch.full((2, 2), -1, dtype=torch.int32))
    assert every.allow_besides(token_words(range(64), 64)) == [False, False]
    assert every.allow_besides(token_words([*range(63), 99], 64)) == [True, True]


def test_a_replay_may_take_as_much_work_as_decoding(byte_definition: str) -> None:
    tokenizer = load_tokenizer(byte_definition, VOCABULARY_SIZE, [EOS])
    begin = compiled(Constraint(regex="[ab]*a[ab]{300}"), tokenizer).deep_copy
    a, b = tokenizer.tokenize_str("a")[0], tokenizer.tokenize_str("b")[0]
    draw = random.Random(2)
    output = [draw.choice((a, b)) for _ in range(1000)]
    decoding = OutputMatcher(begin)
    for end in range(1, len(output) + 1):
        node_masks([MatchedTree(decoding, ProposalTree())], VOCABULARY_SIZE)
        decoding.follow(output[:end])
    begin = compiled(Constraint(regex="[ab]*a[ab]{300}"), tokenizer).deep_copy
    replay = OutputMatcher(begin)
    assert replay.num_missing(output) == 1000
    replay.follow(output)
    assert replay.num_missing(output) == 0 and replay.num_missing([*output[:-1], 0]) == 1000
    masks = [node_masks([MatchedTree(item, ProposalTree())], VOCABULARY_SIZE)[0].words for item in (decoding, replay)]
    assert torch.equal(*masks)


def test_ids_that_the_tokenizer_does_not_have_are_never_allowed(embedded_definition: str) -> None:
    size = 49152 + 100
    tokenizer = load_tokenizer(embedded_definition, size, [2])
    known = token_words(token_ids_of(embedded_definition), size)
    for constraint in (
        Constraint(regex="a", reasoning_end="</think>"),
        Constraint(regex="a", reasoning_end="<|im_start|>"),
        Constraint(grammar="start: <[^5]>"),
    ):
        item = MatchedTree(OutputMatcher(compiled(constraint, tokenizer).deep_copy), ProposalTree())
        [masks] = node_masks([item], size, known)
        assert max(tokens_of(masks[ROOT])) < 49152
