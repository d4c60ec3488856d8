import json
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Any

import httpx
import ollama
import pytest

import outrider
from orchestrator.http.logprobs import TokenTexts
from orchestrator.http.ollama_forms import OllamaChatForm
from outrider.v1 import generation_pb2 as pb
from tests.orchestrator.http.conftest import give_text
from tests.orchestrator.scripted import MAX_SESSION_LEN, ScriptedTarget
from tests.orchestrator.stage import Orchestrator, orchestrating, until

NAME = "letters"
HELLO = [{"role": "user", "content": "hello"}]
OPTIONS = {"num_predict": 20, "seed": 1}


@pytest.fixture
async def client(texting: Orchestrator) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(f"http://{texting.http_address}", timeout=20, verify=False) as known:
        yield known


async def text_of_chat(http: httpx.AsyncClient, **fields: Any) -> str:
    """The text that OpenAI's route gives."""
    body = {"messages": HELLO, "max_tokens": 20, **fields}
    return (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]


async def lines_of(http: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    async with http.stream("POST", path, json=body) as response:
        assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")
        return [json.loads(line) async for line in response.aiter_lines()]


async def test_a_chat_is_that_of_openais_route_streaming_or_not(
    http: httpx.AsyncClient, client: ollama.AsyncClient
) -> None:
    text = await text_of_chat(http)
    whole = await client.chat(NAME, HELLO, options=OPTIONS)
    assert whole.message.role == "assistant"
    assert (whole.message.content, whole.done, whole.done_reason) == (text, True, "length")
    parts = [part async for part in await client.chat(f"{NAME}:latest", HELLO, stream=True, options=OPTIONS)]
    assert "".join(part.message.content or "" for part in parts) == text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {part.model for part in parts} == {f"{NAME}:latest"}


async def test_the_last_line_has_counts_and_times(http: httpx.AsyncClient) -> None:
    lines = await lines_of(http, "/api/chat", {"model": NAME, "messages": HELLO, "options": OPTIONS})
    last = lines[-1]
    usage = (await http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 20})).json()["usage"]
    assert (last["eval_count"], last["prompt_eval_count"]) == (20, usage["prompt_tokens"])
    assert 0 < last["prompt_eval_duration"] < last["total_duration"]
    assert last["prompt_eval_duration"] + last["eval_duration"] == last["total_duration"]
    assert last["load_duration"] == 0
    assert "num_spec_steps" in last["metrics"]["speculative_decoding"]
    begun = {line["created_at"] for line in lines}
    assert len(begun) == 1
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(begun.pop())).total_seconds()) < 60


async def test_generate_streams_unless_told_otherwise(http: httpx.AsyncClient, client: ollama.AsyncClient) -> None:
    text = await text_of_chat(http)
    lines = await lines_of(http, "/api/generate", {"model": NAME, "prompt": "hello", "options": OPTIONS})
    assert "".join(line["response"] for line in lines) == text
    assert lines[-1]["done_reason"] == "length"
    whole = await client.generate(NAME, "hello", options=OPTIONS)
    assert (whole.response, whole.done) == (text, True)


async def test_generate_puts_system_in_front_and_takes_raw_text_as_it_is(
    http: httpx.AsyncClient, client: ollama.AsyncClient
) -> None:
    system = await client.generate(NAME, "hello", system="be brief", options=OPTIONS)
    messages = [{"role": "system", "content": "be brief"}, *HELLO]
    assert system.response == await text_of_chat(http, messages=messages)
    raw = await client.generate(NAME, "hello", raw=True, options=OPTIONS)
    plain = await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 20})
    assert raw.response == plain.json()["choices"][0]["text"]
    assert raw.prompt_eval_count == 5


