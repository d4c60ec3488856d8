"""Tools, reasoning and structured outputs in the Responses API: items, events, streams that break, OpenAI's client."""

import gc
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from orchestrator.http.response_bodies import (
    FunctionCallItem,
    FunctionOutputItem,
    InputMessage,
    ReasoningItem,
    ReasoningPart,
)
from orchestrator.http.response_input import input_messages
from tests.orchestrator.http.test_responses import URL, Event, events_of, text_of
from tests.orchestrator.http.test_tools import ARGUMENTS, SCHEMA, constraint_of
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import Orchestrator

TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}
BODY: dict[str, Any] = {"input": "2 + 2?", "tools": [TOOL]}


class Sum(BaseModel):
    sum: int


@pytest.fixture
async def client(answering: Orchestrator) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://{answering.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=20) as running:
        yield running


def pieces(events: list[Event], kind: str, index: int) -> str:
    name = f"response.{kind}.delta"
    return "".join(
        event.data["delta"] for event in events if event.name == name and event.data["output_index"] == index
    )


def changes_of(events: list[Event]) -> list[str]:
    """All events but those with new text, which a break may cut in two."""
    return [event.name.removeprefix("response.") for event in events if not event.name.endswith(".delta")]


async def test_the_output_has_items_for_reasoning_text_and_calls(asker: httpx.AsyncClient) -> None:
    content = (await asker.post(URL, json=BODY)).json()
    Response.model_validate(content, strict=True)
    reasoning, message, *calls = content["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "Add them.")
    assert (message["type"], message["content"][0]["text"]) == ("message", "Let me see.")
    assert [(call["type"], call["name"], call["arguments"]) for call in calls] == [
        ("function_call", "add", ARGUMENTS)
    ] * 2
    assert len({item["id"] for item in content["output"]}) == 4
    assert {item["status"] for item in content["output"]} == {"completed"}
    assert content["status"] == "completed"
    assert content["tools"] == [TOOL]


async def test_a_stream_has_the_events_of_each_item(asker: httpx.AsyncClient, target: ScriptedTarget) -> None:
    body = {**BODY, "request_id": "items-1"}
    events = await events_of(asker, body)
    whole = (await asker.post(URL, json=body)).json()
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    changes = changes_of(events)
    message = ["output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"]
    reasoning = ["reasoning_text.done" if name == "output_text.done" else name for name in message]
    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert changes == ["created", "in_progress", *reasoning, *message, *call, *call, "completed"]
    assert pieces(events, "reasoning_text", 0) == "Add them."
    assert pieces(events, "output_text", 1) == "Let me see."
    assert pieces(events, "function_call_arguments", 2) == pieces(events, "function_call_arguments", 3) == ARGUMENTS
    done = [event.data["item"] for event in events if event.name == "response.output_item.done"]
    assert done == whole["output"] == events[-1].data["response"]["output"]


async def test_a_stream_that_breaks_goes_on_exactly(asker: httpx.AsyncClient) -> None:
    body = {**BODY, "request_id": "items-2"}
    events = await events_of(asker, body)
    kinds = ("reasoning_text", "output_text", "function_call_arguments", "function_call_arguments")
    for last in events[2 : len(events) - 6 : 3]:
        # All that has its position came with it.
        had = events[: max(number for number, event in enumerate(events) if event.id == last.id) + 1]
        rest = await events_of(asker, body, last.id)
        for index, kind in enumerate(kinds):
            assert pieces(had, kind, index) + pieces(rest, kind, index) == pieces(events, kind, index)
        numbers = [event.data["sequence_number"] for event in rest]
        assert numbers == sorted(set(numbers))
        assert numbers[0] > had[-1].data["sequence_number"]
        assert rest[-1].data["response"]["output"] == events[-1].data["response"]["output"]
        assert changes_of(had) + changes_of(rest) == changes_of(events)


async def test_an_output_without_parts_is_an_empty_message(asker: httpx.AsyncClient) -> None:
    body = {"input": "2 + 2?", "max_output_tokens": 1}
    content = (await asker.post(URL, json=body)).json()
    assert [(item["type"], item["status"]) for item in content["output"]] == [("message", "incomplete")]
    events = await events_of(asker, {**body, "speculation": {"report": True}})
    assert [event.data["type"] for event in events][-2:] == ["response.output_item.done", "response.incomplete"]
    assert any("speculation" in event.data for event in events)
    assert text_of(events) == ""


async def test_two_steps_with_openais_client(client: openai.AsyncOpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "2 + 2?"}]
    tool = openai.pydantic_function_tool(Sum, name="add")["function"]
    first = await client.responses.parse(model="answers", input=items, tools=[{"type": "function", **BODY["tools"][0]}])
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"a": 2, "b": 2}] * 2
    assert tool["name"] == "add"
    items += first.output
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "4"} for call in calls]
    second = await client.responses.create(model="answers", input=items, tools=BODY["tools"])
    assert second.output_text == "The sum is 4."
    # Streamed, and put together by the client.
    async with client.responses.stream(model="answers", input="2 + 2?", tools=BODY["tools"]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert done == [ARGUMENTS] * 2


async def test_text_in_the_form_of_a_model(client: openai.AsyncOpenAI, target: ScriptedTarget) -> None:
    answer = await client.responses.parse(model="answers", input="2 + 2? as JSON", text_format=Sum)
    assert answer.output_parsed == Sum(sum=4)
    constraint = constraint_of(target)
    assert constraint is not None
    assert json.loads(constraint.json_schema or "")["required"] == ["sum"]
    assert constraint.reasoning_end == "</think>"
    await client.responses.create(model="answers", input="x", text={"format": {"type": "json_object"}})
    assert (constraint_of(target) or constraint).json_object


async def test_items_of_earlier_answers_are_messages(asker: httpx.AsyncClient, answering: Orchestrator) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": ARGUMENTS}
    items = [
        {"role": "user", "content": "2 + 2?"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me."}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "function_call_output", "call_id": "c2", "output": "4", "name": "add", "caller": {"type": "direct"}},
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}} for name in ("c1", "c2")
    ]
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "Let me.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
    ]
    chat = (await asker.post("/v1/chat/completions", json={"messages": messages})).json()
    response = (await asker.post(URL, json={"input": items})).json()
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def _item(kind: str, text: str) -> Any:
    match kind:
        case "reasoning":
            return ReasoningItem(type="reasoning", content=[ReasoningPart(type="reasoning_text", text=text)])
        case "call":
            return FunctionCallItem(type="function_call", call_id=text, name="f", arguments="{}")
        case "result":
            return FunctionOutputItem(type="function_call_output", call_id=text, output="")
    return InputMessage(role="assistant", content=text)


