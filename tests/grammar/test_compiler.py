"""Compiling beside the caller's thread: kept by content, bounded in number and size."""

import json
import threading

import pytest

from outrider.constraint import Constraint
from outrider.errors import ConstraintFailed, InvalidArgument, Overloaded
from outrider.grammar import GRAMMAR_LIBRARY
from outrider.grammar.compiler import GrammarCompiler, load_tokenizer
from outrider.grammar.matcher import OutputMatcher
from outrider.lm.byte_tokenizer import EOS, VOCABULARY_SIZE


@pytest.fixture
def compiler(byte_definition: str) -> GrammarCompiler:
    return GrammarCompiler(byte_definition, VOCABULARY_SIZE, [EOS])


def test_a_constraint_is_compiled_once(compiler: GrammarCompiler) -> None:
    ready = threading.Event()
    grammar = compiler.begin(Constraint(regex="ab"))
    grammar.on_ready(ready.set)
    assert ready.wait(20) and grammar.is_ready and grammar.error is None
    assert compiler.begin(Constraint(regex="ab")) is grammar
    one, other = OutputMatcher(grammar.matcher), OutputMatcher(grammar.matcher)
    one.follow(list(b"A"[:0]))
    first = one.forced(1)
    one.follow(first)
    assert other.forced(2)[:1] == first and one.forced(1) != first
    compiler.close()


def test_a_wrong_one_says_what_is_wrong(compiler: GrammarCompiler) -> None:
    grammar = compiler.begin(Constraint(regex="a("))
    with pytest.raises(InvalidArgument, match="unclosed group"):
        grammar.matcher()
    assert isinstance(grammar.error, InvalidArgument)
    compiler.close()


def test_the_number_that_is_kept_and_that_waits_is_bounded(compiler: GrammarCompiler) -> None:
    first = compiler.begin(Constraint(regex="first"))
    first.matcher()
    for number in range(40):
        compiler.begin(Constraint(regex=f"a{number}")).matcher()
    assert compiler.begin(Constraint(regex="first")) is not first
    hold, held = threading.Event(), threading.Event()

    def block() -> None:
        held.set()
        hold.wait(20)

    compiler._thread.submit(block)
    assert held.wait(20)
    with pytest.raises(Overloaded, match="64 constraints wait"):
        for number in range(100):
            compiler.begin(Constraint(regex=f"b{number}"))
    hold.set()
    compiler._thread.submit(int).result(20)
    compiler.begin(Constraint(regex="a39")).matcher()
    compiler.close()


def test_their_size_is_bounded(compiler: GrammarCompiler) -> None:
    first = compiler.begin(Constraint(choice=["x"]))
    for number in range(17):
        compiler.begin(Constraint(choice=[f"{number}" + "a" * 250_000]))
    assert compiler.begin(Constraint(choice=["x"])) is not first
    compiler.close()


def test_a_tokenizer_that_does_not_fit_is_named(byte_definition: str) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot be used for constraints.*too small"):
        load_tokenizer(byte_definition, 100, [])
    compiler = GrammarCompiler(byte_definition, 100, [])
    with pytest.raises(InvalidArgument, match="cannot be used for constraints"):
        compiler.begin(Constraint(regex="a")).matcher()
    compiler.close()


def test_ids_beyond_the_tokenizer_are_never_allowed(byte_definition: str) -> None:
    tokenizer = load_tokenizer(byte_definition, 1000, [EOS])
    assert tokenizer.vocab_size == 1000
    compiler = GrammarCompiler(byte_definition, 1000, [EOS])
    mask = compiler.begin(Constraint(regex="(.|\n)*")).matcher().compute_bitmask()
    assert not any(mask[-(-VOCABULARY_SIZE // 8) :])
    compiler.close()


def test_settings_for_training_do_not_matter(byte_definition: str) -> None:
    content = json.loads(byte_definition)
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    compiler = GrammarCompiler(json.dumps(content), VOCABULARY_SIZE, [EOS])
    assert len(compiler.begin(Constraint(choice=["abcdef"])).matcher().compute_ff_tokens()) == 6
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
        matcher = OutputMatcher(grammar.matcher)
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
