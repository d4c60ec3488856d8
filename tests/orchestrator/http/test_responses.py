import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from tests.orchestrator.http.conftest import LETTERS, letter
from tests.orchestrator.scripted import MAX_SESSION_LEN, ScriptedTarget
from tests.orchestrator.stage import Orchestrator, until

NAME = "letters"
URL = "/v1/responses"
BODY: dict[str, Any] = {"model": NAME, "input": "hello", "max_output_tokens": 20, "seed": 1}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
FIRST = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
LAST = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


@dataclass
class Event:
    """A server-sent event."""

    id: str
    name: str
    data: dict[str, Any]


@pytest.fixture
async def client(texting: Orchestrator) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"http://{texting.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=20) as known:
        yield known


async def text_of_chat(http: httpx.AsyncClient, *messages: tuple[str, str]) -> str:
    """The text of the chat route."""
    body = {"messages": [{"role": role, "content": content} for role, content in messages], "max_tokens": 20}
    return (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]


async def read(response: httpx.Response) -> AsyncIterator[Event]:
    """The events of a stream, each with its id and its name, and valid as OpenAI's client reads it."""
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if not line:
            data = json.loads(fields["data"])
            EVENTS.validate_python(data)
            assert fields["event"] == data["type"]
            yield Event(fields["id"], fields["event"], data)
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


