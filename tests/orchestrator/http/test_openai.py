"""The `openai` client, unchanged, against a target with text: chats, completions, streams, errors, usage."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.orchestrator.api.test_servicer import saying, tokenizer_files
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import Orchestrator, orchestrating

KEY = "key-of-a-tenant"
SENTENCE = "one two. END of it. "
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def sayer() -> AsyncIterator[ScriptedTarget]:
    """A target with text, which repeats one sentence."""
    async with ScriptedTarget(next_token=saying(SENTENCE)) as target:
        target.files = tokenizer_files()
        yield target


@pytest.fixture
async def speaker(session_store_url: str, sayer: ScriptedTarget, tmp_path: Path) -> AsyncIterator[Orchestrator]:
    """An orchestrator of this target with HTTP and one tenant."""
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"tenant": {"tokens": [KEY]}}))
    more = {"http_address": "127.0.0.1:0", "tenants_file": tenants, "served_model_names": ("speaker",)}
    async with orchestrating(session_store_url, (sayer,), **more) as running:
        yield running


@pytest.fixture
async def client(speaker: Orchestrator) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(speaker, KEY) as running:
        yield running


def client_of(orchestrator: Orchestrator, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{orchestrator.http_address}/v1", api_key=key, max_retries=0, timeout=20)


def is_said(text: str | None) -> bool:
    """Returns whether a text is a part of the sentence without end."""
    return bool(text) and str(text) in SENTENCE * 10


async def test_chats_whole_and_streamed_are_one_text(client: openai.AsyncOpenAI) -> None:
    asked = {"model": "speaker", "messages": MESSAGES, "max_tokens": 30, "seed": 1, "temperature": 0}
    whole = await client.chat.completions.create(**asked)
    assert is_said(whole.choices[0].message.content)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 30
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 30
    stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    said = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert said[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in said) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in said if choice.finish_reason] == ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 30
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1


async def test_a_stop_string_choices_and_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="speaker", messages=MESSAGES, max_completion_tokens=40, stop="END", n=2, logprobs=True, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert "END" not in (choice.message.content or "")
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None


async def test_completions_of_several_prompts(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="speaker", prompt=["a", "b"], echo=True, temperature=0)
    assert [choice.text[0] for choice in answer.choices] == ["a", "b"]
    assert all(is_said(choice.text[1:]) for choice in answer.choices)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * 16
    tokens = await client.completions.create(model="speaker", prompt=[5, 6, 7], max_tokens=4, temperature=0)
    stream = await client.completions.create(
        model="speaker", prompt=[5, 6, 7], max_tokens=4, temperature=0, stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == tokens.choices[0].text


async def test_models_are_listed_by_their_names(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["speaker"]


async def test_errors_have_their_classes(client: openai.AsyncOpenAI, speaker: Orchestrator) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="speaker", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model="speaker", prompt="x" * 100_000)
    assert long.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as tools:
        await client.chat.completions.create(
            model="speaker", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "a function"}}]
        )
    assert tools.value.param == "tools"
    async with client_of(speaker, "another") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


async def test_who_leaves_a_stream_ends_its_generation(
    client: openai.AsyncOpenAI, speaker: Orchestrator, sayer: ScriptedTarget
) -> None:
    # It would wait for ever for its ninth token.
    sayer.allow(8)
    stream = await client.chat.completions.create(model="speaker", messages=MESSAGES, max_tokens=100, stream=True)
    await anext(aiter(stream))
    assert speaker.registry.get_sample_value("outrider_num_requests_running") == 1
    await stream.close()
    async with asyncio.timeout(10):
        while speaker.registry.get_sample_value("outrider_num_requests_running"):
            await asyncio.sleep(0.01)
    await sayer.saw("close")
