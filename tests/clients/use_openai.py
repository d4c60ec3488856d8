"""The `openai` package."""

import os
from typing import Any, Literal

import openai
from pydantic import BaseModel
from report import call, expect, refused

MODEL, KEY, URL = os.environ["MODEL"], os.environ["KEY"], os.environ["URL"]
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0, timeout=60)


class Weather(BaseModel):
    """The weather at a place."""

    sky: Literal["clear", "cloudy"]
    is_warm: bool


def chat(**more: Any) -> Any:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "seed": 7, **more}
    return client.chat.completions.create(**asked)


def text(**more: Any) -> str:
    return str(chat(**more).choices[0].message.content)


def whole() -> None:
    answer = chat()
    expect(answer.choices[0].finish_reason in ("length", "stop"), answer)
    expect(0 < answer.usage.completion_tokens <= 24, answer.usage)
    expect(answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens)
    expect("speculative_decoding" in answer.model_extra["metrics"])


def streamed() -> None:
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect(said == text(), said)
    expect(chunks[-1].usage.completion_tokens > 0)
    expect(chunks[0].choices[0].delta.role == "assistant")


def helper() -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=24, seed=7) as stream:
        # Its final completion is none for a text that ends by its length: so the package has it.
        said = "".join(event.delta for event in stream if event.type == "content.delta")
    expect(said == text(), said)


def seeds() -> None:
    expect(text(seed=1) == text(seed=1) != text(seed=2))


def choices() -> None:
    answer = chat(n=2)
    expect([choice.index for choice in answer.choices] == [0, 1])
    expect(answer.choices[0].message.content == text())
    expect(answer.choices[0].message.content != answer.choices[1].message.content)
    both: dict[int, str] = {0: "", 1: ""}
    for chunk in chat(n=2, stream=True):
        for choice in chunk.choices:
            both[choice.index] += choice.delta.content or ""
    expect([both[0], both[1]] == [choice.message.content for choice in answer.choices])


def logprobs() -> None:
    content = chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    expect(content and all(len(item.top_logprobs) == 3 and item.logprob <= 0 for item in content))


def stop() -> None:
    said = text()
    letter = said[8]
    answer = chat(stop=[letter])
    expect(answer.choices[0].finish_reason == "stop")
    expect(answer.choices[0].message.content == said[: said.index(letter)])


def completions() -> None:
    asked: Any = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 8, "seed": 3}
    answer = client.completions.create(**asked, logprobs=2)
    expect(len(answer.choices) == 2 and answer.usage.completion_tokens == 16, answer)
    said = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            said[choice.index] += choice.text
    expect(said == [choice.text for choice in answer.choices], said)
    echoed = client.completions.create(**asked, echo=True)
    expect(echoed.choices[1].text == "b" + said[1])
    ids: Any = {"model": MODEL, "prompt": [70, 71, 72], "max_tokens": 4}
    expect(client.completions.create(**ids).usage.prompt_tokens == 3)


def models() -> None:
    expect([model.id for model in client.models.list()] == [MODEL])


def wrong_model() -> None:
    error: Any = refused(openai.NotFoundError, lambda: chat(model="another"))
    expect(error.param == "model", error)


def wrong_parameter() -> None:
    error: Any = refused(openai.BadRequestError, lambda: chat(temperature=-1))
    expect(error.param == "temperature", error)
    error = refused(openai.BadRequestError, lambda: chat(response_format={"type": "json_schema"}))
    expect(error.param == "response_format.json_schema", error)


def long_prompt() -> None:
    error: Any = refused(
        openai.BadRequestError, lambda: chat(messages=[{"role": "user", "content": "word " * 200_000}])
    )
    expect(error.param == "messages", error)


def wrong_key() -> None:
    refused(openai.AuthenticationError, lambda: stranger.models.list())


def responses() -> None:
    answer = client.responses.create(model=MODEL, input="hello", max_output_tokens=16)
    expect(answer.output_text and answer.usage.output_tokens > 0, answer)
    said = ""
    for event in client.responses.create(model=MODEL, input="hello", max_output_tokens=16, stream=True):
        said += event.delta if event.type == "response.output_text.delta" else ""
    expect(said)


def parsed() -> None:
    # The model draws letters: that it writes this object is the constraint's doing.
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, max_tokens=200, seed=7, response_format=Weather
    )
    expect(isinstance(answer.choices[0].message.parsed, Weather), answer)
    response = client.responses.parse(model=MODEL, input="hello", max_output_tokens=200, text_format=Weather)
    expect(isinstance(response.output_parsed, Weather), response)


def tools() -> None:
    tool = openai.pydantic_function_tool(Weather, name="weather")
    asked: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
    first = chat(**asked).choices[0]
    (made,) = first.message.tool_calls
    expect(first.finish_reason == "tool_calls" and made.function.name == "weather", first)
    Weather.model_validate_json(made.function.arguments)
    result = {"role": "tool", "tool_call_id": made.id, "content": "mild"}
    second = chat(messages=[*MESSAGES, first.message, result], tools=[tool], tool_choice="none")
    expect(second.choices[0].message.content, second)
    pieces = [
        piece
        for chunk in chat(**asked, stream=True)
        for choice in chunk.choices
        for piece in choice.delta.tool_calls or ()
    ]
    expect(pieces[0].function.name == "weather" and pieces[0].id, pieces)
    expect("".join(piece.function.arguments for piece in pieces) == made.function.arguments, pieces)


def response_tools() -> None:
    tool: Any = {**openai.pydantic_function_tool(Weather, name="weather")["function"], "type": "function"}
    asked: Any = {"model": MODEL, "tools": [tool], "max_output_tokens": 400}
    first = client.responses.create(
        **asked, input="hello", tool_choice={"type": "function", "name": "weather"}, parallel_tool_calls=False
    )
    (made,) = [item for item in first.output if item.type == "function_call"]
    Weather.model_validate_json(made.arguments)
    items: Any = [{"role": "user", "content": "hello"}, *first.output]
    items.append({"type": "function_call_output", "call_id": made.call_id, "output": "mild"})
    expect(client.responses.create(**asked, input=items, tool_choice="none").output_text)


print(openai.__version__)
call("chat", whole)
call("chat, streamed, with usage", streamed)
call("chat, stream helper", helper)
call("seeds", seeds)
call("n=2, whole and streamed", choices)
call("logprobs", logprobs)
call("stop", stop)
call("completions: prompts, echo, token ids, streamed", completions)
call("models", models)
call("404 wrong model", wrong_model)
call("400 wrong parameter", wrong_parameter)
call("400 too long a prompt", long_prompt)
call("401 wrong key", wrong_key)
call("responses, whole and streamed", responses)
call("parse: chat and responses", parsed)
call("tools in two steps, streamed", tools)
call("tools in two steps, responses", response_tools)
