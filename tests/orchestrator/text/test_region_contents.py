"""Contents of regions: the values that transformers finds, or an error where it finds none."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing.content_parsers import parse_content as transformers_parse

from orchestrator.text.region_contents import apply_transform, parse_content

DIALECT = {"unquoted_keys": True, "string_delims": [["<q>", "</q>"], ["'", "'"]]}
TAGS = {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</>"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("text", "  a b ", {}),
    ("text", "  a b ", {"strip": False}),
    ("int", " 12 ", {}),
    ("int", "x", {}),
    ("float", "1.5", {}),
    ("bool", " TRUE ", {}),
    ("bool", "no", {}),
    ("json", '{"a": [1, null]}', {}),
    ("json", "{a: 1}", {}),
    ("json", "{a: 1}", {"allow_non_json": True}),
    ("json", '{a: <q>x "y" \\</q>, b_2: \'z: {c: 1}\', "d: e": {f: 2}}', DIALECT),
    ("json", "\x01{}", DIALECT),
    ("json", '{"a: b": 1}', {"unquoted_keys": True}),
    ("json", "[" * 100_000, {}),
    ("xml-inline", "<a>1</> x <b>y</><a>2</><a>3</>", TAGS),
    ("xml-inline", "<a>1</> x <b>y</><a>2</><a>3</>", TAGS | {"merge_duplicates": True}),
    ("xml-inline", "<a>[1]</>", TAGS | {"value_parser": {"name": "json"}}),
    ("xml-inline", "<a>x</>", TAGS | {"value_parser": {"name": "json"}}),
    ("xml-inline", "<a>x</>", {"tag_pattern": r"<(?P<key>b)?a>(?P<value>x)</>"}),
    ("kv-lines", "a: 1\n\n b : x:y \nnone", {}),
    ("kv-lines", "a=1;b=2", {"line_sep": ";", "kv_sep": "=", "value_parser": {"name": "int"}}),
]


def outcome(parse: Any, name: str, text: str, arguments: dict[str, Any]) -> Any:
    try:
        return parse(text, name, arguments) if parse is transformers_parse else parse(name, text, arguments)
    except (ValueError, RecursionError):
        return ValueError


@pytest.mark.parametrize(("name", "text", "arguments"), CASES)
def test_values_are_those_of_transformers(name: str, text: str, arguments: dict[str, Any]) -> None:
    assert outcome(parse_content, name, text, arguments) == outcome(transformers_parse, name, text, arguments)


CALLS = [
    "[]",
    "[f()]",
    "[ f ( a = 1 , b=[1, 'x', {'k': None, \"l\": true}] ), g.h-i(x=-1.5e3) ]",
    "[f(a='\\n\\u00e9\\ud83d\\ude42\\'')]",
    "[f(a='\\ud83d')]",
    "[f(a='\\x')]",
    "[f(a='x\n')]",
    "[f(a=1, a=2)]",
    "[f(a={'k': 1, 'k': 2})]",
    "[f(a=9007199254740991)]",
    "[f(a=9007199254740992)]",
    "[f(a=1e999)]",
    "[f(a=01)]",
    "[f(1)]",
    "[f(a=1,)]",
    "[f(a=x)]",
    "[f()] x",
    "f()",
    "[f(a=" + "[" * 100 + "]" * 100 + ")]",
    "[f(a=" + "[" * 101 + "]" * 101 + ")]",
    "[f(a=" + "[" * 5000,
    "",
    "[",
    "[f(a=",
]


@pytest.mark.parametrize("text", CALLS)
def test_lists_of_calls_are_those_of_transformers(text: str) -> None:
    name = "python-call-list"
    assert outcome(parse_content, name, text, {}) == outcome(transformers_parse, name, text, {})


@given(st.lists(st.sampled_from([*"[](){}=,'\"\\.-_ \nufan10:eT", "True", "\\u0041", "\\ud83d", "\\ude42"])))
@settings(max_examples=300, deadline=None)
def test_any_list_of_calls_is_read_or_refused_as_by_transformers(pieces: list[str]) -> None:
    for text in ("".join(pieces), f"[f(a={''.join(pieces)})]"):
        found = outcome(parse_content, "python-call-list", text, {})
        assert found == outcome(transformers_parse, "python-call-list", text, {})


def test_a_transform_puts_values_in_their_places() -> None:
    scope = {"name": "f", "content": {"args": {"a": 1}}}
    transform = {"x": ["{name}", "plain", 1], "y": "{content.args}"}
    assert apply_transform(transform, scope) == {"x": ["f", "plain", 1], "y": {"a": 1}}
    for missing in ("{other}", "{content.none}", "{name.x}"):
        with pytest.raises(ValueError, match="has no value"):
            apply_transform(missing, scope)
