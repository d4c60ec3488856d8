"""Completions: prompts in all forms, echoes, and the small routes beside them."""

import re

import httpx
import pytest

from orchestrator.text.tokenizer import Tokenizer
from tests.orchestrator.http.conftest import letter
from tests.orchestrator.http.events import read
from tests.orchestrator.scripted import continuation

PATH = "/v1/completions"


def expected(tokenizer: Tokenizer, prompt: str, num: int) -> str:
    return tokenizer.decode(continuation(tokenizer.encode(prompt, 1000), num, letter))


async def test_prompts_come_as_texts_or_token_ids_one_or_several(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(prompt, 1000) for prompt in ("one", "another")]
    for prompt in (["one", "another"], ids):
        answer = (await http.post(PATH, json={"prompt": prompt, "max_tokens": 5, "n": 2})).json()
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [expected(tokenizer, text, 5) for text in ("one", "one", "another", "another")]
        assert answer["usage"]["prompt_tokens"] == len("one") + len("another")
    for single in ("one", ids[0]):
        answer = (await http.post(PATH, json={"prompt": single})).json()
        assert answer["choices"][0]["text"] == expected(tokenizer, "one", 16)


async def test_the_prompt_is_echoed(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    text = expected(tokenizer, "one", 5)
    for prompt in ("one", tokenizer.encode("one", 1000)):
        body = {"prompt": prompt, "max_tokens": 5, "echo": True}
        assert (await http.post(PATH, json=body)).json()["choices"][0]["text"] == "one" + text
        assert (await read(http, PATH, body)).text() == "one" + text


@pytest.mark.parametrize(
    ("changed", "parameter"),
    [
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "x" * 100_000}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": ["x"] * 200}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 30}, "logprobs"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_its_name(
    http: httpx.AsyncClient, changed: dict[str, object], parameter: str
) -> None:
    refused = await http.post(PATH, json={"prompt": "x", **changed})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == parameter


async def test_text_becomes_tokens_and_tokens_text(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    tokens = (await http.post("/tokenize", json={"prompt": "Hé", "return_token_strs": True})).json()
    assert tokens["tokens"] == tokenizer.encode("Hé", 1000)
    assert (tokens["count"], tokens["token_strs"][0]) == (3, "H")
    text = (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "Hé"}
    chat = (await http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})).json()
    assert tokenizer.decode(chat["tokens"]).endswith("<|im_start|>assistant\n")
    for path, body, parameter in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ):
        refused = await http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, parameter)


async def test_the_model_is_known_by_its_folder(http: httpx.AsyncClient) -> None:
    (card,) = (await http.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("letters", 512)
    refused = await http.post(PATH, json={"prompt": "x", "model": "gpt-4"})
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"


async def test_the_small_routes_answer(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/version")).json()["version"]
    assert "outrider_http_requests_total" in (await http.get("/metrics")).text
    schema = (await http.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= set(schema["paths"])
    assert schema["components"]["schemas"]["ChatBody"]["properties"]["messages"]
    page = await http.get("/docs")
    assert page.status_code == 200
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 3
    for path in loaded:
        # A cluster may not reach the internet.
        assert "//" not in path, path
        assert (await http.get(f"/{path}")).status_code == 200, path
    missing = await http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")
    assert (await http.get(PATH)).status_code == 405
