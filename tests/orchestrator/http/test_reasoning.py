"""Reasoning over HTTP: judged by the request's own prompt, and never by work on the event loop."""

import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from orchestrator.http.parsing import parse
from orchestrator.http.tools import tools_of
from orchestrator.text.messages import Tool, checked_tool
from orchestrator.text.tokenizer import Tokenizer
from orchestrator.workers.model import Model
from outrider.v1 import generation_pb2, tokens_pb2
from tests.orchestrator.answering import give_answers, model_files, tokenizer_of
from tests.orchestrator.http.events import Stream, read
from tests.orchestrator.http.test_tools import ASKED, PATH, QUESTION, constraint_of
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import orchestrating

# Begins the reasoning, unless a message forbids it.
TEMPLATE = (
    "{% set ns = namespace(thinks=true) %}{% for message in messages %}"
    "{% if '/no_think' in message.content %}{% set ns.thinks = false %}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}{% if tools %}Tools{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if ns.thinks %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ANSWER = "Hello there, this is long enough to come in several pieces."
EMPTY = "<think>\n\n</think>\n\n"
CLOSED = {"messages": [{"role": "system", "content": "/no_think"}, QUESTION]}


@pytest.fixture
async def thinker(session_store_url: str, target: ScriptedTarget) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a model whose template begins the reasoning where no message forbids it."""
    # The script has what the template begins the answer with.
    give_answers(target, model_files(TEMPLATE), lambda prompt: EMPTY + ANSWER)
    async with (
        orchestrating(session_store_url, (target,), http_address="127.0.0.1:0") as running,
        running.http_client() as client,
    ):
        yield client


async def test_a_constraint_holds_from_where_the_own_prompt_leaves_off(
    thinker: httpx.AsyncClient, target: ScriptedTarget
) -> None:
    form = {"response_format": {"type": "json_object"}}
    for body, end in (({"messages": [QUESTION]}, "</think>"), (CLOSED, "")):
        assert (await thinker.post(PATH, json={**body, **form})).status_code == 200
        constraint = constraint_of(target)
        assert constraint is not None
        assert constraint.reasoning_end == end


async def test_a_stream_is_resumed_as_its_own_prompt_began_it(thinker: httpx.AsyncClient) -> None:
    body = {"input": CLOSED["messages"], "request_id": "closed-1"}

    def text(stream: Stream) -> str:
        return "".join(chunk.get("delta", "") for chunk in stream.chunks if "output_text.delta" in chunk["type"])

    whole = await read(thinker, "/v1/responses", body)
    assert text(whole) == ANSWER
    deltas = [number for number, chunk in enumerate(whole.chunks) if "output_text.delta" in chunk["type"]]
    for number in (deltas[0], deltas[-2]):
        rest = await read(thinker, "/v1/responses", body, last=whole.ids[number])
        assert text(Stream(whole.chunks[: number + 1])) + text(rest) == ANSWER


async def test_templates_are_rendered_beside_the_event_loop(
    asker: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendering: list[str] = []
    render = Tokenizer._rendered

    def watched(self: Tokenizer, *arguments: Any) -> str:
        rendering.append(threading.current_thread().name)
        return render(self, *arguments)

    # The first request has the tokenizer loaded, which renders what it looks into.
    await asker.post(PATH, json={"messages": [QUESTION]})
    monkeypatch.setattr(Tokenizer, "_rendered", watched)
    body = {"messages": [QUESTION], "response_format": {"type": "json_object"}}
    assert (await asker.post(PATH, json=body)).status_code == 200
    assert len(rendering) == 1
    large = {**body, "chat_template_kwargs": {"x": ["a"] * 8192}}
    refused = await asker.post(PATH, json=large)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")
    assert len(rendering) == 1
    assert all(name.startswith("encode-") for name in rendering)


async def test_tools_are_read_once_beside_the_event_loop(
    asker: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading: list[str] = []

    def watched(*arguments: str) -> Tool:
        reading.append(threading.current_thread().name)
        return checked_tool(*arguments)

    monkeypatch.setattr("orchestrator.api.prompts.checked_tool", watched)
    body = {**ASKED, "request_id": "once-1"}
    for num in (1, 2):
        # Also of a request that is repeated.
        assert (await asker.post(PATH, json=body)).json()["choices"][0]["finish_reason"] == "tool_calls"
        assert len(reading) == num
    assert all(name.startswith("encode-") for name in reading)


def test_a_chat_without_parts_is_the_message_that_it_was() -> None:
    message = generation_pb2.GenerateRequest(chat=generation_pb2.Chat(template_variables="{}"))
    plain = message.SerializeToString(deterministic=True)
    tokenizer = tokenizer_of(model_files("{{ messages }}"))
    model = Model("m", "f", "t", tokenizer, 300, 10000, (257,), tokens_pb2.SamplingParameters())
    assert not parse(message, tools_of(None, None, None), model)
    # A field that is present changes the fingerprint, so that no earlier process's request would be found again.
    assert message.SerializeToString(deterministic=True) == plain
