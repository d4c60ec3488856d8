"""The `openai` client, unchanged: structured outputs as pydantic models, and tools in two steps."""

from collections.abc import AsyncIterator

import openai
import pytest
from pydantic import BaseModel

from outrider.constraint import Constraint
from tests.orchestrator.http.test_tools import constraint_of
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import Orchestrator


class Sum(BaseModel):
    sum: int


class Add(BaseModel):
    """Adds two numbers."""

    a: int
    b: int


@pytest.fixture
async def client(answering: Orchestrator) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://{answering.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=20) as running:
        yield running


async def test_an_answer_is_parsed_as_a_model(client: openai.AsyncOpenAI, target: ScriptedTarget) -> None:
    answer = await client.chat.completions.parse(
        model="answers", messages=[{"role": "user", "content": "2 + 2? as JSON"}], response_format=Sum
    )
    assert answer.choices[0].message.parsed == Sum(sum=4)
    constraint = constraint_of(target)
    assert constraint is not None
    assert '"sum"' in str(constraint.json_schema)


async def test_calls_are_parsed_as_models(client: openai.AsyncOpenAI, target: ScriptedTarget) -> None:
    tool = openai.pydantic_function_tool(Add, name="add")
    answer = await client.chat.completions.parse(
        model="answers", messages=[{"role": "user", "content": "only calls"}], tools=[tool], response_format=Sum
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.parsed_arguments for call in calls] == [Add(a=2, b=2)] * 2
    # An answer in the form of the model, or calls.
    assert isinstance(constraint_of(target), Constraint)
    assert "start: answer | calls" in str((constraint_of(target) or Constraint(regex="x")).grammar)


async def test_a_stream_of_calls_is_put_together_and_answered(client: openai.AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(Add, name="add")
    messages: list = [{"role": "user", "content": "2 + 2?"}]
    async with client.chat.completions.stream(model="answers", messages=messages, tools=[tool]) as stream:
        events = [event async for event in stream]
        first = (await stream.get_final_completion()).choices[0]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.parsed_arguments) for event in done] == [("add", Add(a=2, b=2))] * 2
    assert first.finish_reason == "tool_calls"
    assert first.message.tool_calls is not None
    messages.append(first.message)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in first.message.tool_calls]
    second = await client.chat.completions.create(model="answers", messages=messages, tools=[tool])
    assert second.choices[0].message.content == "The sum is 4."
    assert second.choices[0].finish_reason == "stop"
