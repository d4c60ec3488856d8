"""Tools and parts through the service: what a request may have, what its stream has, and how it is resumed."""

import json
from collections.abc import AsyncIterator

import pytest

from outrider.client import AsyncClient, GenerationRequest, Message, Tool
from outrider.client.events import collected
from outrider.errors import InvalidArgument
from outrider.v1 import generation_pb2 as pb
from tests.orchestrator.answering import give_answers, model_files
from tests.orchestrator.api.test_servicer import new_id
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import Orchestrator, orchestrating, text_of, tokens_of
from tests.orchestrator.text.templates import QWEN, WITH_TOOLS

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def answer(prompt: str) -> str:
    if "<|im_start|>tool\n" in prompt:
        return "<think>Got it.</think>It is 4."
    return f"<think>\nHm 🙂.\n</think>\n\nLet me see. \n{CALL}{CALL}"


@pytest.fixture
async def answerer(session_store_url: str) -> AsyncIterator[Orchestrator]:
    async with ScriptedTarget() as target:
        give_answers(target, model_files(WITH_TOOLS, QWEN), answer)
        async with orchestrating(session_store_url, (target,)) as running:
            yield running


def chatting(*messages: pb.ChatMessage, tools: tuple[str, ...] = ("add",), **more: str) -> pb.GenerateRequest:
    request = pb.GenerateRequest(request_id=new_id(), **more)
    request.chat.messages.extend(messages or [pb.ChatMessage(role="user", content="2 + 2?")])
    for name in tools:
        request.chat.tools.add(name=name, description="Adds.", parameters=SCHEMA)
    request.chat.output_parsing.reasoning = request.chat.output_parsing.tool_calls = True
    return request


def whole(events: list[pb.GenerateResponse]) -> tuple[str, str, list[tuple[int, str, str, str]]]:
    """Content, reasoning, and the calls: index, id, name, arguments."""
    content = reasoning = ""
    calls: dict[int, tuple[str, str, str]] = {}
    for event in events:
        for part in (*event.delta.parts, *event.finished.parts):
            content += part.content
            reasoning += part.reasoning
            if part.HasField("tool_call"):
                call = part.tool_call
                before = calls.get(call.index, ("", "", ""))
                calls[call.index] = (before[0] + call.id, before[1] + call.name, before[2] + call.arguments)
    return content, reasoning, [(index, *call) for index, call in calls.items()]


def described(text: str) -> pb.GenerateRequest:
    request = chatting()
    request.chat.tools[0].description = text
    return request


async def test_a_stream_has_parts_beside_its_text(answerer: Orchestrator) -> None:
    events = await answerer.events(chatting())
    content, reasoning, calls = whole(events)
    assert (content, reasoning) == ("Let me see.", "Hm 🙂.")
    assert [call[2:] for call in calls] == [("add", '{"a": 2}')] * 2
    assert len({call[1] for call in calls}) == 2
    assert all(len(call[1]) == 9 and call[1].isalnum() for call in calls)
    assert "Let me see. \n" in text_of(events)
    assert not any("<think>" in event.delta.text for event in events)


async def test_without_asking_there_are_none(answerer: Orchestrator) -> None:
    request = chatting()
    request.chat.ClearField("output_parsing")
    assert whole(await answerer.events(request)) == ("", "", [])


async def test_a_stream_resumed_at_any_token_has_the_parts_that_follow(answerer: Orchestrator) -> None:
    request = chatting()
    events = await answerer.events(request)
    content, reasoning, calls = whole(events)
    num = len(tokens_of(events))
    for offset in (0, 1, 12, 20, 40, num - 3, num):
        request.resume_offset = offset
        rest = whole(await answerer.events(request))
        assert content.endswith(rest[0])
        assert reasoning.endswith(rest[1])
        for index, call_id, name, arguments in rest[2]:
            assert calls[index][3].endswith(arguments)
            assert (call_id, name) in (calls[index][1:3], ("", ""))
    # At the end nothing is left, and at the beginning everything is.
    assert rest == ("", "", [])
    request.resume_offset = 0
    assert whole(await answerer.events(request)) == (content, reasoning, calls)


async def test_results_go_on_with_a_session(answerer: Orchestrator) -> None:
    session_id = new_id()
    first = whole(await answerer.events(chatting(session_id=session_id)))
    results = [pb.ChatMessage(role="tool", content="4", tool_call_id=call[1]) for call in first[2]]
    # The new messages alone, or the whole conversation as clients know it.
    events = await answerer.events(chatting(*results, session_id=session_id))
    assert whole(events) == ("It is 4.", "Got it.", [])
    other = new_id()
    await answerer.events(chatting(session_id=other))
    answered = pb.ChatMessage(role="assistant", content=first[0], reasoning=first[1])
    for _, call_id, name, arguments in first[2]:
        answered.tool_calls.add(id=call_id, name=name, arguments=arguments)
    request = chatting(pb.ChatMessage(role="user", content="2 + 2?"), answered, *results, session_id=other)
    request.chat.with_history = True
    again = await answerer.events(request)
    assert whole(again) == whole(events)
    assert again[0].accepted.num_prompt_tokens == events[0].accepted.num_prompt_tokens


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (chatting(tools=("add", "add")), "tools"),
        (chatting(tools=("a b",)), "tools"),
        (chatting(tools=tuple(f"f{number}" for number in range(129))), "tools"),
        (
            chatting(pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f", arguments="{}")] * 129)),
            "tool_calls",
        ),
        (chatting(pb.ChatMessage(role="user", content="x" * 10**6)), "prompt"),
        (described("x" * 2**18), "tools"),
        (chatting(pb.ChatMessage(role="assistant", reasoning="x" * 10**6)), "prompt"),
    ],
)
async def test_too_much_or_wrong_is_refused(answerer: Orchestrator, request_: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await answerer.events(request_)
    assert refused.value.field == field


async def test_two_steps_with_the_python_client(answerer: Orchestrator) -> None:
    tool = Tool("add", "Adds.", json.loads(SCHEMA))
    question = Message("user", "2 + 2?")
    async with AsyncClient(answerer.address) as client:
        first = await collected(client.generate(GenerationRequest(messages=[question], tools=[tool])))
        assert (first.content, first.reasoning) == ("Let me see.", "Hm 🙂.")
        assert [call.name for call in first.tool_calls] == ["add", "add"]
        results = [Message("tool", "4", tool_call_id=call.id) for call in first.tool_calls]
        messages = [question, first.message, *results]
        second = await collected(client.generate(GenerationRequest(messages=messages, tools=[tool])))
        assert second.message == Message("assistant", "It is 4.", "Got it.")
