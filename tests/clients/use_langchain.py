"""LangChain's ChatOpenAI."""

import os
from importlib.metadata import version
from typing import Any, Literal

import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from report import call, expect, refused

MODEL, KEY, URL = os.environ["MODEL"], os.environ["KEY"], os.environ["URL"]


def chat(**more: Any) -> Any:
    given: Any = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0, "seed": 7}
    return ChatOpenAI(**{**given, "max_tokens": 24, **more})


def whole() -> None:
    answer = chat().invoke("hello")
    expect(answer.content and answer.usage_metadata["output_tokens"] > 0, answer)


def streamed() -> None:
    chunks = list(chat(stream_usage=True).stream("hello"))
    said = "".join(chunk.content for chunk in chunks)
    expect(said == chat().invoke("hello").content, said)
    expect(any(chunk.usage_metadata for chunk in chunks))


def batch() -> None:
    expect(len(chat().batch(["a", "b", "c"])) == 3)


def stop() -> None:
    said = chat().invoke("hello").content
    expect(chat().invoke("hello", stop=[said[6]]).content == said[: said.index(said[6])])


class Weather(BaseModel):
    """The weather at a place."""

    sky: Literal["clear", "cloudy"]


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        asked = chat(max_tokens=400).with_structured_output(Weather, method=method)
        expect(isinstance(asked.invoke("hello"), Weather))


print(version("langchain-openai"))
call("invoke", whole)
call("stream, with usage", streamed)
call("batch", batch)
call("stop", stop)
call("with_structured_output", structured)
call("404 wrong model", lambda: refused(openai.NotFoundError, lambda: chat(model="another").invoke("a")))
call("400 wrong parameter", lambda: refused(openai.BadRequestError, lambda: chat(temperature=-1).invoke("a")))
call("401 wrong key", lambda: refused(openai.AuthenticationError, lambda: chat(api_key="wrong").invoke("a")))
