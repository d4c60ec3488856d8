"""The `ollama` package."""

import json
import os
from importlib.metadata import version
from typing import Any

import ollama
from report import call, expect, refused

MODEL, KEY, URL = os.environ["MODEL"], os.environ["KEY"], os.environ["URL"]
MESSAGES: Any = [{"role": "user", "content": "hello"}]
OPTIONS: Any = {"num_predict": 24, "seed": 7}
client = ollama.Client(URL, headers={"Authorization": f"Bearer {KEY}"})
stranger = ollama.Client(URL, headers={"Authorization": "Bearer wrong"})


def chat() -> None:
    whole = client.chat(MODEL, MESSAGES, options=OPTIONS)
    expect(whole.message.content and whole.done and (whole.eval_count or 0) > 0, whole)
    parts = list(client.chat(MODEL, MESSAGES, options=OPTIONS, stream=True))
    expect("".join(part.message.content or "" for part in parts) == whole.message.content)
    expect(parts[-1].done and parts[-1].eval_count == whole.eval_count)


def generate() -> None:
    whole = client.generate(MODEL, "hello", options=OPTIONS)
    parts = list(client.generate(MODEL, "hello", options=OPTIONS, stream=True))
    expect("".join(part.response for part in parts) == whole.response, whole)


def formats() -> None:
    schema = {"type": "object", "properties": {"sky": {"enum": ["clear", "cloudy"]}}, "required": ["sky"]}
    whole = client.chat(MODEL, MESSAGES, format=schema, options={**OPTIONS, "num_predict": 200})
    expect(json.loads(whole.message.content or "")["sky"] in ("clear", "cloudy"), whole)


def tools() -> None:
    call_made: Any = {"function": {"name": "weather", "arguments": {"place": "Oslo"}}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call_made]},
        {"role": "tool", "tool_name": "weather", "content": "mild"},
    ]
    expect(client.chat(MODEL, messages, tools=[weather], options=OPTIONS).message.content)


def weather(place: str) -> str:
    """Tells the weather.

    Args:
        place: a town.
    """
    return place


def names() -> None:
    expect(any(str(model.model).removesuffix(":latest") == MODEL for model in client.list().models))
    expect(client.show(MODEL))


def status(run: Any, code: int) -> None:
    error: Any = refused(ollama.ResponseError, run)
    expect(error.status_code == code, error)


print(version("ollama"))
call("chat, whole and streamed", chat)
call("generate, whole and streamed", generate)
call("list, show", names)
call("format: a schema", formats)
call("tools: a call and its result", tools)
call("404 wrong model", lambda: status(lambda: client.chat("another", MESSAGES), 404))
call("400 wrong parameter", lambda: status(lambda: client.chat(MODEL, MESSAGES, options={"temperature": -1.0}), 400))
call("401 wrong key", lambda: status(lambda: stranger.list(), 401))
