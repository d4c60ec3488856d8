"""Compiling beside the caller's thread: kept by content, bounded in number and size."""

import json
import random
import threading

import pytest
from llguidance import LLMatcher, LLTokenizer

from outrider.constraint import Constraint
from outrider.errors import ConstraintFailed, InvalidArgument, Overloaded
from outrider.grammar import GRAMMAR_LIBRARY
from outrider.grammar import compiler as module
from outrider.grammar.compilation import compiled, load_tokenizer
from outrider.grammar.compiler import GrammarCompiler, num_at_once
from outrider.lm.byte_tokenizer import EOS, VOCABULARY_SIZE
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree


@pytest.fixture
def compiler(byte_definition: str) -> GrammarCompiler:
    return GrammarCompiler(byte_definition, VOCABULARY_SIZE, [EOS])


def test_a_grammar_is_one_requests_own(compiler: GrammarCompiler) -> None:
    ready = threading.Event()
    grammar, other = compiler.begin(Constraint(regex="ab")), compiler.begin(Constraint(regex="ab"))
    grammar.on_ready(ready.set)
    assert ready.wait(20) and grammar.is_ready
    first = grammar.matcher.forced()[:1]
    grammar.matcher.follow(first)
    assert other.matcher.forced()[:1] == first and grammar.matcher.forced()[:1] != first
    compiler.close()


def test_what_one_request_writes_uses_up_no_states_of_another(embedded_definition: str) -> None:
    """Copies of a matcher share the states of its lexer, and their bound: here a few outputs would have them all."""
    compiler = GrammarCompiler(embedded_definition, 49152, [2, 0])
    tokenizer = load_tokenizer(embedded_definition, 49152, [2, 0])
    constraint = Constraint(regex="[ab]*a[ab]{18}")
    draw = random.Random(1)
    shared = compiled(constraint, tokenizer)
    texts = ["".join(draw.choice("ab") for _ in range(400)) for _ in range(60)]
    failed = 0
    for text in texts:
        token_ids = tokenizer.tokenize_str(text)
        copy = shared.deep_copy()
        failed += not copy.consume_tokens(token_ids)
        own = compiler.begin(constraint).matcher
        own.follow(token_ids)
        own.check()
    assert failed
    compiler.close()


def test_a_wrong_one_says_what_is_wrong(compiler: GrammarCompiler) -> None:
    grammar = compiler.begin(Constraint(regex="a("))
    with pytest.raises(InvalidArgument, match="unclosed group"):
        _ = grammar.matcher
    compiler.close()


def test_the_number_that_waits_is_bounded_and_those_that_are_dropped_wait_no_more(compiler: GrammarCompiler) -> None:
    hold, held = threading.Event(), threading.Semaphore(0)

    def block() -> None:
        held.release()
        hold.wait(20)

    for _ in range(num_at_once()):
        compiler._threads.submit(block)
        assert held.acquire(timeout=20)
    waiting = []
    with pytest.raises(Overloaded, match="256 constraints wait"):
        for number in range(300):
            waiting.append(compiler.begin(Constraint(regex=f"b{number}")))
    assert not waiting[-1].is_ready
    for grammar in waiting:
        grammar.drop()
    last = compiler.begin(Constraint(regex="a39"))
    hold.set()
    assert last.matcher.forced()
    with pytest.raises(InvalidArgument, match="cannot be compiled"):
        _ = waiting[-1].matcher
    compiler.close()


def test_a_tree_of_many_paths_is_dropped_with_its_request(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each path is compiled for itself; a request that has ended waits for one of them at most."""
    grammar = compiler.begin(Constraint(regex="[a-z]"))
    assert grammar.matcher
    begun, hold, num = threading.Event(), threading.Event(), 0

    def slow(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
        nonlocal num
        num += 1
        begun.set()
        assert hold.wait(20)
        return compiled(constraint, tokenizer)

    monkeypatch.setattr(module, "compiled", slow)
    tree = ProposalTree()
    for token_id in range(64, 80):
        tree.append(ProposalNode(ROOT, token_id, NodeKind.GUESSED))
    grammar.begin_anew([], tree, None)
    assert begun.wait(20)
    grammar.drop()
    hold.set()
    with pytest.raises(InvalidArgument, match="cannot be compiled"):
        _ = grammar.matcher
    assert num == 1
    compiler.close()


def test_a_tokenizer_that_does_not_fit_is_named(byte_definition: str) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot be used for constraints.*too small"):
        load_tokenizer(byte_definition, 100, [])
    compiler = GrammarCompiler(byte_definition, 100, [])
    with pytest.raises(InvalidArgument, match="cannot be used for constraints"):
        _ = compiler.begin(Constraint(regex="a")).matcher
    compiler.close()


def test_ids_beyond_the_tokenizer_are_never_allowed(byte_definition: str) -> None:
    tokenizer = load_tokenizer(byte_definition, 1000, [EOS])
    assert tokenizer.vocab_size == 1000
    compiler = GrammarCompiler(byte_definition, 1000, [EOS])
    mask = compiler.begin(Constraint(regex="(.|\n)*")).matcher.native.compute_bitmask()
    assert not any(mask[-(-VOCABULARY_SIZE // 8) :])
    compiler.close()


def test_settings_for_training_do_not_matter(byte_definition: str) -> None:
    content = json.loads(byte_definition)
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    compiler = GrammarCompiler(json.dumps(content), VOCABULARY_SIZE, [EOS])
    assert len(compiler.begin(Constraint(choice=["abcdef"])).matcher.forced()) == 6
    compiler.close()


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(regex="a{1000000}"),
        Constraint(json_schema=json.dumps({"enum": ["x" * 200_000, "y" * 50_000]})),
    ],
    ids=["repeat", "enum"],
)
def test_what_exceeds_a_bound_ends_with_an_error(constraint: Constraint, embedded_definition: str) -> None:
    compiler = GrammarCompiler(embedded_definition, 49152, [2, 0])
    grammar = compiler.begin(constraint)
    with pytest.raises((InvalidArgument, ConstraintFailed)):
        matcher = grammar.matcher
        output: list[int] = []
        for _ in range(20):
            mask = int.from_bytes(matcher.native.compute_bitmask(), "little")
            matcher.check()
            output.append((mask & -mask).bit_length() - 1)
            matcher.follow(output)
    compiler.close()


def test_the_library_has_a_name_and_a_version() -> None:
    name, version = GRAMMAR_LIBRARY.split(" ")
    assert name == "llguidance" and version[0].isdecimal()