async def test_without_a_chat_template_a_prompt_is_the_text_as_it_is(
    session_store_url: str, target: ScriptedTarget
) -> None:
    give_text(target)
    del target.files["chat_template.jinja"]
    async with (
        orchestrating(session_store_url, (target,), http_address="127.0.0.1:0") as running,
        running.http_client() as http,
    ):
        body = {"prompt": "hello", "stream": False, "options": OPTIONS}
        whole = (await http.post("/api/generate", json=body)).json()
        assert whole["prompt_eval_count"] == 5
        refused = await http.post("/api/generate", json={**body, "system": "be brief"})
        assert (refused.status_code, "system" in refused.json()["error"]) == (400, True)
        refused = await http.post("/api/chat", json={"messages": HELLO})
        assert (refused.status_code, "chat template" in refused.json()["error"]) == (400, True)


async def test_a_stop_string_ends_with_stop(http: httpx.AsyncClient, client: ollama.AsyncClient) -> None:
    text = await text_of_chat(http)
    for stop in (text[5:8], [text[5:8]]):
        body = {"messages": HELLO, "stream": False, "options": {**OPTIONS, "stop": stop}}
        whole = (await http.post("/api/chat", json=body)).json()
        assert (whole["message"]["content"], whole["done_reason"]) == (text[: text.index(text[5:8])], "stop")


@pytest.mark.parametrize("num_predict", [-1, -2, None])
async def test_without_a_bound_as_many_tokens_as_fit_are_generated(
    num_predict: int | None, client: ollama.AsyncClient
) -> None:
    whole = await client.generate(NAME, "hello", raw=True, options={"num_predict": num_predict})
    # The scripted target, unlike a real one, does not count the prompt.
    assert (whole.eval_count, whole.done_reason) == (MAX_SESSION_LEN, "length")


