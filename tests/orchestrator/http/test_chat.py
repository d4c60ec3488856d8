"""Chat completions: text, streams, sessions, what they report and what they refuse."""

import json
from collections import Counter

import httpx
import pytest

from orchestrator.text.tokenizer import Tokenizer
from outrider.v1 import tokens_pb2
from tests.orchestrator.http.conftest import give_text, letter
from tests.orchestrator.http.events import read
from tests.orchestrator.scripted import MAX_SESSION_LEN, ScriptedDraft, ScriptedTarget, continuation
from tests.orchestrator.stage import Orchestrator, orchestrating, until

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
ROOM = 1000


def expected(tokenizer: Tokenizer, messages: list[tuple[str, str]], num: int) -> str:
    prompt = tokenizer.encode_chat(messages, continues=False, last_token=None, max_tokens=ROOM)
    return tokenizer.decode(continuation(prompt, num, letter))


async def test_each_chunk_has_the_usage_so_far_where_it_is_requested(
    http: httpx.AsyncClient, target: ScriptedTarget
) -> None:
    target.run_len = None
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, prompt in ((PATH, {"messages": HELLO}), ("/v1/completions", {"prompt": "hello"})):
        stream = await read(http, path, {**prompt, "n": 2, "max_tokens": 30, "stream_options": options})
        *chunks, last = stream.chunks
        num_prompt = last["usage"]["prompt_tokens"]
        for index in (0, 1):
            usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
            counts = [usage["completion_tokens"] for usage in usages]
            assert counts == sorted(counts)
            assert counts[-1] == 30
            assert all(usage["prompt_tokens"] == num_prompt for usage in usages)
            assert all(usage["total_tokens"] == num_prompt + usage["completion_tokens"] for usage in usages)
        # Without the usage at the end there is none on the way.
        del options["include_usage"]
        plain = await read(http, path, {**prompt, "max_tokens": 3, "stream_options": options})
        assert not any("usage" in chunk for chunk in plain.chunks)
        options["include_usage"] = True


async def test_a_completion_is_the_targets_text(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    answer = (await http.post(PATH, json={"messages": HELLO, "max_tokens": 12, "model": "letters"})).json()
    prompt = tokenizer.encode_chat([("user", "Hello")], continues=False, last_token=None, max_tokens=ROOM)
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": expected(tokenizer, [("user", "Hello")], 12),
        "refusal": None,
    }
    assert (choice["finish_reason"], answer["object"], answer["model"]) == ("length", "chat.completion", "letters")
    assert answer["id"].startswith("chatcmpl-")
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 12)
    assert usage["total_tokens"] == len(prompt) + 12
    assert set(answer["metrics"]["speculative_decoding"]) == {
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "num_spec_steps",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "num_spec_tokens",
    }