# Items, and the answers that they are: text, reasoning, calls.
ANSWERS: list[tuple[list[tuple[str, str]], list[tuple[str, str, list[str]]]]] = [
    ([("call", "c"), ("text", "a")], [("a", "", ["c"])]),
    ([("text", "a"), ("reasoning", "r"), ("call", "c")], [("a", "r", ["c"])]),
    ([("reasoning", "r"), ("text", "a"), ("call", "c"), ("text", "b"), ("reasoning", "s")], [("ab", "rs", ["c"])]),
    ([("text", "a"), ("text", "b"), ("call", "c")], [("a", "", []), ("b", "", ["c"])]),
    ([("call", "c"), ("result", "c"), ("call", "d")], [("", "", ["c"]), ("", "", ["d"])]),
]


@pytest.mark.parametrize(("items", "answers"), ANSWERS)
def test_what_follows_each_other_is_one_answer(
    items: list[tuple[str, str]], answers: list[tuple[str, str, list[str]]]
) -> None:
    messages = [item for item in input_messages([_item(*item) for item in items]) if item.role == "assistant"]
    found = [
        (item.text, item.reasoning_content or "", [call.id for call in item.tool_calls or ()]) for item in messages
    ]
    assert found == answers


def test_many_calls_in_a_row_take_linear_time() -> None:
    def seconds(num: int) -> float:
        items = [_item("call", str(number)) for number in range(num)]
        # A collection would go through all that the tests before left.
        gc.disable()
        try:
            began = time.thread_time()
            (message,) = input_messages(items)
            assert len(message.tool_calls or ()) == num
            return time.thread_time() - began
        finally:
            gc.enable()

    # 16 times as many: where each call built the answer anew, it grew with the square of their number.
    assert min(seconds(16_000) for _ in range(3)) < 60 * min(seconds(1000) for _ in range(3))


async def test_a_tool_that_must_be_called(asker: httpx.AsyncClient, target: ScriptedTarget) -> None:
    for choice in ("required", {"type": "function", "name": "add"}):
        content = (await asker.post(URL, json={**BODY, "tool_choice": choice, "parallel_tool_calls": False})).json()
        assert (content["tool_choice"], content["parallel_tool_calls"]) == (choice, False)
        constraint = constraint_of(target)
        assert constraint is not None
        assert constraint.structural_tags is not None
        assert constraint.structural_tags.at_least_one
        assert constraint.structural_tags.stop_after_first
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    tools = [TOOL, {**TOOL, "name": "find"}]
    content = (await asker.post(URL, json={**BODY, "tools": tools, "tool_choice": choice})).json()
    assert Response.model_validate(content, strict=True).model_dump()["tool_choice"] == choice
    tags = (constraint_of(target) or constraint).structural_tags
    assert tags is not None
    assert ([tag.trigger for tag in tags.tags], tags.at_least_one) == (["<tool_call>"], False)
    for changed, field in (
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tool_choice": {**choice, "tools": [{"type": "function", "name": "find"}]}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "find"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "text", "schema": SCHEMA}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "schema": SCHEMA}}}, "text.format.schema"),
    ):
        refused = await asker.post(URL, json={**BODY, **changed})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