async def test_options_reach_the_target_and_absent_ones_are_the_models(
    texting: Orchestrator, target: ScriptedTarget, client: ollama.AsyncClient
) -> None:
    given = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.125,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    await client.chat(NAME, HELLO, options={**OPTIONS, **given, "repeat_penalty": 1.5, "repeat_last_n": -1})
    parameters = target.opened[-1].parameters
    assert {name: getattr(parameters, name) for name in given} == given
    assert (parameters.repetition_penalty, parameters.max_tokens, parameters.seed) == (1.5, 20, 1)
    await client.chat(NAME, HELLO, options={"num_predict": 1})
    parameters = target.opened[-1].parameters
    assert (parameters.temperature, parameters.top_k, parameters.repetition_penalty) == (1, 0, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"num_ctx": MAX_SESSION_LEN, "num_thread": 8, "num_gpu": 1, "num_batch": 64, "main_gpu": 0, "num_keep": 4},
        {"use_mmap": True, "use_mlock": False, "numa": True, "low_vram": True, "vocab_only": False, "f16_kv": True},
        {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "tfs_z": 1.0, "typical_p": 1, "repeat_last_n": 64},
        {"penalize_newline": True, "embedding_only": False, "logits_all": False, "seed": -1, "top_k": None},
    ],
)
async def test_options_without_an_effect_on_the_text_are_accepted(
    options: dict[str, Any], http: httpx.AsyncClient
) -> None:
    body = {"messages": HELLO, "stream": False, "keep_alive": "5m", "format": "", "think": False, "tools": []}
    response = await http.post("/api/chat", json={**body, "options": {"num_predict": 20, **options}})
    assert response.json()["message"]["content"] == await text_of_chat(http)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_ctx": MAX_SESSION_LEN + 1}, "options.num_ctx"),
        ({"num_ctx": 0}, "options.num_ctx"),
        ({"num_predict": 0}, "options.num_predict"),
        ({"num_predict": -3}, "options.num_predict"),
        ({"num_predict": MAX_SESSION_LEN + 1}, "options.num_predict"),
        ({"mirostat": 1}, "options.mirostat"),
        ({"tfs_z": 0.5}, "options.tfs_z"),
        ({"typical_p": 0.5}, "options.typical_p"),
        ({"penalize_newline": False}, "options.penalize_newline"),
        ({"embedding_only": True}, "options.embedding_only"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "options.repeat_last_n"),
        ({"repeat_last_n": 0, "presence_penalty": 1.0}, "options.repeat_last_n"),
        ({"repeat_penalty": 0.0}, "options.repeat_penalty"),
        ({"temperature": -1.0}, "options.temperature"),
        ({"temperature": "hot"}, "options.temperature"),
        ({"top_p": 2.0}, "options.top_p"),
        ({"min_p": 2.0}, "options.min_p"),
        ({"presence_penalty": 3.0}, "options.presence_penalty"),
        ({"frequency_penalty": 3.0}, "options.frequency_penalty"),
        ({"stop": [""]}, "options.stop"),
        ({"no_such": 1}, "options.no_such"),
    ],
)
async def test_options_that_cannot_be_met_are_refused_by_name(
    options: dict[str, Any], field: str, http: httpx.AsyncClient
) -> None:
    response = await http.post("/api/chat", json={"model": NAME, "messages": HELLO, "options": options})
    assert response.status_code == 400
    assert field in response.json()["error"]


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("chat", {"format": "xml"}, "format"),
        ("chat", {"think": "hard"}, "think"),
        ("chat", {"tools": [{"type": "function"}]}, "tools"),
        ("chat", {"truncate": True}, "truncate"),
        ("chat", {"shift": True}, "shift"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aaaa"]}]}, "messages[0].images"),
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ("chat", {"messages": [{"role": "user", "content": "x" * 1000}]}, "messages"),
        ("chat", {"prompt": "x"}, "prompt"),
        ("chat", {"session_id": "a b"}, "session_id"),
        ("chat", {"speculation": {"drafter": "none"}}, "drafter"),
        ("generate", {"suffix": "x"}, "suffix"),
        ("generate", {"template": "{{ .Prompt }}"}, "template"),
        ("generate", {"context": [1, 2]}, "context"),
        ("generate", {"images": ["aaaa"]}, "images"),
        ("generate", {"width": 64}, "width"),
        ("generate", {"format": 1}, "format"),
        ("generate", {"raw": True, "system": "be brief"}, "system"),
        ("generate", {"prompt": "x" * 1000}, "prompt"),
        ("generate", {"no_such": 1}, "no_such"),
        ("show", {"no_such": 1}, "no_such"),
        ("show", {"name": "other"}, "name"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    path: str, fields: dict[str, Any], field: str, http: httpx.AsyncClient
) -> None:
    given: dict[str, Any] = {"chat": {"messages": HELLO}, "generate": {"prompt": "hello"}, "show": {}}[path]
    response = await http.post(f"/api/{path}", json={"model": NAME, **given, **fields})
    assert response.status_code == 400
    assert field in response.json()["error"]


@pytest.mark.parametrize("path", ["chat", "generate", "show"])
async def test_another_model_is_not_found(path: str, http: httpx.AsyncClient) -> None:
    given: dict[str, Any] = {"chat": {"messages": HELLO}, "generate": {"prompt": "hello"}, "show": {}}[path]
    response = await http.post(f"/api/{path}", json={"model": "other", **given})
    assert (response.status_code, response.json()) == (404, {"error": "model 'other' not found"})


async def test_errors_of_every_kind_are_texts(http: httpx.AsyncClient, client: ollama.AsyncClient) -> None:
    missing = await http.get("/api/ps")
    assert (missing.status_code, missing.json()) == (404, {"error": "there is no GET /api/ps"})
    broken = await http.post("/api/chat", content=b"{", headers={"content-type": "application/json"})
    assert (broken.status_code, "JSON" in broken.json()["error"]) == (400, True)
    form = await http.post("/api/chat", content=b"{}", headers={"content-type": "text/plain"})
    assert (form.status_code, "Content-Type" in form.json()["error"]) == (415, True)
    with pytest.raises(ollama.ResponseError) as caught:
        await client.chat(NAME, HELLO, options={"mirostat": 2})
    assert (caught.value.status_code, caught.value.error) == (400, "options.mirostat is not supported")


async def test_ollamas_documented_curl_lines_are_served_and_those_of_pages_are_not(http: httpx.AsyncClient) -> None:
    content = json.dumps({"model": (await http.get("/api/tags")).json()["models"][0]["name"], "prompt": "a"}).encode()
    headers = {"content-type": "application/x-www-form-urlencoded"}
    served = await http.post("/api/generate", content=content, headers=headers)
    assert served.status_code == 200
    assert json.loads(served.text.splitlines()[-1])["done"]
    # A page of another site can send this type without a question first, but not without its origin.
    own = {**headers, "origin": str(http.base_url).rstrip("/")}
    assert (await http.post("/api/generate", content=content, headers=own)).status_code == 415
    assert (
        await http.post("/api/generate", content=content, headers=headers | {"origin": "http://a"})
    ).status_code == 403
    assert (await http.post("/v1/completions", content=content, headers=headers)).status_code == 415


async def test_a_stream_that_fails_ends_with_an_error(
    texting: Orchestrator, target: ScriptedTarget, client: ollama.AsyncClient
) -> None:
    target.allow(3)
    stream = await client.generate(NAME, "hello", stream=True, options={"num_predict": 20})
    first = await anext(aiter(stream))
    assert first.response
    await target.die()
    with pytest.raises(ollama.ResponseError, match="target"):
        async for _ in stream:
            pass


async def test_without_a_prompt_the_model_is_said_to_be_loaded(
    target: ScriptedTarget, client: ollama.AsyncClient
) -> None:
    chat = await client.chat(NAME, [])
    assert (chat.message.content, chat.done, chat.done_reason) == ("", True, "load")
    generated = [part async for part in await client.generate(NAME, stream=True, keep_alive=0)]
    assert [(part.response, part.done, part.done_reason) for part in generated] == [("", True, "load")]
    assert not target.opened
    with pytest.raises(ollama.ResponseError, match=r"options\.num_ctx"):
        await client.generate(NAME, options={"num_ctx": 10**6})


def test_log_probabilities_have_ollamas_form() -> None:
    form = OllamaChatForm(NAME, TokenTexts(None), with_logprobs=True)
    form.choices[0].accepted = pb.Accepted()
    form.begin(is_resumed=False)
    delta = pb.Delta(token_ids=[7], text="x")
    delta.logprobs.add(logprob=-0.5, rank=2, top_token_ids=[9], top_logprobs=[-0.25])
    (known,) = ollama.ChatResponse(**json.loads(form.delta(form.choices[0], delta))).logprobs or ()
    assert (known.token, known.logprob) == ("token_id:7", -0.5)
    assert [(top.token, top.logprob) for top in known.top_logprobs or ()] == [("token_id:9", -0.25)]


async def test_log_probabilities_are_where_they_were_requested(http: httpx.AsyncClient) -> None:
    body = {"messages": HELLO, "options": OPTIONS, "logprobs": True, "top_logprobs": 1}
    lines = await lines_of(http, "/api/chat", body)
    # The scripted target gives none.
    assert all(line["logprobs"] == [] for line in lines[:-1])
    assert (await http.post("/api/chat", json={**body, "stream": False})).json()["logprobs"] == []
    assert "logprobs" not in (await lines_of(http, "/api/chat", {"messages": HELLO, "options": OPTIONS}))[0]


async def test_reports_and_sessions_are_as_in_the_other_routes(http: httpx.AsyncClient) -> None:
    body = {"messages": HELLO, "options": OPTIONS, "session_id": "ollama-1", "request_id": "r1"}
    lines = await lines_of(http, "/api/chat", {**body, "speculation": {"report": True}})
    known = [line["speculation"]["token_ids"] for line in lines if "speculation" in line]
    assert sum(map(len, known)) == 20
    answer = {"role": "assistant", "content": "".join(line["message"]["content"] for line in lines)}
    more = [*HELLO, answer, {"role": "user", "content": "and"}]
    next_body = {**body, "request_id": "r2", "messages": more, "stream": False}
    assert (await http.post("/api/chat", json=next_body)).json()["eval_count"] == 20
    wrong = {**body, "request_id": "r3", "messages": [*HELLO, {**answer, "content": "no"}, *HELLO]}
    refused = await http.post("/api/chat", json=wrong)
    assert (refused.status_code, "session_id" in refused.json()["error"]) == (409, True)


async def test_a_stream_is_resumed_at_an_offset(http: httpx.AsyncClient) -> None:
    body = {"messages": HELLO, "options": OPTIONS, "request_id": "ollama-resumed"}
    whole = await lines_of(http, "/api/chat", body)
    headers = {"last-event-id": "ollama-resumed:5"}
    async with http.stream("POST", "/api/chat", json=body, headers=headers) as response:
        assert response.headers["x-request-id"] == "ollama-resumed"
        rest = [json.loads(line) async for line in response.aiter_lines()]
    text, behind = ("".join(line["message"]["content"] for line in lines) for lines in (whole, rest))
    assert (behind, rest[-1]["eval_count"], rest[-1]["created_at"]) == (text[5:], 20, whole[0]["created_at"])
    wrong = await http.post("/api/chat", json=body, headers={"last-event-id": "ollama-resumed"})
    assert (wrong.status_code, "Last-Event-ID" in wrong.json()["error"]) == (400, True)


async def test_who_leaves_ends_the_generation(
    texting: Orchestrator, target: ScriptedTarget, http: httpx.AsyncClient
) -> None:
    target.allow(3)
    async with http.stream("POST", "/api/chat", json={"messages": HELLO}) as response:
        await anext(aiter(response.aiter_lines()))
    await until(lambda: bool(target.of("close")))


async def test_tags_show_and_version_satisfy_ollamas_client(
    client: ollama.AsyncClient, http: httpx.AsyncClient
) -> None:
    (listed,) = (await client.list()).models
    assert (listed.model, listed.digest) == (f"{NAME}:latest", "m")
    assert listed.details and listed.details.format == "safetensors"
    shown = await client.show(listed.model or "")
    assert shown.modelinfo
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == MAX_SESSION_LEN
    assert shown.capabilities == ["completion", "tools"]
    assert shown.template and "add_generation_prompt" in shown.template
    assert (await http.post("/api/show", json={"name": NAME})).status_code == 200
    assert (await http.get("/api/version")).json() == {"version": outrider.__version__}


async def test_names_weights_and_parameters_are_the_models(session_store_url: str, target: ScriptedTarget) -> None:
    give_text(target)
    target.info.numerics = "cuda bfloat16 invariant"
    target.info.default_parameters.temperature = 0.5
    target.info.default_parameters.repetition_penalty = 1.25
    async with (
        orchestrating(
            session_store_url, (target,), http_address="127.0.0.1:0", served_model_names=("a", "b:7b", "org/c")
        ) as running,
        running.http_client() as http,
    ):
        shown = (await http.post("/api/show", json={"model": "b:7b"})).json()
        assert shown["parameters"] == "temperature 0.5\nrepeat_penalty 1.25"
        tags = (await http.get("/api/tags")).json()["models"]
        assert [tag["name"] for tag in tags] == ["a:latest", "b:7b", "org/c:latest"]
        assert {tag["details"]["quantization_level"] for tag in tags} == {"BF16"}
        # The model's own penalty is one that a window would change.
        body = {"messages": HELLO, "options": {"repeat_last_n": 64}}
        refused = await http.post("/api/chat", json=body)
        assert "options.repeat_last_n" in refused.json()["error"]


async def test_the_probe_is_answered(http: httpx.AsyncClient) -> None:
    assert (await http.get("/")).text == "Outrider is running"
    head = await http.head("/")
    assert (head.status_code, head.content) == (200, b"")


async def test_the_schema_has_the_routes_and_their_bodies(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()
    assert {"/api/chat", "/api/generate", "/api/show", "/api/tags", "/api/version", "/"} <= schema["paths"].keys()
    reference = schema["paths"]["/api/chat"]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert reference == "#/components/schemas/OllamaChatBody"
    assert "num_ctx" in schema["components"]["schemas"]["Options"]["properties"]
