"""Constraints as grammars: each allows the texts that it should, and no others."""

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from outrider.constraint import Constraint, StructuralTag, StructuralTags
from outrider.errors import InvalidArgument
from outrider.grammar.compilation import compiled
from outrider.grammar.source import one_line
from outrider.lm.byte_tokenizer import EOS

ADD = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
CALL = StructuralTag('<call>{"name": "add", "arguments": ', ADD, "}</call>", "<call>")
OTHER = StructuralTag(
    '<call>{"name": "now", "arguments": ', '{"type": "object", "maxProperties": 0}', "}</call>", "<call>"
)
PERSON = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]}'
)
ODD = ('a"b', "line\nbreak", "tab\tx", "back\\slash", "uni é 😀", "\x01", "/slash/", "a\u2028b", "{x}", "[0-9]*", " | ")

CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "schema",
        {"json_schema": PERSON},
        ['{"name":"a"}', '{"name":"a","age":3}'],
        ['{ "name":"a"}', '{"age":3}', "[]", ""],
    ),
    ("space", {"json_schema": PERSON, "any_whitespace": True}, ['{ "name" :\n"a"}'], ['{"age":3}']),
    ("true", {"json_schema": "true"}, ["[1,2]", '"x"', "null"], ["{", "nul"]),
    ("object", {"json_object": True}, ["{}", '{"a":{"b":[1,2]}}'], ["[]", "{ }", "3"]),
    ("regex", {"regex": "[a-c]{2,3}x?"}, ["ab", "abcx"], ["a", "abcd", "abx "]),
    ("slash", {"regex": "a/b"}, ["a/b"], ["a", "a\\/b"]),
    ("choice", {"choice": ["yes", "yes sir", "no"]}, ["yes", "yes sir", "no"], ["ye", "yes ", "yesno"]),
    ("odd", {"choice": ODD}, list(ODD), ["a", ""]),
    ("lark", {"grammar": 'start: "a" b*\nb: /[xy]/'}, ["a", "axyx"], ["x", "az"]),
    (
        "calls",
        {"structural_tags": StructuralTags([CALL, OTHER])},
        ["", "hi", 'hi <call>{"name": "add", "arguments": {"a":1}}</call> and', "a < b"],
        [
            "<call>",
            "hi <call>x",
            '<call>{"name": "add", "arguments": {}}</call>',
            '<call>{"name": "add", "arguments": {"a":1}}',
        ],
    ),
    (
        "one call at most",
        {"structural_tags": StructuralTags([CALL], stop_after_first=True)},
        ["hi", 'hi <call>{"name": "add", "arguments": {"a":1}}</call>'],
        ['<call>{"name": "add", "arguments": {"a":1}}</call> and'],
    ),
    (
        "calls only",
        {"structural_tags": StructuralTags([CALL, OTHER], at_least_one=True)},
        [
            '<call>{"name": "add", "arguments": {"a":1}}</call>',
            '<call>{"name": "add", "arguments": {"a":1}}</call>\n<call>{"name": "now", "arguments": {}}</call>',
        ],
        ["", "hi", 'hi <call>{"name": "add", "arguments": {"a":1}}</call>'],
    ),
    (
        "one call",
        {"structural_tags": StructuralTags([CALL], at_least_one=True, stop_after_first=True)},
        ['<call>{"name": "add", "arguments": {"a":1}}</call>'],
        ["", '<call>{"name": "add", "arguments": {"a":1}}</call>\n'],
    ),
    (
        "any object",
        {"structural_tags": StructuralTags([StructuralTag("<f>", "", "</f>")], at_least_one=True)},
        ['<f>{"x":[1]}</f>'],
        ["<f>3</f>"],
    ),
    (
        "after reasoning",
        {"json_schema": '{"type": "integer"}', "reasoning_end": "</think>"},
        ["</think>42", "well {1}</think>\n\n42"],
        ["42", "</think>x", "</think>4 "],
    ),
    (
        "calls after reasoning",
        {"structural_tags": StructuralTags([CALL]), "reasoning_end": "</think>"},
        ["<call> not yet</think>hi", '</think><call>{"name": "add", "arguments": {"a":1}}</call>'],
        ["</think><call>x"],
    ),
]


