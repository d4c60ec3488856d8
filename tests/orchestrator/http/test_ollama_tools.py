"""Tools, thinking and formats in Ollama's API, with its client: calls come whole, and their arguments are objects."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import ollama
import pytest

from orchestrator.http.ollama_messages import (
    OllamaCall,
    OllamaFunction,
    OllamaMessage,
    call_of,
    chat_messages_of,
)
from orchestrator.http.parsing import CallSoFar
from outrider.constraint import Constraint
from tests.orchestrator.http.test_tools import SCHEMA, TOOL, constraint_of
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import Orchestrator

QUESTION = {"role": "user", "content": "2 + 2?"}
BODY: dict[str, Any] = {"messages": [QUESTION], "tools": [TOOL]}


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


@pytest.fixture
async def client(answering: Orchestrator) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(f"http://{answering.http_address}", timeout=20, verify=False) as known:
        yield known


async def lines_of(http: httpx.AsyncClient, body: dict[str, Any], last: str = "") -> list[dict[str, Any]]:
    headers = {"Last-Event-ID": last} if last else {}
    async with http.stream("POST", "/api/chat", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        return [json.loads(line) async for line in response.aiter_lines()]


async def test_two_steps_with_ollamas_client(client: ollama.AsyncClient) -> None:
    messages: list[Any] = [QUESTION]
    first = (await client.chat("answers", messages, tools=[add])).message
    assert (first.content, first.thinking) == ("Let me see.", "Add them.")
    assert first.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in first.tool_calls] == [
        ("add", {"a": 2, "b": 2})
    ] * 2
    messages.append(first)
    messages += [{"role": "tool", "tool_name": "add", "content": "4"} for _ in first.tool_calls]
    second = await client.chat("answers", messages, tools=[add])
    assert (second.message.content, second.done_reason) == ("The sum is 4.", "stop")


async def test_a_stream_has_calls_whole(asker: httpx.AsyncClient) -> None:
    lines = [line["message"] for line in await lines_of(asker, BODY)]
    whole = (await asker.post("/api/chat", json={**BODY, "stream": False})).json()["message"]
    assert "".join(line["content"] for line in lines) == whole["content"] == "Let me see."
    assert "".join(line.get("thinking", "") for line in lines) == whole["thinking"] == "Add them."
    calls = [call["function"] for line in lines for call in line.get("tool_calls", [])]
    assert calls == [call["function"] for call in whole["tool_calls"]]
    assert [call["arguments"] for call in calls] == [{"a": 2, "b": 2}] * 2


async def test_a_stream_that_breaks_within_a_call_has_all_of_it(asker: httpx.AsyncClient) -> None:
    body = {**BODY, "request_id": "ollama-1", "speculation": {"report": True}}
    lines = await lines_of(asker, body)
    num, cut = 0, []
    for number, line in enumerate(lines[:-1]):
        num += len(line.get("speculation", {}).get("token_ids", []))
        cut.append((number + 1, num))
    for number, offset in cut[:: max(1, len(cut) // 8)]:
        rest = await lines_of(asker, body, f"ollama-1:{offset}")
        for key in ("content", "thinking"):
            texts = ["".join(line["message"].get(key, "") for line in part) for part in (lines[:number], rest, lines)]
            assert texts[0] + texts[1] == texts[2]
        counts = [sum(len(line["message"].get("tool_calls", [])) for line in part) for part in (lines[:number], rest)]
        assert sum(counts) == 2
    late = await lines_of(asker, body, f"ollama-1:{num + 5}")
    assert "Last-Event-ID" in late[-1]["error"]


async def test_a_call_that_is_cut_short_has_no_arguments(asker: httpx.AsyncClient) -> None:
    body = {**BODY, "stream": False, "options": {"num_predict": 60}}
    message = (await asker.post("/api/chat", json=body)).json()["message"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{}]


async def test_formats_are_constraints_and_thinking_is_a_variable(
    client: ollama.AsyncClient, target: ScriptedTarget, asker: httpx.AsyncClient
) -> None:
    asked = [{"role": "user", "content": "2 + 2? as JSON"}]
    whole = await client.chat("answers", asked, format="json")
    assert whole.message.content == '{"sum": 4}'
    assert constraint_of(target) == Constraint(json_object=True, reasoning_end="</think>")
    await client.generate("answers", "as JSON", format=SCHEMA, think=False)
    assert constraint_of(target) == Constraint(json_schema=json.dumps(SCHEMA), reasoning_end="</think>")
    await client.generate("answers", "<|im_start|>assistant\n", format=SCHEMA, raw=True)
    assert constraint_of(target) == Constraint(json_schema=json.dumps(SCHEMA))
    # An empty schema is one that any JSON follows.
    await client.generate("answers", "<|im_start|>assistant\n", format={}, raw=True)
    assert constraint_of(target) == Constraint(json_schema="{}")
    thought = await client.generate("answers", "2 + 2?", think="high")
    assert (thought.response, thought.thinking) == ("Four.", "Easy.")
    shown = await client.show("answers")
    assert shown.capabilities == ["completion", "tools", "thinking"]


def test_arguments_have_no_numbers_that_are_none_in_json() -> None:
    called = call_of(CallSoFar(0, "c", "add", '{"a": 1e999, "b": NaN, "c": [-Infinity], "d": 1.5}'))
    assert called["function"]["arguments"] == {"a": "1e999", "b": "NaN", "c": ["-Infinity"], "d": 1.5}


def test_results_go_to_the_calls_of_their_names() -> None:
    def call(name: str, own: str | None = None) -> OllamaCall:
        return OllamaCall(id=own, function=OllamaFunction(name=name, arguments={"é": 1}))

    messages = chat_messages_of(
        [
            OllamaMessage(role="assistant", thinking="Hm.", tool_calls=[call("f"), call("g"), call("f", "own")]),
            OllamaMessage(role="tool", content="1", tool_name="g"),
            OllamaMessage(role="tool", content="2", tool_name="f"),
            OllamaMessage(role="tool", content="3"),
            OllamaMessage(role="tool", content="4", tool_name="f"),
            OllamaMessage(role="tool", content="5", tool_call_id="known"),
        ]
    )
    calls = messages[0].tool_calls or []
    assert [item.id for item in calls] == ["call00000", "call00001", "own"]
    assert calls[0].function.arguments == '{"é": 1}'
    assert messages[0].reasoning_content == "Hm."
    assert [item.tool_call_id for item in messages[1:]] == ["call00001", "call00000", "own", None, "known"]


def test_a_result_goes_to_no_call_that_another_result_has_or_that_an_earlier_answer_made() -> None:
    def answer(*ids: str) -> OllamaMessage:
        calls = [OllamaCall(id=own, function=OllamaFunction(name="f")) for own in ids]
        return OllamaMessage(role="assistant", tool_calls=calls)

    result = OllamaMessage(role="tool", content="1", tool_name="f")
    messages = chat_messages_of(
        [answer("a"), answer("b", "c"), result.model_copy(update={"tool_call_id": "b"}), result]
    )
    assert [item.tool_call_id for item in messages[2:]] == ["b", "c"]


async def test_more_calls_than_an_answer_may_have_are_refused_at_once(asker: httpx.AsyncClient) -> None:
    calls = [{"function": {"name": "f"}}] * 129
    refused = await asker.post("/api/chat", json={"messages": [QUESTION, {"role": "assistant", "tool_calls": calls}]})
    assert (refused.status_code, refused.json()["error"].partition(":")[0]) == (400, "messages[1].tool_calls")
