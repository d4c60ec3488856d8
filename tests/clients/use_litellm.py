"""LiteLLM."""

import os
from importlib.metadata import version
from typing import Any

import litellm
from report import call, expect, refused

MODEL, KEY, URL = os.environ["MODEL"], os.environ["KEY"], os.environ["URL"]


def chat(**more: Any) -> Any:
    given: Any = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0, "seed": 7}
    messages = [{"role": "user", "content": "hello"}]
    return litellm.completion(**{**given, "messages": messages, "max_tokens": 24, **more})


def whole() -> None:
    answer = chat()
    expect(answer.choices[0].message.content and answer.usage.completion_tokens > 0, answer)


def streamed() -> None:
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect(said == chat().choices[0].message.content, said)
    expect(chunks[-1].usage.completion_tokens > 0, chunks[-1])


def text() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="a", max_tokens=8, api_base=f"{URL}/v1", api_key=KEY
    )
    expect(answer.choices[0].text, answer)


def choices() -> None:
    expect(len(chat(n=2, logprobs=True, top_logprobs=2).choices) == 2)


print(version("litellm"))
call("completion", whole)
call("completion, streamed, with usage", streamed)
call("text_completion", text)
call("n=2, logprobs", choices)
call("404 wrong model", lambda: refused(litellm.NotFoundError, lambda: chat(model="openai/another")))
call("400 wrong parameter", lambda: refused(litellm.BadRequestError, lambda: chat(temperature=-1)))
call("401 wrong key", lambda: refused(litellm.AuthenticationError, lambda: chat(api_key="wrong")))
