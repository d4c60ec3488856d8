"""Outputs taken apart: as transformers does it, alike however they come, and without an error whatever they are."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from orchestrator.text.parts import CallPiece, Content, Part, Reasoning, merged
from orchestrator.text.response_parser import ResponseParser
from orchestrator.text.response_template import load_response_template
from orchestrator.text.tool_formats import output_format
from tests.orchestrator.text.templates import CHANNELS, GEMMA, LINES, LIST, PYTHON, QWEN, XML

TOOLS = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "number"}, "s": {"type": "string"}},
    },
    "find": {
        "type": "object",
        "properties": {"deep": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "of": {"type": "array"}},
    },
}
KNOWN: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "qwen": (
        QWEN,
        [
            ("", "Hello there.<|im_end|>"),
            ("", "<think>\nWell.\n</think>\n\nHello.<|im_end|>"),
            ("<|im_start|>assistant\n<think>\n", "Well.\n</think>\n\n Hello. "),
            ("<|im_start|>user\nx<think><|im_start|>assistant\n", "Hello"),
            (
                "",
                '<tool_call>\n{"name": "add", "arguments": {"a": 1, "s": "}\\"{"}}\n</tool_call>\n'
                '<tool_call>{"arguments": {"of": [[1], {}]}, "more": [1, {"x": "]"}], "n": 1, "name": "find"}'
                "</tool_call>",
            ),
            ("", '<tool_call>{"name": "add", "arguments": {}}'),
        ],
    ),
    "channels": (
        CHANNELS,
        [
            (
                "<|start|>assistant",
                "<|channel|>analysis<|message|>Let me.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
                '<|constrain|>json<|message|> {"a": 2} <|call|>',
            ),
            ("<|start|>assistant", "<|channel|>final<|message|>All well.<|return|>"),
        ],
    ),
    "gemma": (GEMMA, [("", 'Yes.<|tool_call>call:add{a:5,s:<|"|>x: {y}<|"|>}<tool_call|><turn|>')]),
    "list": (
        LIST,
        [
            (
                "",
                "<|START_THINKING|>Two.<|END_THINKING|><|START_ACTION|>["
                '{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}, '
                '{"tool_name": "find", "parameters": {}}]<|END_ACTION|>',
            ),
            ("", "dropped<|START_RESPONSE|>Kept<|END_RESPONSE|>dropped"),
        ],
    ),
    "python": (
        PYTHON,
        [("", "<|tool_call_start|>[add(a=1, s='x\\n'), find(of=[1, {'k': None}], deep=True)]<|tool_call_end|>Done.")],
    ),
    "xml": (
        XML,
        [
            (
                "",
                "Now.\n<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n1e1\n</parameter>\n"
                "<parameter=s>\n13\n</parameter>\n</function>\n</tool_call><tool_call><function=find>"
                '<parameter=deep>\nfalse\n</parameter><parameter=of>\n["x"]\n</parameter></function></tool_call>',
            ),
            (
                "",
                "<tool_call><function=find><parameter=of>\n1\n</parameter><parameter=of>\n2\n</parameter>"
                "<parameter=deep>\nnull\n</parameter></function></tool_call>",
            ),
        ],
    ),
    "lines": (LINES, [("A:", "one CALL add\na=1\n b = 2 \nnothing\nEND two"), ("A:", "CALL add\na=1\nEND OF CALL")]),
}
CASES = [(spec, prompt, text) for spec, cases in KNOWN.values() for prompt, text in cases]
FAMILIES = {
    "hermes": "{{ tools }} <tool_call> <think>",
    "xml": "{{ tools }} <tool_call> <function=",
    "glm": "{{ tools }} <tool_call> <arg_key>",
    "llama": "{{ tools }} <|python_tag|>",
    "mistral": "{{ tools }} [TOOL_CALLS] [THINK]",
    "bare": "{{ tools }}",
}


def parser_of(spec: dict[str, Any], **more: Any) -> ResponseParser:
    return ResponseParser(load_response_template(spec), TOOLS, **({"reasoning": True, "calls": True} | more))


def parts_of(parser: ResponseParser, pieces: list[str]) -> list[Part]:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return merged([*parts, *parser.finish()])


def message_of(parts: list[Part]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, reasoning, and the calls with their arguments."""
    calls: dict[int, list[str]] = {}
    for part in parts:
        if isinstance(part, CallPiece):
            call = calls.setdefault(part.index, [part.name, ""])
            call[1] += part.arguments
    content = "".join(part.text for part in parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return content, reasoning, [(name, json.loads(arguments)) for name, arguments in calls.values()]


def oracle(spec: dict[str, Any], prompt: str, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """What transformers makes of a text."""
    tools = [{"function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
    message = parse_response(text, spec, prefix=prompt, tools=tools)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    reasoning = [message[name] for name in ("thinking", "reasoning", "reasoning_content") if name in message]
    return message.get("content", ""), "".join(reasoning), calls


@pytest.mark.parametrize(("spec", "prompt", "text"), CASES)
def test_outputs_are_taken_apart_as_transformers_does(spec: dict[str, Any], prompt: str, text: str) -> None:
    parser = parser_of(spec)
    parser.prime(prompt)
    assert message_of(parts_of(parser, [text])) == oracle(spec, prompt, text)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_split_gives_the_same_parts(data: st.DataObject) -> None:
    spec, prompt, text = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=30)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, split = parser_of(spec), parser_of(spec)
    for parser in (whole, split):
        parser.prime(prompt)
    assert parts_of(split, pieces) == parts_of(whole, [text])


WORDS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "add", "arguments": ',
    '{"a": 1}',
    "}",
    "{",
    "]",
]
WORDS += [
    "[TOOL_CALLS]",
    "add",
    "[ARGS]",
    "[CALL_ID]",
    "[",
    ";",
    ",",
    "<|python_tag|>",
    "```json\n",
    "<function=add>",
    "\n",
    " ",
    "x",
]
WORDS += [
    "<parameter=a>",
    "</parameter>",
    "</function>",
    '"',
    "\\",
    "[THINK]",
    "é🙂",
    "null",
    '{"name": "Bob"',
    "1",
    '"\\ud800"',
    "<arg_key>a</arg_key>",
    "<arg_value>",
    "</arg_value>",
]
SPECS = [spec for spec, _ in KNOWN.values()]
MARKS = ["<|im_end|>", "<|channel|>final<|message|>", "<|channel|>commentary to=functions.add<|message|>", "<|call|>"]
MARKS += ['<|"|>', "<|tool_call>call:add", "<tool_call|>", "<|START_ACTION|>", "<|END_ACTION|>", "CALL add\n", "END"]
MARKS += ["<|tool_call_start|>", "<|tool_call_end|>", "(a=", "'", "a=1\n", " OF CALL"]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_text_fails_or_depends_on_its_pieces(data: st.DataObject) -> None:
    source = data.draw(st.sampled_from([*FAMILIES.values(), *SPECS]))
    pieces = data.draw(st.lists(st.sampled_from([*WORDS, *MARKS]) | st.text(max_size=3), max_size=25))
    if isinstance(source, dict):
        template, needs_tool = load_response_template(source), False
    else:
        form = output_format(None, source)
        template, needs_tool = form.template, form.needs_tool
    wanted = {"reasoning": data.draw(st.booleans()), "calls": data.draw(st.booleans()), "needs_tool": needs_tool}
    one, other = ResponseParser(template, TOOLS, **wanted), ResponseParser(template, TOOLS, **wanted)
    parts = parts_of(one, pieces)
    assert parts_of(other, list("".join(pieces))) == parts
    assert [part.index for part in parts if isinstance(part, CallPiece) and part.name] == list(
        range(len({part.index for part in parts if isinstance(part, CallPiece)}))
    )


def test_arguments_stream_as_they_come() -> None:
    parser = parser_of(QWEN)
    assert parser.push('<tool_call>\n{"name": "add"') == [CallPiece(0, "add", "")]
    assert parser.push(', "arguments": {"a"') == [CallPiece(0, "", '{"a"')]
    assert parser.push(": 1}") == [CallPiece(0, "", ": 1}")]
    assert parser.push("}</tool_call>") == []
    # What was captured by the anchor is the name.
    parser = parser_of(CHANNELS)
    assert parser.push('<|channel|>commentary to=functions.add<|message|>{"a') == [CallPiece(0, "add", '{"a')]
    assert parser.push('": 1}') == [CallPiece(0, "", '": 1}')]


def test_arguments_within_a_text_are_taken_out_of_it() -> None:
    text = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert parts_of(parser_of(QWEN), [text]) == [CallPiece(0, "add", '{"a": 1}')]
    none = '<tool_call>{"name": "add", "arguments": null}</tool_call><tool_call>{"name": "add"}</tool_call>'
    assert message_of(parts_of(parser_of(QWEN), [none]))[2] == [("add", {}), ("add", {})]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>nonsense</tool_call>",
        '<tool_call>{"name": 1}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "ad',
        "<tool_call>",
    ],
)
def test_what_is_no_call_is_content_as_it_stands(text: str) -> None:
    assert parts_of(parser_of(QWEN), [text]) == [Content(text)]


