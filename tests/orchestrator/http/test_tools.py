"""Tools in chat completions: what the prompt has of them, what the response has of calls and reasoning, and streams."""

import json
import re
from typing import Any

import httpx
import pytest

from outrider import wire
from outrider.constraint import Constraint
from tests.orchestrator.answering import SPECIAL
from tests.orchestrator.http.conftest import CALLS
from tests.orchestrator.http.events import Stream, read
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import Orchestrator

PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "find", "strict": True, "parameters": SCHEMA}}
QUESTION = {"role": "user", "content": "2 + 2?"}
ASKED = {"messages": [QUESTION], "tools": [TOOL]}
BEGIN, END = '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"
MARKS = [256 + SPECIAL.index(name) for name in ("<tool_call>", "</tool_call>")]
ARGUMENTS = '{"a": 2, "b": 2}'


def constraint_of(target: ScriptedTarget) -> Constraint | None:
    """What the latest request's output must follow."""
    return wire.parameters_from_message(target.opened[-1].parameters).constraint


def calls_of(stream: Stream, index: int = 0) -> dict[int, dict[str, Any]]:
    """The calls of a stream, put together as OpenAI's clients do."""
    calls: dict[int, dict[str, Any]] = {}
    for chunk in stream.chunks:
        for choice in chunk["choices"]:
            for piece in choice["delta"].get("tool_calls", []) if choice["index"] == index else []:
                call = calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
                call["id"] += piece.get("id", "")
                call["name"] += piece["function"].get("name", "")
                call["arguments"] += piece["function"]["arguments"]
    return calls


def text_of(stream: Stream, key: str) -> str:
    return "".join(choice["delta"].get(key, "") for chunk in stream.chunks for choice in chunk["choices"])


async def test_calls_and_reasoning_stand_apart_from_the_content(asker: httpx.AsyncClient) -> None:
    answer = (await asker.post(PATH, json=ASKED)).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Let me see.", "Add them.")
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": ARGUMENTS}] * 2
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"
    # The same id: the calls have the same ids.
    again = (await asker.post(PATH, json={**ASKED, "request_id": answer["id"].removeprefix("chatcmpl-")})).json()
    assert again["choices"] == answer["choices"]


async def test_the_usage_counts_the_tokens_of_the_reasoning(asker: httpx.AsyncClient) -> None:
    # A token for each byte, and one for each marker: <think>, the text, </think>.
    body = {"messages": [QUESTION], "request_id": "counted-1"}
    for _ in (1, 2):
        usage = (await asker.post(PATH, json=body)).json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 1 + len("\nEasy.\n") + 1}
    response = (await asker.post("/v1/responses", json={"input": "2 + 2?"})).json()
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 9}


async def test_a_stream_has_the_name_first_and_then_the_arguments(
    asker: httpx.AsyncClient, target: ScriptedTarget
) -> None:
    target.run_len = None
    stream = await read(asker, PATH, {**ASKED, "n": 2, "request_id": "calls-1"})
    whole = (await asker.post(PATH, json={**ASKED, "n": 2, "request_id": "calls-1"})).json()
    for index in (0, 1):
        message = whole["choices"][index]["message"]
        expected = [{"id": call["id"], **call["function"]} for call in message["tool_calls"]]
        assert list(calls_of(stream, index).values()) == expected
        assert stream.text(index) == message["content"]
        assert stream.finish_reason(index) == "tool_calls"
    firsts = [piece for piece in pieces(stream) if piece.get("id")]
    assert all(piece["function"]["name"] == "add" and piece["type"] == "function" for piece in firsts)
    assert all(set(piece) == {"index", "function"} for piece in pieces(stream) if not piece.get("id"))


def pieces(stream: Stream) -> list[dict[str, Any]]:
    deltas = [choice["delta"] for chunk in stream.chunks for choice in chunk["choices"]]
    return [piece for delta in deltas for piece in delta.get("tool_calls", [])]


