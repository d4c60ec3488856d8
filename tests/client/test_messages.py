"""Messages, tools and parts of the client: what is sent, what comes back, what is refused by its place."""

import json
from typing import Any

import pytest

from outrider.client import ContentPart, Delta, Generation, GenerationRequest, Message, ReasoningPart, Tool
from outrider.client.events import Finished, event_from_message
from outrider.client.messages import ToolCall
from outrider.client.parts import ToolCallPart
from outrider.client.statistics import Statistics
from outrider.errors import InvalidArgument
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import tokens_pb2

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
ADD = Tool("add", "Adds.", SCHEMA)
QUESTION = Message("user", "2 + 2?")
CALL = ToolCall("c1", "add", '{"a": 2}')
ANSWER = Message("assistant", "Let me.", "Hm.", (CALL,))
ONLY = {"role": "assistant", "tool_calls": [CALL]}
RESULT = Message("tool", "4", tool_call_id="c1")


def chat_of(**given: Any) -> pb.Chat:
    return GenerationRequest(**given).to_message().chat


def test_messages_and_tools_are_sent_whole() -> None:
    chat = chat_of(messages=[QUESTION, ANSWER, RESULT], tools=[ADD], template_variables={"enable_thinking": False})
    assert [(item.role, item.content) for item in chat.messages] == [item[:2] for item in (QUESTION, ANSWER, RESULT)]
    assert chat.messages[1].reasoning == "Hm."
    assert list(chat.messages[1].tool_calls) == [pb.ToolCall(id="c1", name="add", arguments='{"a": 2}')]
    assert chat.messages[2].tool_call_id == "c1"
    (tool,) = chat.tools
    assert (tool.name, tool.description, json.loads(tool.parameters)) == ("add", "Adds.", SCHEMA)
    assert json.loads(chat.template_variables) == {"enable_thinking": False}
    assert (chat.output_parsing.reasoning, chat.output_parsing.tool_calls) == (True, True)


def test_mappings_are_messages_calls_and_tools() -> None:
    answer = {**ANSWER._asdict(), "tool_calls": [CALL._asdict()]}
    tool = {**ADD._asdict(), "parameters": json.dumps(SCHEMA, ensure_ascii=False)}
    as_mappings = chat_of(messages=[QUESTION._asdict(), answer, RESULT._asdict()], tools=[tool])
    assert as_mappings == chat_of(messages=[QUESTION, ANSWER, RESULT], tools=[ADD])
    # An answer that only calls tools needs no content.
    assert chat_of(messages=[QUESTION, ONLY]).messages[1].content == ""


def test_parts_are_asked_for_with_tools_or_by_name() -> None:
    assert not chat_of(messages=[QUESTION]).HasField("output_parsing")
    assert not chat_of(messages=[QUESTION], tools=[ADD], with_parts=False).HasField("output_parsing")
    parsing = chat_of(messages=[QUESTION], with_parts=True).output_parsing
    assert (parsing.reasoning, parsing.tool_calls) == (True, False)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "name": "f"}]}]},
            "messages[0].tool_calls[0].arguments",
        ),
        ({"messages": [{**ANSWER._asdict(), "tool_calls": "x"}]}, "messages[0].tool_calls"),
        ({"messages": [{**ANSWER._asdict(), "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{**QUESTION._asdict(), "reasoning": 1}]}, "messages[0].reasoning"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [QUESTION], "tools": [{"description": "x"}]}, "tools[0].name"),
        ({"messages": [QUESTION], "tools": [{"name": "f", "schema": {}}]}, "tools[0].schema"),
        ({"messages": [QUESTION], "tools": [Tool("f", "", {"x": object()})]}, "tools[0].parameters"),
        ({"messages": [QUESTION], "tools": [Tool("f", "", 1)]}, "tools[0].parameters"),  # type: ignore[arg-type]
        ({"messages": [QUESTION], "tools": ADD}, "tools"),
        ({"text": "x", "tools": [ADD]}, "tools"),
        ({"text": "x", "with_parts": True}, "with_parts"),
        ({"text": "x", "template_variables": {"a": 1}}, "template_variables"),
        ({"messages": [QUESTION], "template_variables": {"a": object()}}, "template_variables"),
    ],
)
def test_what_is_wrong_is_refused_by_its_place(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        chat_of(**given)
    assert refused.value.field == field


PARTS = [
    pb.OutputPart(reasoning="Hm."),
    pb.OutputPart(content="Let me."),
    pb.OutputPart(tool_call=pb.ToolCallPart(index=0, id="c1", name="add", arguments='{"a"')),
    pb.OutputPart(tool_call=pb.ToolCallPart(index=0, arguments=": 2}")),
]


def test_parts_add_up_to_the_message_that_the_next_request_has() -> None:
    generation = Generation()
    generation.add(event_from_message(pb.GenerateResponse(delta=pb.Delta(parts=PARTS[:3]))))
    end = pb.GenerateResponse(finished=pb.Finished(finish_reason=1, parts=PARTS[3:]))
    generation.add(event_from_message(end))
    assert generation.message == ANSWER
    event = event_from_message(pb.GenerateResponse(delta=pb.Delta(parts=PARTS)))
    assert isinstance(event, Delta)
    assert event.parts == (
        ReasoningPart("Hm."),
        ContentPart("Let me."),
        ToolCallPart(0, "c1", "add", '{"a"'),
        ToolCallPart(0, "", "", ": 2}"),
    )
    # A stream that was resumed within a call has only the rest of it.
    rest = Generation()
    rest.add(event_from_message(pb.GenerateResponse(delta=pb.Delta(parts=PARTS[3:]))))
    assert rest.tool_calls == []


def test_drafters_come_beside_their_tokens_and_counts_beside_the_statistics() -> None:
    names = ["eagle3", "eagle3+suffix", ""]
    delta = event_from_message(pb.GenerateResponse(delta=pb.Delta(token_ids=[1, 2, 3], drafters=names)))
    assert isinstance(delta, Delta)
    assert delta.drafters == tuple(names)
    counts = {"eagle3": 4, "eagle3+suffix": 2}
    statistics = pb.GenerationStatistics(num_accepted_tokens=6, num_accepted_tokens_by_drafter=counts)
    reason = tokens_pb2.FINISH_REASON_STOP
    finished = event_from_message(
        pb.GenerateResponse(finished=pb.Finished(finish_reason=reason, statistics=statistics))
    )
    assert isinstance(finished, Finished)
    assert finished.statistics.num_accepted_tokens_by_drafter == counts
    # Of a draft with one drafter nothing is sent.
    plain = event_from_message(pb.GenerateResponse(delta=pb.Delta(token_ids=[1])))
    assert isinstance(plain, Delta)
    assert plain.drafters == ()
    assert Statistics().num_accepted_tokens_by_drafter == {}
