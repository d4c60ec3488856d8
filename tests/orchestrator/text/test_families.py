"""The formats of families of models: what is a call and what is text, in time that grows with the output alone."""

import json
import time
from typing import Any

import pytest
import regex

from orchestrator.text.parts import CallPiece, Content, Part, Reasoning
from orchestrator.text.response_parser import ResponseParser
from orchestrator.text.response_template import load_response_template
from orchestrator.text.tool_formats import output_format
from tests.orchestrator.text.templates import CHANNELS
from tests.orchestrator.text.test_response_parser import FAMILIES, TOOLS, parser_of, parts_of

GLM = "{{ tools }} <tool_call>{function-name} <arg_key> <think>"
ARGUMENTS_MARKED = "{{ tools }} [TOOL_CALLS] [ARGS]"
ADD = '{"name": "add", "arguments": {"a": 1}}'
CALLED = CallPiece(0, "add", '{"a": 1}')


def parts(source: str, text: str, size: int = 1) -> list[Part]:
    """The parts of an output, which comes in pieces of a size."""
    form = output_format(None, source)
    parser = ResponseParser(form.template, TOOLS, reasoning=True, calls=True, needs_tool=form.needs_tool)
    return parts_of(parser, [text[start : start + size] for start in range(0, len(text), size)])


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("source", "text"),
    [
        (FAMILIES["hermes"], "Use  <tool_call>nonsense</tool_call>  like so"),
        (FAMILIES["hermes"], "    indented\n    more\n"),
        (FAMILIES["hermes"], "The `<tool_call>` tag.\n\nAnd text."),
        (FAMILIES["hermes"], "In Qwen3 `<think>` opens reasoning, and </think> ends it."),
        (FAMILIES["xml"], "a <tool_call>\n<function=add x"),
        (FAMILIES["mistral"], "Not [TOOL_CALLS] yet\n"),
        (FAMILIES["llama"], f"Sure: {ADD}"),
        (FAMILIES["llama"], '{"type": "function", "function": "Bob", "parameters": {}}'),
        (FAMILIES["llama"], '{"type": "function", "function": {"name": "add", "parameters": {}}}'),
        (FAMILIES["bare"], '{"name": "Bob"}'),
        (GLM, "<tool_call>add and more</tool_call>\n"),
        # Cut within a value or a tag: a call without it would look complete.
        (FAMILIES["xml"], "<tool_call><function=add><parameter=a>\n1\n</parameter><parameter=s>\nx"),
        (FAMILIES["xml"], "<tool_call><function=add><parameter=a>\n1\n</parameter><parameter=s>\nx\n</function>"),
        (FAMILIES["xml"], "<tool_call><function=add><parameter=a>\n1\n</parameter><para"),
        (GLM, "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>s</arg_key><arg_value>x"),
        (GLM, "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>s</arg_key>"),
    ],
)
def test_text_that_is_no_call_is_content_as_it_stands(source: str, text: str, size: int) -> None:
    assert parts(source, text, size) == [Content(text)]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        (FAMILIES["bare"], f"{ADD}\n\nThat is all.", [CALLED, Content("That is all.")]),
        (FAMILIES["llama"], '{"type": "function", "function": "add", "parameters": {"a": 1}}', [CALLED]),
        (FAMILIES["llama"], f"```json\n{ADD}\n```\n", [CALLED]),
        (
            FAMILIES["bare"],
            f'[{ADD}, {{"name": "none", "arguments": {{}}}}, {{"name": "find"}}]',
            [CALLED, CallPiece(1, "none", "{}"), CallPiece(2, "find", "{}")],
        ),
        *(
            (f"{{{{ tools }}}} {marker}", f"<think>x</think>\n{ADD}", [Reasoning("x"), CALLED])
            for marker in ("<think>", "</think>")
        ),
        ("{{ tools }} <|python_tag|> [THINK]", f"[THINK]x[/THINK]{ADD}", [Reasoning("x"), CALLED]),
        (FAMILIES["bare"], f'[{ADD}, {{"name": "fi', [CALLED, Content('{"name": "fi')]),
        (FAMILIES["mistral"], f"[TOOL_CALLS][{ADD}] and more ", [CALLED, Content("and more ")]),
        (ARGUMENTS_MARKED, '[TOOL_CALLS]add[ARGS]{"a": 1} Done.', [CALLED, Content("Done.")]),
        (
            ARGUMENTS_MARKED,
            'So:\n[TOOL_CALLS]add{"a": 1}\n\nAnd [TOOL_CALLS]find{}',
            [Content("So:"), CALLED, Content("\nAnd"), CallPiece(1, "find", "{}")],
        ),
        (
            ARGUMENTS_MARKED,
            '[TOOL_CALLS]add[CALL_ID]VvvODy9mT[ARGS]{"a": 1}[TOOL_CALLS]find[CALL_ID]VvvODy9mU[ARGS]{}',
            [CALLED, CallPiece(1, "find", "{}")],
        ),
        (ARGUMENTS_MARKED, '[TOOL_CALLS]add{"a": "]}\\"', [CallPiece(0, "add", '{"a": "]}\\"')]),
        (FAMILIES["hermes"], f"<tool_call>{ADD} as said</tool_call> so", [CALLED, Content("as said\nso")]),
        (FAMILIES["hermes"], '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', [CALLED]),
        (
            FAMILIES["hermes"],
            f'<tool_call>[{ADD}, {{"name": "find"}}]</tool_call>',
            [CALLED, CallPiece(1, "find", "{}")],
        ),
        (FAMILIES["hermes"], f'<tool_call>{ADD}\n{{"name": "find"}}</tool_call>', [CALLED, CallPiece(1, "find", "{}")]),
        (FAMILIES["hermes"], "\n<think>x</think>\n<think> y", [Reasoning("x"), Content("<think> y")]),
        (
            GLM,
            "<think>x</think><tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
            [Reasoning("x"), CALLED],
        ),
    ],
)
def test_text_beside_calls_is_content(source: str, text: str, expected: list[Part], size: int) -> None:
    assert parts(source, text, size) == expected


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("source", "text", "arguments"),
    [
        (FAMILIES["xml"], "<parameter=s>\nx\n</function></tool_call>", {"s": "x"}),
        (
            FAMILIES["xml"],
            "<parameter=a>\n1\n<parameter=s>\nx\n</parameter></function></tool_call>",
            {"a": 1, "s": "x"},
        ),
        (FAMILIES["xml"], "<parameter=s></parameter></parameter></function></tool_call>", {"s": ""}),
        (FAMILIES["xml"], "<parameter=a>\n1\n</parameter>\n", {"a": 1}),
        (GLM, "<arg_key>s</arg_key><arg_value>x</tool_call>", {"s": "x"}),
        (
            GLM,
            "<arg_key>a</arg_key><arg_value>1\n<arg_key>s</arg_key>\n<arg_value>x</arg_value></tool_call>",
            {"a": 1, "s": "x"},
        ),
    ],
)
def test_a_value_without_its_end_ends_at_what_follows(
    source: str, text: str, arguments: dict[str, Any], size: int
) -> None:
    begin = "<tool_call>add" if source == GLM else "<tool_call><function=add>"
    assert parts(source, begin + text, size) == [CallPiece(0, "add", json.dumps(arguments))]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("source", "before", "behind", "end"),
    [
        (FAMILIES["hermes"], '<tool_call>{"name": "add", "arguments": ', "}</tool_call>", "</tool_call>"),
        (
            FAMILIES["hermes"],
            '<tool_call>{"</tool_call>": "</tool_call>", "name": "add", "arguments": ',
            "}",
            "</tool_call>",
        ),
        (FAMILIES["hermes"], '<tool_call>{"x": ["</tool_call>"], "name": "add", "arguments": ', "}", "</tool_call>"),
        (FAMILIES["mistral"], '[TOOL_CALLS][{"name": "add", "arguments": ', "}]", "[TOOL_CALLS]"),
        (ARGUMENTS_MARKED, "[TOOL_CALLS]add[ARGS]", "[TOOL_CALLS]find[ARGS]{}", "[TOOL_CALLS]"),
    ],
)
def test_an_end_of_calls_within_a_text_of_their_json_is_text(
    source: str, before: str, behind: str, end: str, size: int
) -> None:
    arguments = json.dumps({"s": f'{end}{end}\\"{end}', "a": 1})
    first, *more = parts(source, before + arguments + behind, size)
    assert first == CallPiece(0, "add", arguments)
    assert more == ([CallPiece(1, "find", "{}")] if "find" in behind else [])
    # Outside of texts it is one.
    text = '<tool_call>{"name": "add", "arguments": {"s": "x"</tool_call> so'
    assert parts(FAMILIES["hermes"], text, size) == [CallPiece(0, "add", '{"s": "x"'), Content("so")]