async def test_a_stream_has_the_same_text_and_ends_with_usage_where_requested(
    http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    body = {"messages": HELLO, "max_tokens": 30, "stream_options": {"include_usage": True}}
    stream = await read(http, PATH, body)
    assert stream.text() == expected(tokenizer, [("user", "Hello")], 30)
    assert stream.chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert stream.finish_reason() == "length"
    assert stream.is_done
    assert stream.chunks[-1]["choices"] == []
    assert stream.chunks[-1]["usage"]["completion_tokens"] == 30
    assert all("usage" not in chunk for chunk in stream.chunks[:-1])
    assert len({(chunk["id"], chunk["created"]) for chunk in stream.chunks}) == 1
    assert not any("speculation" in chunk for chunk in stream.chunks)


async def test_without_a_limit_the_answer_takes_the_rest_of_the_context(
    http: httpx.AsyncClient, target: ScriptedTarget
) -> None:
    assert (await http.post(PATH, json={"messages": HELLO})).status_code == 200
    # The target ends it where the context ends.
    assert target.opened[-1].parameters.max_tokens == MAX_SESSION_LEN


async def test_choices_are_requests_of_their_own_with_seeds_of_their_own(
    http: httpx.AsyncClient, target: ScriptedTarget
) -> None:
    body = {"messages": HELLO, "max_tokens": 5, "seed": 7}
    one = (await http.post(PATH, json=body)).json()
    three = (await http.post(PATH, json={**body, "n": 3})).json()
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert three["choices"][0] == one["choices"][0]
    seeds = [opened.parameters.seed for opened in target.opened]
    assert seeds[0] == 7
    assert sorted(seeds[1:])[0] == 7
    assert len(set(seeds[1:])) == 3
    # The prompt counts once.
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 15


async def test_a_broken_stream_continues_where_the_client_says(
    http: httpx.AsyncClient, target: ScriptedTarget, tokenizer: Tokenizer
) -> None:
    target.run_len = 20
    body = {"messages": HELLO, "max_tokens": 60, "seed": 3, "n": 2}
    # Two chunks with roles, and one with text.
    first = await read(http, PATH, body, num_chunks=3)
    assert not first.ids[-1].endswith(":0,0")
    # Both choices are left at a token of their own; each goes on from its own.
    target.allow(None)
    second = await read(http, PATH, body, last=first.ids[-1])
    assert second.is_done
    assert first.chunks[0]["id"] == second.chunks[0]["id"]
    assert first.chunks[0]["created"] == second.chunks[0]["created"]
    for index in (0, 1):
        whole = expected(tokenizer, [("user", "Hello")], 60)
        assert first.text(index) + second.text(index) == whole
    assert not any("role" in choice["delta"] for chunk in second.chunks for choice in chunk["choices"])


async def test_who_leaves_ends_the_generation(
    http: httpx.AsyncClient, texting: Orchestrator, target: ScriptedTarget
) -> None:
    target.allow(5)
    await read(http, PATH, {"messages": HELLO, "max_tokens": 400}, num_chunks=2)
    await until(lambda: len(target.of("close")) == 1)
    # An answer in one piece as well.
    with pytest.raises(httpx.ReadTimeout):
        await http.post(PATH, json={"messages": HELLO, "max_tokens": 400}, timeout=0.3)
    await until(lambda: len(target.of("close")) == 2)


async def test_a_session_takes_new_messages_or_the_whole_conversation(
    http: httpx.AsyncClient, target: ScriptedTarget, tokenizer: Tokenizer
) -> None:
    ask = {"max_tokens": 8, "session_id": "chat-1"}
    first = (await http.post(PATH, json={**ask, "messages": HELLO})).json()
    answer = first["choices"][0]["message"]["content"]
    turn = {"role": "user", "content": "And you?"}
    only_new = (await http.post(PATH, json={**ask, "messages": [turn]})).json()
    conversation = [("user", "Hello"), ("assistant", answer), ("user", "And you?")]
    assert only_new["choices"][0]["message"]["content"] == expected(tokenizer, conversation, 8)
    # The whole conversation again, with one message more: only that is added.
    said = only_new["choices"][0]["message"]["content"]
    history = [*HELLO, {"role": "assistant", "content": answer}, turn, {"role": "assistant", "content": said}]
    third = await http.post(PATH, json={**ask, "messages": [*history, turn]})
    assert third.json()["choices"][0]["message"]["content"] == expected(
        tokenizer, [*conversation, ("assistant", said), ("user", "And you?")], 8
    )
    spans = [span.start for span in target.of("span")]
    assert spans == sorted(spans), "the session was sent again"


@pytest.mark.parametrize(
    "changed",
    [
        [{"role": "user", "content": "Hullo"}, {"role": "assistant", "content": "ANSWER"}],
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "something else"}],
        [{"role": "system", "content": "x"}, {"role": "user", "content": "Hello"}],
    ],
)
async def test_messages_that_contradict_the_session_are_refused(
    http: httpx.AsyncClient, changed: list[dict[str, str]]
) -> None:
    ask = {"max_tokens": 8, "session_id": f"contradicted-{abs(hash(str(changed)))}"}
    first = (await http.post(PATH, json={**ask, "messages": HELLO})).json()
    answer = first["choices"][0]["message"]["content"]
    history = [{**message, "content": message["content"].replace("ANSWER", answer)} for message in changed]
    if history[-1]["role"] == "user":
        history.append({"role": "assistant", "content": answer})
    refused = await http.post(PATH, json={**ask, "messages": [*history, {"role": "user", "content": "Go on"}]})
    assert refused.status_code == 409
    assert refused.json()["error"]["param"] == "session_id"