def test_an_output_that_ends_within_a_call_has_the_beginning_of_it() -> None:
    assert parts_of(parser_of(QWEN), ['<tool_call>{"name": "add", "arguments": {"a": ']) == [
        CallPiece(0, "add", '{"a": ')
    ]


def test_where_nothing_else_marks_calls_only_the_name_of_a_tool_does() -> None:
    form = output_format(None, FAMILIES["llama"])

    def parts(text: str) -> list[Part]:
        parser = ResponseParser(form.template, TOOLS, reasoning=True, calls=True, needs_tool=form.needs_tool)
        return parts_of(parser, list(text))

    assert parts('{"name": "Bob", "age": 3}') == [Content('{"name": "Bob", "age": 3}')]
    assert parts('{"name": "add", "parameters": {"a": 3}}') == [CallPiece(0, "add", '{"a": 3}')]
    assert parts('See: {"name": "add", "parameters": {}}') == [Content('See: {"name": "add", "parameters": {}}')]


def test_what_is_not_wanted_is_content() -> None:
    text = '<think>\nWell.\n</think>\nYes.\n<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    parts = parts_of(parser_of(QWEN, reasoning=False), [text])
    assert parts[0] == Content("Well.Yes.")
    plain = parts_of(parser_of(QWEN, calls=False), [text])
    assert plain == [Reasoning("Well."), Content('Yes.\n<tool_call>{"name": "add", "arguments": {}}</tool_call>')]
    # Where only regions have content, a call is one as it stands.
    channels = parts_of(
        parser_of(CHANNELS, calls=False), ["<|channel|>commentary to=functions.add<|message|>{}<|call|>"]
    )
    assert channels == [Content("<|channel|>commentary to=functions.add<|message|>{}<|call|>")]


def test_an_expression_that_never_ends_stops_the_parser_and_not_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.text.response_parser.SEARCH_TIMEOUT_S", 0.1)
    spec = {"start_anchor": "A", "fields": {"content": {}, "thinking": {"open_pattern": "(?:a|aa)+$b", "close": "c"}}}
    parser = parser_of(spec)
    assert parts_of(parser, ["a" * 60, " and more"]) == [Content("a" * 60 + " and more")]


def test_text_that_may_become_an_anchor_is_held_no_longer_than_a_bound() -> None:
    spec = {"start_anchor": "A", "fields": {"content": {}, "thinking": {"open_pattern": "<.*>", "close": "c"}}}
    parser = parser_of(spec)
    assert parser.push("<" + "x" * 4000) == []
    assert parser.push("x" * 100) == [Content("<" + "x" * 4100)]