def test_calls_that_are_not_written_as_json_take_no_constraint() -> None:
    assert output_format(None, GLM).call is None


@pytest.mark.parametrize(
    ("source", "begin", "piece", "end"),
    [
        *((source, "", " " * 64, "") for source in FAMILIES.values()),
        (ARGUMENTS_MARKED, '[TOOL_CALLS]add[ARGS]{"a": 1}', " " * 64, ""),
        (ARGUMENTS_MARKED, "[TOOL_CALLS]add[ARGS]{", " " * 64, ""),
        (ARGUMENTS_MARKED, '[TOOL_CALLS]add[ARGS]{"', "[TOOL_CALLS]", '"}'),
        (ARGUMENTS_MARKED, "", f"[TOOL_CALLS]add{' ' * 1000}x", ""),
        (FAMILIES["xml"], "<tool_call><function=add>", "<parameter=a>", "</function></tool_call>"),
        (FAMILIES["xml"], "<tool_call><function=add>", "<parameter=", "</function></tool_call>"),
    ],
)
def test_the_time_grows_with_the_output_alone(source: str, begin: str, piece: str, end: str) -> None:
    form = output_format(None, source)
    parser = ResponseParser(form.template, TOOLS, reasoning=True, calls=True, needs_tool=form.needs_tool)
    began = time.process_time()
    for text in (begin, *[piece] * 20_000, end):
        parser.push(text)
    parser.finish()
    # Some 0.1 s; a time that grows with the square is a minute.
    assert time.process_time() - began < 5


