"""vLLM's own texts of a real model with remote drafts: greedy equality, structured output, preemption, many at once."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench.prompts import VARIED
from bench.vllm_engine import VllmEngine
from outrider.lm.embedded import ensure_embedded
from tests.vllm.real import DISTILLED, REAL, engine, remote_draft

pytestmark = [pytest.mark.vllm, pytest.mark.embedded, pytest.mark.timeout(900)]

NEAR_TIE = 1e-3
"""Gap of the two highest log-probabilities, in float32, below which the batch decides which of them is higher."""
NUM_TOKENS = 32
PATIENT = {"OUTRIDER_ADAPTIVE_SPECULATION": "false", "OUTRIDER_DRAFT_MAX_WAIT_S": "2"}
"""Every step waits for whole proposals and verifies all of them, whether or not that pays."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(ensure_embedded())
    texts = [*VARIED, "Count from one to ten.", "Name three colours."][:32]
    return [tokenizer.encode(f"Question: {text}\nAnswer:") for text in texts]


@pytest.fixture(scope="module")
async def plain(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """vLLM without speculation."""
    log = tmp_path_factory.mktemp("plain") / "log"
    async with engine(ensure_embedded(), log, options={"engine": REAL}) as running:
        yield running


@pytest.fixture(scope="module")
async def drafted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """vLLM with a draft distilled for it; every step waits for the whole proposal."""
    log = tmp_path_factory.mktemp("drafted") / "log"
    async with (
        remote_draft(DISTILLED) as draft,
        engine(ensure_embedded(), log, draft.address, options={"engine": REAL}, **PATIENT) as running,
    ):
        yield running


async def test_greedy_texts_are_vllms_own(prompts: list[list[int]], plain: VllmEngine, drafted: VllmEngine) -> None:
    sampling = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    own = await plain.run(prompts, sampling | {"logprobs": 2}, together=True)
    found = await drafted.run(prompts, dict(sampling), together=True)
    assert found["counts"]["num_accepted"] > 20
    for expected, tokens, gaps in zip(own["token_ids"], found["token_ids"], own["gaps"], strict=True):
        place = next((at for at, (one, two) in enumerate(zip(expected, tokens, strict=True)) if one != two), None)
        assert place is None or gaps[place] < NEAR_TIE, (place, expected, tokens)


async def test_a_schema_is_followed_and_drafts_still_count(drafted: VllmEngine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ensure_embedded())
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "is_large": {"type": "boolean"}},
        "required": ["city", "is_large"],
        "additionalProperties": False,
    }
    prompt = tokenizer.encode('Describe Paris as JSON, such as {"city": "Oslo", "is_large": false}:\n')
    sampling = {"temperature": 0.0, "max_tokens": 64, "json_schema": schema}
    result = await drafted.run([prompt], sampling)
    answer = json.loads(tokenizer.decode(result["token_ids"][0], skip_special_tokens=True))
    assert set(answer) == {"city", "is_large"}
    assert isinstance(answer["is_large"], bool)
    assert result["counts"]["num_verified"] > 0


async def test_preempted_requests_go_on_with_their_drafts(
    prompts: list[list[int]], plain: VllmEngine, tmp_path: Path
) -> None:
    """A KV cache for a few of them: vLLM preempts, and computes again."""
    sampling = {"temperature": 0.0, "max_tokens": 3 * NUM_TOKENS, "ignore_eos": True}
    small = {**REAL, "num_gpu_blocks_override": 20, "block_size": 32, "max_model_len": 512}
    async with (
        remote_draft(DISTILLED) as draft,
        engine(ensure_embedded(), tmp_path / "log", draft.address, options={"engine": small}, **PATIENT) as running,
    ):
        result = await running.run(prompts[:8], dict(sampling), together=True)
    own = await plain.run(prompts[:8], sampling | {"logprobs": 2}, together=True)
    assert result["num_preemptions"] > 0
    assert result["counts"]["num_accepted"] > 0
    for expected, tokens, gaps in zip(own["token_ids"], result["token_ids"], own["gaps"], strict=True):
        place = next((at for at, (one, two) in enumerate(zip(expected, tokens, strict=True)) if one != two), None)
        assert place is None or gaps[place] < NEAR_TIE
