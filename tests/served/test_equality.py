"""Equality through the served API on the embedded model in bfloat16: no drafter changes a token."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.prompts import COPYING, VARIED
from outrider.client import (
    DraftOptions,
    GenerationRequest,
    LocalStack,
    Message,
    OutriderClient,
    Speculation,
    StackOptions,
)
from outrider.lm.embedded import ensure_embedded
from outrider.parameters import SamplingParameters

pytestmark = pytest.mark.embedded

DRAFTS = (
    DraftOptions(drafter="ngram"),
    DraftOptions(drafter="layers", num_layers=6),
    DraftOptions(drafter="model", model="embedded"),
    DraftOptions(drafter="eagle3"),
)
SPECULATIONS = {
    "ngram": Speculation(drafter="ngram", lookahead_nodes=0),
    "ngram, ahead": Speculation(drafter="ngram", lookahead_nodes=24),
    "layers": Speculation(drafter="layers", lookahead_nodes=0),
    "layers, ahead": Speculation(drafter="layers", lookahead_nodes=24),
    "model": Speculation(drafter="model", lookahead_nodes=0),
    "model, ahead": Speculation(drafter="model", lookahead_nodes=12),
    "model, tree": Speculation(drafter="model", max_nodes=8),
    "eagle3": Speculation(drafter="eagle3"),
    "eagle3, chain": Speculation(drafter="eagle3", num_speculative_tokens=4, max_nodes=4),
    "eagle3, large tree": Speculation(drafter="eagle3", num_speculative_tokens=6, max_nodes=23),
}
PLAIN = Speculation(disabled=True)
NEVER_GIVES_UP = {"OUTRIDER_ADAPTIVE_SPECULATION": "false"}
PATIENT = {"OUTRIDER_DRAFT_MAX_WAIT_S": "30"}


def _parameters(seed: int | None, num_tokens: int) -> SamplingParameters:
    if seed is None:
        return SamplingParameters(temperature=0, max_tokens=num_tokens)
    return SamplingParameters(temperature=1, seed=seed, max_tokens=num_tokens)


async def _output(
    client: OutriderClient, prompt: str, parameters: SamplingParameters, speculation: Speculation
) -> tuple[list[int], float]:
    request = GenerationRequest(
        messages=[Message("user", prompt)],
        parameters=parameters,
        speculation=speculation,
    )
    generation = await client.complete(request, timeout_s=300)
    return generation.token_ids, generation.statistics.acceptance_rate


def _stack(dtype: str = "") -> LocalStack:
    return LocalStack(
        StackOptions(drafts=DRAFTS, dtype=dtype, target_environment=NEVER_GIVES_UP, orchestrator_environment=PATIENT)
    )


async def _compare(
    client: OutriderClient, prompts: tuple[str, ...], num_tokens: int, seed: int | None
) -> list[list[int]]:
    """Asserts that every drafter gives what plain decoding alone gives, all at once; returns the outputs."""
    outputs = []
    for number, prompt in enumerate(prompts):
        parameters = _parameters(None if seed is None else seed + number, num_tokens)
        plain, _ = await _output(client, prompt, parameters, PLAIN)
        found = await asyncio.gather(
            *(_output(client, prompt, parameters, speculation) for speculation in SPECULATIONS.values())
        )
        for name, (drafted, rate) in zip(SPECULATIONS, found, strict=True):
            assert drafted == plain, (name, prompt)
            # With the same noise and the same bits a model is a perfect draft of itself.
            assert name not in ("model", "model, ahead") or rate == 1.0, prompt
            assert not name.startswith("eagle3") or rate > 0, (name, prompt)
        outputs.append(plain)
    return outputs


async def test_a_few_short_ones() -> None:
    async with _stack() as stack, stack.client() as client:
        await _compare(client, (VARIED[3], COPYING[0]), 16, None)
        await _compare(client, (VARIED[0],), 16, 5)


def _transformers_outputs(prompts: tuple[str, ...], num_tokens: int, dtype: torch.dtype) -> list[list[int]]:
    folder = ensure_embedded()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    outputs = []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            whole = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        outputs.append(whole[0, inputs["input_ids"].shape[1] :].tolist())
    return outputs


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [None, 1000], ids=["greedy", "temperature-1"])
async def test_thirty_prompts(seed: int | None) -> None:
    async with _stack() as stack, stack.client() as client:
        await _compare(client, VARIED, 128, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_float32_equals_transformers() -> None:
    async with _stack("float32") as stack, stack.client() as client:
        outputs = await _compare(client, VARIED[:10] + COPYING[:2], 96, None)
    expected = _transformers_outputs(VARIED[:10] + COPYING[:2], 96, torch.float32)
    assert outputs == expected