class _Slow:
    """An expression that takes all the time that it is given."""

    def __init__(self, pattern: "regex.Pattern[str]") -> None:
        self._pattern = pattern
        self.timeouts: list[float | None] = []

    def search(self, *arguments: Any, timeout: float | None, **more: Any) -> Any:
        self.timeouts.append(timeout)
        return self._pattern.search(*arguments, **more)

    def match(self, *arguments: Any, timeout: float | None) -> Any:
        self.timeouts.append(timeout)
        raise TimeoutError


def test_a_match_that_may_grow_is_bounded_too() -> None:
    pattern = r"<t(?=(?:a|aa)+(?:$|b))"
    spec = {"start_anchor": "A", "fields": {"content": {}, "thinking": {"open_pattern": pattern, "close": "c"}}}
    template = load_response_template(spec)
    anchor = template.regions[0].opens
    assert anchor is not None
    slow = _Slow(anchor.pattern)
    object.__setattr__(anchor, "pattern", slow)
    parser = ResponseParser(template, {}, reasoning=True, calls=True)
    assert parts_of(parser, ["<taab", " and more"]) == [Content("<taab and more")]
    assert len(slow.timeouts) == 2
    assert None not in slow.timeouts


def test_arguments_whose_name_the_anchor_has_end_at_their_bracket() -> None:
    text = '<|channel|>commentary to=functions.add<|message|> {"a": 1} and<|call|>'
    assert parts_of(parser_of(CHANNELS), [text]) == [CALLED, Content("and")]