async def test_a_stream_that_breaks_goes_on_exactly(asker: httpx.AsyncClient, target: ScriptedTarget) -> None:
    body = {**ASKED, "request_id": "broken-1"}
    whole = await read(asker, PATH, body)
    num = len(whole.chunks)
    for cut in (1, 2, num // 2, num - 2, num - 1):
        rest = await read(asker, PATH, body, last=whole.ids[cut - 1])
        before = Stream(chunks=whole.chunks[:cut])
        for key in ("content", "reasoning_content"):
            assert text_of(before, key) + text_of(rest, key) == text_of(whole, key)
        both = Stream(chunks=[*before.chunks, *rest.chunks])
        assert calls_of(both) == calls_of(whole)
        # Also where all calls came before.
        assert rest.finish_reason() == "tool_calls"


async def test_the_two_steps_of_a_tool(asker: httpx.AsyncClient, target: ScriptedTarget) -> None:
    for session in ({}, {"session_id": "two-steps"}):
        first = (await asker.post(PATH, json={**ASKED, **session})).json()["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "4"}]}
            for call in first["tool_calls"]
        ]
        second = await asker.post(PATH, json={**ASKED, **session, "messages": [QUESTION, first, *results]})
        (choice,) = second.json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("The sum is 4.", "stop")
        assert "tool_calls" not in choice["message"]


async def test_content_may_be_null_beside_calls(asker: httpx.AsyncClient) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    answer = await asker.post(PATH, json={"messages": messages})
    assert answer.json()["choices"][0]["message"]["content"] == "The sum is 4."


@pytest.mark.parametrize("more", [{}, {"session_id": "cut-1"}])
async def test_a_call_that_was_cut_short_may_come_back(asker: httpx.AsyncClient, more: dict[str, Any]) -> None:
    said = '<think>\nAdd them.\n</think>\n\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a":'
    # A token for each byte, and one for each marker.
    num_tokens = len(re.sub("<.*?>", "M", said))
    cut = (await asker.post(PATH, json={**ASKED, **more, "max_tokens": num_tokens})).json()["choices"][0]
    assert cut["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":'}
    result = {"role": "tool", "tool_call_id": cut["message"]["tool_calls"][0]["id"], "content": "4"}
    answer = await asker.post(PATH, json={**ASKED, **more, "messages": [QUESTION, cut["message"], result]})
    assert answer.status_code == 200, answer.text


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """The choice among these tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


CHOICES: list[tuple[dict[str, Any], Any]] = [
    ({}, None),
    ({"tool_choice": "auto"}, None),
    ({"tool_choice": "none"}, None),
    ({"parallel_tool_calls": False}, (["add"], [""], False, True)),
    ({"tool_choice": "required"}, (["add"], [SCHEMA], True, False)),
    ({"tool_choice": "required", "parallel_tool_calls": False}, (["add"], [SCHEMA], True, True)),
    ({"tools": [TOOL, OTHER]}, (["add", "find"], ["", SCHEMA], False, False)),
    (
        {"tools": [TOOL, OTHER], "tool_choice": {"type": "function", "function": {"name": "find"}}},
        (["find"], [SCHEMA], True, False),
    ),
    ({"tools": [TOOL, OTHER], "tool_choice": allowed("auto", "add")}, (["add"], [""], False, False)),
    (
        {"tools": [TOOL, OTHER], "tool_choice": allowed("required", "find", "add")},
        (["add", "find"], [SCHEMA] * 2, True, False),
    ),
    # All that there are: as free as without.
    ({"tool_choice": allowed("auto", "add")}, None),
]


async def test_the_choice_of_tools_is_a_constraint(asker: httpx.AsyncClient, target: ScriptedTarget) -> None:
    for more, expected in CHOICES:
        assert (await asker.post(PATH, json={**ASKED, **more})).status_code == 200
        constraint = constraint_of(target)
        if expected is None:
            assert constraint is None
            continue
        names, schemas, at_least_one, stop_after_first = expected
        assert constraint is not None
        tags = constraint.structural_tags
        assert tags is not None
        assert [tag.begin for tag in tags.tags] == [BEGIN.replace("NAME", name) for name in names]
        assert [json.loads(tag.json_schema) if tag.json_schema else "" for tag in tags.tags] == schemas
        assert {(tag.trigger, tag.end) for tag in tags.tags} == {("<tool_call>", END)}
        assert (tags.at_least_one, tags.stop_after_first) == (at_least_one, stop_after_first)
        # The model's own reasoning comes first.
        assert constraint.reasoning_end == "</think>"


async def test_without_a_choice_the_prompt_has_the_tools_and_the_output_is_text(asker: httpx.AsyncClient) -> None:
    answer = (await asker.post(PATH, json={**ASKED, "tool_choice": "none"})).json()["choices"][0]
    assert answer["message"]["content"] == f"Let me see.\n{CALLS}\n{CALLS}"
    assert answer["finish_reason"] == "stop"
    plain = (await asker.post(PATH, json={"messages": [QUESTION]})).json()["choices"][0]
    assert plain["message"] == {
        "role": "assistant",
        "content": "Four.",
        "refusal": None,
        "reasoning_content": "Easy.",
    }


async def test_reasoning_may_be_left_out(asker: httpx.AsyncClient) -> None:
    body = {"messages": [QUESTION], "include_reasoning": False}
    assert "reasoning_content" not in (await asker.post(PATH, json=body)).json()["choices"][0]["message"]
    stream = await read(asker, PATH, body)
    assert (text_of(stream, "reasoning_content"), text_of(stream, "content")) == ("", "Four.")


async def test_reasoning_that_the_template_began_ends_the_same_way(
    asker: httpx.AsyncClient, target: ScriptedTarget
) -> None:
    body = {
        "messages": [QUESTION],
        "chat_template_kwargs": {"thinks": True},
        "response_format": {"type": "json_object"},
    }
    await asker.post(PATH, json=body)
    constraint = constraint_of(target)
    assert constraint is not None
    assert constraint.reasoning_end == "</think>"


async def test_an_answer_or_calls(asker: httpx.AsyncClient, target: ScriptedTarget) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "object"}}}
    assert (await asker.post(PATH, json={**ASKED, "response_format": form, "tools": [TOOL, OTHER]})).status_code == 200
    constraint = constraint_of(target)
    assert constraint is not None
    assert constraint.grammar is not None
    lines = constraint.grammar.splitlines()
    assert lines[0] == "start: answer | calls"
    assert lines[1] == 'answer: %json {"type": "object", "x-guidance": {"whitespace_flexible": false}}'
    # Special tokens are no text of a grammar: they stand by their ids.
    begin, end = (json.dumps(text) for text in (BEGIN.replace("NAME", "add")[11:], END[:-12]))
    assert f"call_0: <[{MARKS[0]}]> {begin} arguments_0 {end} <[{MARKS[1]}]>" in lines
    assert [json.loads(line.partition("%json ")[2]) for line in lines if line.startswith("arguments_1")] == [
        {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
    ]
    # No call at all, or nothing but calls.
    await asker.post(PATH, json={**ASKED, "response_format": form, "tool_choice": "none"})
    assert (constraint_of(target) or constraint).json_schema == '{"type": "object"}'
    await asker.post(PATH, json={**ASKED, "response_format": form, "tool_choice": "required"})
    assert (constraint_of(target) or constraint).structural_tags is not None


OLD_DIALECT = {"$schema": "http://json-schema.org/draft-03/schema#"}
NO_SCHEMAS: list[dict[str, Any]] = [
    {"guided_json": "not json"},
    {"guided_json": "3"},
    {"guided_json": "[" * 5000},
    {"structured_outputs": {"json": "{"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OLD_DIALECT}}},
]


async def test_what_is_no_schema_is_refused_alike_with_tools_and_without(asker: httpx.AsyncClient) -> None:
    for fields in NO_SCHEMAS:
        with_tools, without = [
            await asker.post(PATH, json={"messages": [QUESTION], **tools, **fields})
            for tools in ({"tools": [TOOL]}, {})
        ]
        assert with_tools.status_code == 400, with_tools.text
        assert with_tools.json() == without.json()
        assert with_tools.json()["error"]["param"] == next(iter(fields))


def _named(number: int, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "other"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "other"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "find"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "add"}}}, "tool_choice.type"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tool_choice": allowed("none", "add")}, "tool_choice.allowed_tools.mode"),
    ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    ({"tool_choice": allowed("auto", "add", "find")}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": ""}}}, "tool_choice"),
    ({"tools": [_named(number) for number in range(300)], "tool_choice": "required"}, "tools"),
    ({"tools": [_named(0, {"type": "string"})]}, "tools"),
    ({"tools": [_named(0, {"type": "string"})], "tool_choice": "required"}, "tools"),
    ({"tools": [_named(0, {"description": "x" * 300_000})], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [_named(0, OLD_DIALECT)], "tool_choice": "required"}, "tools"),
    ({"structured_outputs": {"regex": "x"}}, "structured_outputs"),
    ({"guided_choice": ["x"], "tool_choice": "required"}, "guided_choice"),
    ({"guided_grammar": "x", "tool_choice": {"type": "function", "function": {"name": "add"}}}, "guided_grammar"),
    ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages[0].content"),
    ({"messages": [{**QUESTION, "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls"),
    ({"messages": [{**QUESTION, "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
    ({"tools": [{"type": "function", "function": {"name": "f" * 65}}], "tool_choice": "required"}, "tools"),
]


async def test_what_makes_no_sense_is_refused_by_its_name(asker: httpx.AsyncClient) -> None:
    for changed, parameter in WRONG:
        refused = await asker.post(PATH, json={**ASKED, **changed})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == parameter
        assert ": :" not in refused.json()["error"]["message"]


async def test_tokenize_names_its_own_fields(asker: httpx.AsyncClient) -> None:
    named: list[tuple[dict[str, Any], str]] = [
        ({"messages": []}, "messages"),
        ({"messages": [QUESTION] * 3000}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 900_000}]}, "messages"),
        ({"prompt": "x" * 900_000}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"messages": [QUESTION], "tools": [TOOL, TOOL]}, "tools"),
        ({"messages": [QUESTION], "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ]
    for body, field in named:
        refused = await asker.post("/tokenize", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text


async def test_what_clients_say_of_caches_is_accepted(asker: httpx.AsyncClient) -> None:
    part = {"type": "text", "text": "2 + 2?", "prompt_cache_breakpoint": {"mode": "explicit"}}
    body = {"messages": [{"role": "user", "content": [part]}], "prompt_cache_options": {"mode": "explicit"}}
    assert (await asker.post(PATH, json=body)).status_code == 200


async def test_tokenize_takes_tools(asker: httpx.AsyncClient, answering: Orchestrator) -> None:
    plain = (await asker.post("/tokenize", json={"messages": [QUESTION]})).json()
    tools = (await asker.post("/tokenize", json={"messages": [QUESTION], "tools": [TOOL]})).json()
    usage = (await asker.post(PATH, json=ASKED)).json()["usage"]
    assert plain["count"] < tools["count"] == usage["prompt_tokens"]
