"""Response templates: what is read of them, and what is refused as transformers refuses it."""

import json
from typing import Any

import pytest
from transformers.utils.chat_parsing.response_templates import load_response_template as transformers_load

from orchestrator.text.response_template import load_response_template
from orchestrator.text.tool_formats import output_format
from tests.orchestrator.text.templates import CHANNELS, GEMMA, LIST, QWEN

START = {"start_anchor": "A"}
WRONG: list[Any] = [
    [],
    {},
    {"fields": {"content": {}}},
    START | {"fields": {}},
    START | {"fields": {"content": {}}, "version": 2},
    START | {"fields": {"content": {}}, "other": 1},
    START | {"fields": {"content": []}},
    START | {"fields": {"content": {"other": 1}}},
    START | {"fields": {"content": {}, "thinking": {}}},
    START | {"fields": {"content": {"open": "a", "open_pattern": "b"}}},
    START | {"fields": {"content": {"open": ""}}},
    START | {"fields": {"content": {"open": []}}},
    START | {"fields": {"content": {"open": ["a", 1]}}},
    START | {"fields": {"content": {"open_pattern": "("}}},
    START | {"fields": {"content": {"content": "yaml"}}},
    START | {"fields": {"content": {"join": "x"}}},
    START | {"fields": {"content": {"open_pattern": "(?P<name>x)"}}},
    START | {"fields": {"content": {"transform_each": True}}},
    START | {"fields": {"content": {"transform": {"a": ["x {content}"]}}}},
]


@pytest.mark.parametrize("spec", WRONG)
def test_what_transformers_refuses_is_refused(spec: Any) -> None:
    with pytest.raises(ValueError):
        transformers_load(spec)
    with pytest.raises(ValueError):
        load_response_template(spec)


XML = {"content": "xml-inline", "open": "<", "close": ">"}
LATE: list[dict[str, Any]] = [
    XML,
    XML | {"content_args": {"tag_pattern": "("}},
    XML | {"content_args": {"tag_pattern": "(?P<value>x)"}},
    {"content": "json", "content_args": {"string_delims": ["x"]}},
    {"content": "json", "content_args": {"string_delims": [["", "x"]]}},
    {"content": "kv-lines", "content_args": {"line_sep": ""}},
    {"content": "kv-lines", "content_args": {"kv_sep": 1}},
    {"content": "kv-lines", "content_args": {"value_parser": "int"}},
    {"content": "kv-lines", "content_args": {"value_parser": {"name": "yaml"}}},
    {"content": "kv-lines", "content_args": {"value_parser": {"args": 1}}},
    {"content": "kv-lines", "content_args": {"value_parser": {"name": "xml-inline"}}},
]


@pytest.mark.parametrize("field", LATE)
def test_what_would_fail_at_every_output_is_refused_at_once(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        load_response_template(START | {"fields": {"thinking": {"open": "a"} | field}})


def test_a_template_has_bounds() -> None:
    with pytest.raises(ValueError, match="65536 characters"):
        load_response_template(START | {"fields": {"content": {"open": "x" * 70_000}}})


def test_regions_have_their_kinds() -> None:
    template = load_response_template(CHANNELS)
    assert template.implicit is None
    assert (template.reasoning or template.regions[0]).name == "thinking"
    assert (template.calls or template.regions[0]).name == "tool_calls"
    assert load_response_template(QWEN).implicit == load_response_template(QWEN).implicit


def test_special_tokens_are_found_within_literals_and_expressions() -> None:
    template = load_response_template(CHANNELS)
    assert template.mentions("<|channel|>")
    assert template.mentions("<|call|>")
    assert not template.mentions("<|endoftext|>")
    assert load_response_template(GEMMA).mentions('<|"|>')


def test_one_that_cannot_be_read_is_logged_and_the_family_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    for wrong in ("{", json.dumps({"fields": {}})):
        form = output_format(wrong, "{{ tools }} <tool_call>")
        assert form.call is not None
        assert form.call.trigger == "<tool_call>"
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("spec", "source", "begin", "end"),
    [
        (QWEN, "<tool_call>\\n", '<tool_call>\n{"name": "add", "arguments": ', "}\n</tool_call>"),
        (QWEN, "", '<tool_call>{"name": "add", "arguments": ', "}</tool_call>"),
        (GEMMA, "", None, None),
        (CHANNELS, "", None, None),
        (LIST, "", None, None),
    ],
)
def test_the_text_of_a_call_follows_from_a_template_where_it_is_json(
    spec: dict[str, Any], source: str, begin: str | None, end: str | None
) -> None:
    call = output_format(json.dumps(spec), source).call
    if begin is None:
        assert call is None
    else:
        assert call is not None
        tag = call.tag("add", "{}")
        assert (tag.begin, tag.end, tag.trigger) == (begin, end, "<tool_call>")