def matcher_of(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
    return compiled(constraint, tokenizer).deep_copy()


def is_whole(matcher: LLMatcher, tokenizer: LLTokenizer, text: str) -> bool:
    """Whether the constraint allows this text as an output."""
    token_ids = tokenizer.tokenize_bytes(text.encode())
    return matcher.validate_tokens([*token_ids, tokenizer.eos_token]) == len(token_ids) + 1


@pytest.mark.parametrize("vocabulary", ["by_bytes", "embedded"])
@pytest.mark.parametrize(("given", "allowed", "refused"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_grammar_allows_just_these(
    vocabulary: str, given: dict[str, Any], allowed: list[str], refused: list[str], request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(vocabulary)
    matcher = matcher_of(Constraint(**given), tokenizer)
    assert [text for text in allowed if not is_whole(matcher, tokenizer, text)] == []
    assert [text for text in refused if is_whole(matcher, tokenizer, text)] == []


def test_what_is_a_special_token_is_matched_by_its_id(by_bytes: LLTokenizer) -> None:
    """Text never stands for a special token, so a grammar in texts would never end."""
    [start] = by_bytes.tokenize_str("<|im_start|>", parse_special=True)
    tag = StructuralTag("<|im_start|>add", ADD, "<|im_start|>.", "<|im_start|>")
    for tags in (StructuralTags([tag]), StructuralTags([tag], at_least_one=True)):
        matcher = matcher_of(Constraint(structural_tags=tags), by_bytes)
        body = by_bytes.tokenize_str('add{"a":1}')
        assert matcher.validate_tokens([start, *body, start, *by_bytes.tokenize_str(".")]) == len(body) + 3
        spelt = [by_bytes.tokenize_str(char)[0] for char in "<|im_start|>"]
        assert matcher.validate_tokens(spelt) == (0 if tags.at_least_one else len(spelt))


def test_reasoning_may_have_special_tokens(by_bytes: LLTokenizer) -> None:
    """The model begins its reasoning by one, or writes others in it; its end is a special token, or a text."""
    [start] = by_bytes.tokenize_str("<|im_start|>", parse_special=True)
    hm, x = by_bytes.tokenize_str("hm"), by_bytes.tokenize_str("x")
    by_token = matcher_of(Constraint(regex="x", reasoning_end="<|im_start|>"), by_bytes)
    assert by_token.validate_tokens([*hm, start, *x, EOS]) == 5
    assert by_token.validate_tokens([*hm, EOS]) == 2
    by_text = matcher_of(Constraint(regex="x", reasoning_end="</r>"), by_bytes)
    end = by_bytes.tokenize_str("</r>")
    for output in ([start, *hm, *end, *x], [*hm, start, start, *end, *x], [*end, *x], [*hm, *end, *x]):
        assert by_text.validate_tokens([*output, EOS]) == len(output) + 1
    assert by_text.validate_tokens([*hm, start, *end, start]) == 7
    assert by_text.validate_tokens([*hm, EOS]) == 2


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"json_schema": '{"type": "integerx"}'}, "json_schema: Invalid type: integerx"),
        ({"json_schema": '{"not": {}}'}, "Unimplemented keys"),
        ({"json_schema": "{"}, "is no JSON: Expecting property name"),
        ({"json_schema": "3"}, "must be a JSON object"),
        ({"json_schema": '{"$schema": "http://json-schema.org/draft-03/schema#"}'}, "must be of draft 4, 6, 7"),
        ({"json_schema": '{"$schema": 3}'}, "must be of draft"),
        ({"json_schema": "[" * 100_000}, "nested too deeply"),
        ({"json_schema": '{"items":' * 200 + "{}" + "}" * 200}, "recursion limit"),
        ({"json_schema": "false"}, "Unsatisfiable"),
        ({"json_schema": '{"type": "integer", "minimum": 5, "maximum": 3}'}, "minimum"),
        ({"regex": "a(b"}, r"at 1\(8\).*unclosed group"),
        ({"regex": "(a+)+$b"}, "not supported"),
        ({"grammar": 'start: "a" foo'}, r'at 1\(8\).*unknown name: "foo"'),
        ({"grammar": ""}, "grammar"),
        ({"grammar": '{"grammars": []}'}, "must be in llguidance's dialect of Lark"),
        (
            {"structural_tags": StructuralTags([StructuralTag("<a>"), StructuralTag("<a>b")])},
            "begins with another one, '<a>'",
        ),
        ({"structural_tags": StructuralTags([StructuralTag("<a>", '{"type": 3}')])}, "structural_tags"),
    ],
)
def test_a_wrong_constraint_is_refused_with_the_position(
    given: dict[str, Any], problem: str, by_bytes: LLTokenizer
) -> None:
    with pytest.raises(InvalidArgument, match=problem) as refused:
        matcher_of(Constraint(**given), by_bytes)
    assert refused.value.field == "constraint" and "\n" not in refused.value.message


def test_messages_are_one_line() -> None:
    assert one_line("at 1(8): unknown\n   | start:\n<non-verbose/>") == "at 1(8): unknown | start:"
