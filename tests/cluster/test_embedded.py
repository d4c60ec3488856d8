"""The local overlay as it is: all services Ready with the embedded models, and a generation through the Services."""

import json
import time
import urllib.request
from collections.abc import Callable

import pytest

from outrider.client import GenerationRequest, Speculation
from outrider.parameters import SamplingParameters
from tests.cluster.deployed import HTTP_URL, Deployed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

_PROMPT = "The capital of France is"
_NUM_TOKENS = 24
_PARAMETERS = SamplingParameters(temperature=0.0, max_tokens=_NUM_TOKENS, seed=1)


def test_all_services_are_ready(local: Deployed, record_property: Callable[[str, object], None]) -> None:
    record_property("ready_s", round(local.until_ready(within_s=900), 1))


async def test_a_generation_with_drafts_by_grpc(
    local: Deployed, record_property: Callable[[str, object], None]
) -> None:
    await local.in_thread(local.until_ready)
    async with local.client() as client:
        plain = await client.complete(
            GenerationRequest(text=_PROMPT, parameters=_PARAMETERS, speculation=Speculation(disabled=True)),
            timeout_s=240,
        )
        drafted = await client.complete(GenerationRequest(text=_PROMPT, parameters=_PARAMETERS), timeout_s=240)
    assert list(drafted.token_ids) == list(plain.token_ids)
    statistics = drafted.statistics
    assert statistics.num_accepted_tokens > 0
    record_property("num_tokens", len(drafted.token_ids))
    record_property("num_accepted_tokens", statistics.num_accepted_tokens)


async def test_a_generation_by_http(local: Deployed, record_property: Callable[[str, object], None]) -> None:
    await local.in_thread(local.until_ready)
    async with local.client() as client:
        expected = await client.complete(GenerationRequest(text=_PROMPT, parameters=_PARAMETERS), timeout_s=240)

    def post() -> dict[str, object]:
        body = {"model": "embedded", "prompt": _PROMPT, "max_tokens": _NUM_TOKENS, "temperature": 0, "seed": 1}
        request = urllib.request.Request(
            f"{HTTP_URL}/v1/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as response:
            found: dict[str, object] = json.load(response)
            return found

    started = time.monotonic()
    answer = await local.in_thread(post)
    record_property("seconds", round(time.monotonic() - started, 1))
    assert answer["choices"][0]["text"] == expected.text  # type: ignore[index]