async def test_reports_come_only_where_asked_for(
    http: httpx.AsyncClient, texting: Orchestrator, target: ScriptedTarget
) -> None:
    target.run_len = 10
    body = {"messages": HELLO, "max_tokens": 40, "speculation": {"report": True}}
    lines: list[str] = []
    async with http.stream("POST", PATH, json={**body, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                lines.append(line)
            if '"origins"' in line and target.run_len is not None:
                # The only target loses its streams, and the session with them.
                target.run_len = None
                target.break_streams()
    reports = [json.loads(line.removeprefix("data: "))["speculation"] for line in lines if '"speculation"' in line]
    assert any(report.get("origins", [None])[0] == "bonus" for report in reports)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if '"texts"' in line]
    for chunk in chunks:
        report = chunk["speculation"]
        assert len(report["texts"]) == len(report["token_ids"]) == len(report["origins"])
        assert "".join(report["texts"]) == chunk["choices"][0]["delta"].get("content", "")
    assert [report["statistics"]["num_target_passes"] for report in reports if "statistics" in report][-1] == 40


async def test_reports_name_the_drafters_of_a_draft_that_combines_several(
    session_store_url: str, target: ScriptedTarget, draft: ScriptedDraft
) -> None:
    give_text(target)
    target.info.tokenizer_fingerprint = draft.info.tokenizer_fingerprint
    draft.next_token, draft.drafters = letter, ["eagle3", "suffix", "eagle3+suffix"]
    body = {"messages": HELLO, "max_tokens": 40, "speculation": {"report": True}}
    chunks = []
    async with (
        orchestrating(session_store_url, (target,), (draft,), http_address="127.0.0.1:0") as running,
        running.http_client() as client,
    ):
        # The draft is open before the second token.
        target.allow(1)
        async with client.stream("POST", PATH, json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunks.append(json.loads(line.removeprefix("data: ")))
                if '"origins"' in line and target.run_len == 0:
                    await target.saw("proposal")
                    target.allow(None)
    reports = [chunk["speculation"] for chunk in chunks if "token_ids" in chunk.get("speculation", {})]
    for report in reports:
        assert ("drafters" in report) == ("accepted" in report["origins"])
        for name, origin in zip(report.get("drafters", []), report["origins"], strict="drafters" in report):
            assert bool(name) == (origin == "accepted")
    counted = Counter(name for report in reports for name in report.get("drafters", []) if name)
    assert set(counted) == set(draft.drafters)
    assert reports[-1]["statistics"]["num_accepted_tokens_by_drafter"] == counted


async def test_log_probabilities_have_openais_form(http: httpx.AsyncClient) -> None:
    body = {"messages": HELLO, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    answer = (await http.post(PATH, json=body)).json()
    # The scripted target reports none; the form stands all the same.
    assert answer["choices"][0]["logprobs"] == {"content": [], "refusal": None}


async def test_template_variables_and_the_generation_prompt_reach_the_template(
    http: httpx.AsyncClient, target: ScriptedTarget, tokenizer: Tokenizer
) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "add_generation_prompt": False}
    usage = (await http.post(PATH, json=body)).json()["usage"]
    assert usage["prompt_tokens"] == len(tokenizer.encode_history([("user", "Hello")], {}, ROOM))
    refused = await http.post(PATH, json={"messages": HELLO, "chat_template_kwargs": {"messages": []}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template_kwargs"


async def test_a_prediction_changes_nothing_but_the_usage(http: httpx.AsyncClient) -> None:
    body = {"messages": HELLO, "max_tokens": 20, "seed": 1}
    plain = (await http.post(PATH, json=body)).json()
    text = plain["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in plain["usage"]
    parts = [{"type": "text", "text": text[:12]}, {"type": "text", "text": "!" + text[13:] + "<|im_end|>"}]
    for content in (text[:12] + "!" + text[13:] + "<|im_end|>", parts):
        predicted = await http.post(PATH, json={**body, "prediction": {"type": "content", "content": content}})
        assert predicted.status_code == 200, predicted.text
        assert predicted.json()["choices"] == plain["choices"]
        details = predicted.json()["usage"]["completion_tokens_details"]
        # A token is a byte, also of what only looks like a special token. Three of them tell where it goes on.
        assert details == {"accepted_prediction_tokens": 16, "rejected_prediction_tokens": 20 + 10 - 16}


NEUTRAL = {
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "store": False,
    "user": "me",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "y",
    "parallel_tool_calls": True,
    "best_of": 1,
    "logit_bias": None,
    "prediction": None,
}


async def test_fields_at_their_neutral_value_are_accepted(http: httpx.AsyncClient) -> None:
    answer = await http.post(PATH, json={"messages": HELLO, "max_tokens": 2, **NEUTRAL})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("changed", "parameter"),
    [
        ({"store": True}, "store"),
        ({"prediction": {"type": "content", "content": "x" * 10**6}}, "prediction"),
        ({"prediction": {"type": "other", "content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"best_of": 2}, "best_of"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 200}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"request_id": "a b"}, "request_id"),
        ({"session_id": "s", "n": 2}, "session_id"),
        ({"speculation": {"lookahead": 10**6}}, "lookahead"),
        ({"speculation": {"unheard_of": 1}}, "speculation.unheard_of"),
        ({"cache_salt": "x"}, "cache_salt"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_its_name(
    http: httpx.AsyncClient, changed: dict[str, object], parameter: str
) -> None:
    refused = await http.post(PATH, json={"messages": HELLO, **changed})
    error = refused.json()["error"]
    assert refused.status_code == 400, refused.text
    assert (error["type"], error["param"]) == ("BadRequestError", parameter)


async def test_the_models_defaults_apply_to_what_is_left_open(
    http: httpx.AsyncClient, texting: Orchestrator, target: ScriptedTarget
) -> None:
    defaults = tokens_pb2.SamplingParameters(temperature=0.6, top_k=20, max_tokens=9)
    link = texting.replicas.targets[0]
    assert link.info is not None
    link.info.default_parameters.CopyFrom(defaults)
    usage = (await http.post(PATH, json={"messages": HELLO, "top_k": 3})).json()["usage"]
    assert usage["completion_tokens"] == 9
    opened = target.opened[-1].parameters
    assert (round(opened.temperature, 6), opened.top_k, opened.top_p) == (0.6, 3, 1.0)


async def test_a_bound_in_time_ends_a_request(http: httpx.AsyncClient, target: ScriptedTarget) -> None:
    target.allow(3)
    late = await http.post(PATH, json={"messages": HELLO}, headers={"X-Request-Timeout": "0.2"})
    assert late.status_code == 504
    assert late.json()["error"]["type"] == "TimeoutError"