async def events_of(http: httpx.AsyncClient, body: dict[str, Any], last_event_id: str = "") -> list[Event]:
    headers = {"last-event-id": last_event_id} if last_event_id else {}
    async with http.stream("POST", URL, json={**body, "stream": True}, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        return [event async for event in read(response)]


def text_of(events: list[Event]) -> str:
    return "".join(event.data["delta"] for event in events if event.name == "response.output_text.delta")


async def test_the_text_is_that_of_the_chat_route(http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(model=NAME, input="hello", max_output_tokens=20)
    assert response.output_text == await text_of_chat(http, ("user", "hello"))
    assert response.id.startswith("resp_")
    assert (response.object, response.model, response.status) == ("response", NAME, "incomplete")
    assert response.incomplete_details and response.incomplete_details.reason == "max_output_tokens"
    (message,) = response.output
    assert (message.type, message.status) == ("message", "incomplete")
    usage = response.usage
    assert usage and usage.output_tokens == 20
    assert usage.total_tokens == usage.input_tokens + 20
    assert (usage.output_tokens_details.reasoning_tokens, usage.input_tokens_details.cached_tokens) == (0, 0)


async def test_a_response_has_all_that_openais_model_requires(http: httpx.AsyncClient) -> None:
    body = {**BODY, "instructions": "be brief", "temperature": 0.5, "metadata": {"a": "b"}, "request_id": "whole-1"}
    content = (await http.post(URL, json=body)).json()
    Response.model_validate(content, strict=True)
    assert content["id"] == "resp_whole-1"
    echoed = ("instructions", "temperature", "top_p", "metadata", "max_output_tokens", "store")
    assert [content[name] for name in echoed] == ["be brief", 0.5, 1.0, {"a": "b"}, 20, False]
    assert "num_spec_steps" in content["metrics"]["speculative_decoding"]


async def test_input_is_text_or_messages_with_instructions_in_front(http: httpx.AsyncClient) -> None:
    turns = (("system", "be brief"), ("user", "hello\nthere"), ("assistant", "hi"), ("user", "and"))
    earlier = {"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}
    body = {
        **BODY,
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": part} for part in ("hello", "there")]},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [earlier]},
            {"type": "message", "role": "user", "content": "and"},
        ],
    }
    content = (await http.post(URL, json=body)).json()
    assert content["output"][0]["content"][0]["text"] == await text_of_chat(http, *turns)


async def test_a_stream_has_the_events_of_the_api_in_order(http: httpx.AsyncClient) -> None:
    events = await events_of(http, BODY)
    deltas = [event.name for event in events[4:-4]]
    assert deltas == ["response.output_text.delta"] * len(deltas)
    names = [event.name for event in events]
    assert names == [*FIRST, *deltas, *LAST, "response.incomplete"]
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    whole = (await http.post(URL, json=BODY)).json()
    text = whole["output"][0]["content"][0]["text"]
    assert text_of(events) == text == events[-4].data["text"] == events[-3].data["part"]["text"]
    last = events[-1].data["response"]
    assert last["output"][0] == events[-2].data["item"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert last["usage"] == whole["usage"]
    assert events[0].data["response"]["status"] == "in_progress"


async def test_openais_client_reads_streams(http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
    text = await text_of_chat(http, ("user", "hello"))
    stream = await client.responses.create(model=NAME, input="hello", max_output_tokens=20, stream=True)
    events = [event async for event in stream]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    # This one builds the response from the events itself.
    async with client.responses.stream(
        model=NAME, input="hello", max_output_tokens=20, extra_body={"stop": [text[9]]}
    ) as built:
        final = await built.get_final_response()
    assert (final.output_text, final.status) == (text[: text.index(text[9])], "completed")


async def test_without_a_bound_as_many_tokens_as_fit_are_generated(http: httpx.AsyncClient) -> None:
    # The scripted target, unlike a real one, does not count the prompt.
    usage = (await http.post(URL, json={"input": "hello"})).json()["usage"]
    assert usage["output_tokens"] == MAX_SESSION_LEN


async def test_sampling_parameters_reach_the_target(target: ScriptedTarget, http: httpx.AsyncClient) -> None:
    given = {"temperature": 0.5, "top_p": 0.25, "top_k": 5, "min_p": 0.125, "presence_penalty": 0.5, "min_tokens": 2}
    await http.post(URL, json={**BODY, **given})
    parameters = target.opened[-1].parameters
    assert {name: getattr(parameters, name) for name in given} == given
    assert (parameters.max_tokens, parameters.seed) == (20, 1)


@pytest.mark.parametrize("unit", ["ascii", "accents"])
async def test_a_stream_is_resumed_at_every_position(
    unit: str, target: ScriptedTarget, http: httpx.AsyncClient
) -> None:
    if unit == "accents":
        # Each of these characters is two tokens, so text waits for the second one.
        accent = Tokenizer.from_str(target.files["tokenizer.json"].decode()).encode("\u00e9").ids
        target.next_token = lambda tokens: accent[len(tokens) % 2] if len(tokens) % 6 > 1 else letter(tokens)
    # A beginning of the stop string in the text holds it back for a while.
    whole = text_of(await events_of(http, BODY))
    body = {**BODY, "request_id": f"resumed-{unit}", "stop": [f"{whole[4:6]}\x00"]}
    events = await events_of(http, body)
    assert text_of(events) == whole
    assert ("\u00e9" in whole) == (unit == "accents")
    had = ""
    for event in events[4:-4]:
        had += event.data["delta"]
        rest = await events_of(http, body, event.id)
        assert not set(FIRST) & {item.name for item in rest}
        assert had + text_of(rest) == whole
        assert rest[-4].data["text"] == whole
        assert rest[-1].data["response"]["output"][0]["content"][0]["text"] == whole
        assert rest[-1].data["response"]["created_at"] == events[0].data["response"]["created_at"]
        numbers = [item.data["sequence_number"] for item in rest]
        assert numbers == sorted(set(numbers)) and numbers[0] > event.data["sequence_number"]
        assert {item.id for item in rest} >= {events[-1].id}


async def test_who_leaves_ends_the_generation_and_resumes_it(
    texting: Orchestrator, target: ScriptedTarget, http: httpx.AsyncClient
) -> None:
    target.allow(7)
    body = {**BODY, "request_id": "left-1", "stream": True}
    had: list[Event] = []
    async with http.stream("POST", URL, json=body) as response:
        async for event in read(response):
            had.append(event)
            if len(text_of(had)) == 7:
                break
    await until(lambda: bool(target.of("close")))
    target.allow(None)
    rest = await events_of(http, body, had[-1].id)
    whole = text_of(await events_of(http, BODY))
    assert text_of(had) + text_of(rest) == whole
    assert rest[-4].data["text"] == whole


async def test_what_cannot_be_resumed_is_an_error(http: httpx.AsyncClient) -> None:
    unknown = await http.post(URL, json=BODY, headers={"last-event-id": "resp_nobody:3"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "request_id")
    other = await http.post(URL, json=BODY, headers={"last-event-id": "chatcmpl-x:3"})
    assert (other.status_code, other.json()["error"]["param"]) == (400, "Last-Event-ID")
    body = {**BODY, "request_id": "short-1"}
    await events_of(http, body)
    events = await events_of(http, body, "resp_short-1:21")
    assert [event.name for event in events] == ["error", "response.failed"]
    assert (events[0].data["param"], events[0].data["code"]) == ("Last-Event-ID", "invalid_argument")
    # One that never began begins now.
    begun = await events_of(http, {**BODY, "request_id": "fresh-1"}, "resp_fresh-1:0")
    assert [event.name for event in begun[:4]] == FIRST


async def test_a_stream_that_fails_ends_with_response_failed(
    target: ScriptedTarget, http: httpx.AsyncClient, client: openai.AsyncOpenAI
) -> None:
    target.allow(3)
    stream = await client.responses.create(model=NAME, input="hello", max_output_tokens=20, stream=True)
    events = []
    async for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta":
            await target.die()
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert failed.output_text == "".join(event.delta for event in events if event.type == "response.output_text.delta")


async def test_reports_are_in_events_that_clients_know(http: httpx.AsyncClient) -> None:
    events = await events_of(http, {**BODY, "speculation": {"report": True}})
    known = [event.data["speculation"]["token_ids"] for event in events if "speculation" in event.data]
    assert sum(map(len, known)) == 20
    assert all(token_id in LETTERS for part in known for token_id in part)


async def test_a_session_continues(http: httpx.AsyncClient) -> None:
    body = {**BODY, "session_id": "responses-1"}
    text = (await http.post(URL, json=body)).json()["output"][0]["content"][0]["text"]
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "and"},
    ]
    assert (await http.post(URL, json={**body, "input": messages})).json()["usage"]["output_tokens"] == 20
    messages[1]["content"] = "something else"
    refused = await http.post(URL, json={**body, "input": messages})
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "session_id")


async def test_fields_that_change_nothing_are_accepted(http: httpx.AsyncClient) -> None:
    neutral = {
        "store": False,
        "background": False,
        "previous_response_id": None,
        "conversation": None,
        "include": [],
        "tools": [],
        "tool_choice": "auto",
        "top_logprobs": 0,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": None, "summary": None},
        "metadata": {},
        "user": "me",
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
        "max_tool_calls": 3,
    }
    content = (await http.post(URL, json={**BODY, **neutral})).json()
    assert content["output"][0]["content"][0]["text"] == await text_of_chat(http, ("user", "hello"))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": "x" * 1000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": MAX_SESSION_LEN + 1}, "max_output_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"session_id": "a b"}, "session_id"),
        ({"request_id": "a b"}, "request_id"),
        ({"messages": []}, "messages"),
        ({"no_such": 1}, "no_such"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    fields: dict[str, Any], field: str, http: httpx.AsyncClient
) -> None:
    response = await http.post(URL, json={**BODY, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_openais_client_raises_its_own_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="responses are not stored") as caught:
        await client.responses.create(model=NAME, input="hello", store=True)
    assert caught.value.param == "store"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.responses.create(model="other", input="hello")
    assert missing.value.param == "model"


async def test_the_schema_has_the_route_and_its_body(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()
    content = schema["paths"][URL]["post"]["requestBody"]["content"]["application/json"]
    assert content["schema"]["$ref"] == "#/components/schemas/ResponsesBody"
    assert "instructions" in schema["components"]["schemas"]["ResponsesBody"]["properties"]
