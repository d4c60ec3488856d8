"""Equality through the served API on the embedded model in bfloat16: no drafter changes a token.

The default run tests what ships, the head and the lookup; `make exactness` tests all drafters and 30 prompts.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.prompts import COPYING, VARIED
from outrider.client import (
    Conversation,
    Delta,
    DraftOptions,
    Finished,
    Generation,
    GenerationRequest,
    LocalStack,
    Message,
    Notice,
    NoticeKind,
    OutriderClient,
    Speculation,
    StackOptions,
)
from outrider.lm.embedded import ensure_embedded
from outrider.parameters import FinishReason, SamplingParameters
from tests.served.stacks import until_all_in_rotation

pytestmark = pytest.mark.embedded

SHIPPED_DRAFTS = (
    DraftOptions(drafter="ngram"),
    # Its requests have one text, so that each is drafted from what the other has said.
    DraftOptions(drafter="suffix", environment={"OUTRIDER_SUFFIX_SCOPE": "all"}),
    DraftOptions(drafter="block+suffix"),
)
DRAFTS = (
    *SHIPPED_DRAFTS,
    DraftOptions(drafter="eagle3"),
    DraftOptions(drafter="layers", num_layers=6),
    DraftOptions(drafter="model", model="embedded"),
)
SHIPPED = {
    "ngram": Speculation(drafter="ngram", lookahead=0),
    "ngram, ahead": Speculation(drafter="ngram", lookahead=24),
    "suffix": Speculation(drafter="suffix", lookahead=0, max_nodes=9),
    "suffix, ahead": Speculation(drafter="suffix", lookahead=24),
    "block+suffix": Speculation(drafter="block+suffix"),
    "block+suffix, chain": Speculation(drafter="block+suffix", num_speculative_tokens=4, max_nodes=4),
    "block+suffix, large tree": Speculation(drafter="block+suffix", num_speculative_tokens=6, max_nodes=23),
}
SPECULATIONS = {
    **SHIPPED,
    "eagle3": Speculation(drafter="eagle3"),
    "eagle3, chain": Speculation(drafter="eagle3", num_speculative_tokens=4, max_nodes=4),
    "eagle3, large tree": Speculation(drafter="eagle3", num_speculative_tokens=6, max_nodes=23),
    "layers": Speculation(drafter="layers", lookahead=0),
    "layers, ahead": Speculation(drafter="layers", lookahead=24),
    "model": Speculation(drafter="model", lookahead=0),
    "model, ahead": Speculation(drafter="model", lookahead=12),
    "model, tree": Speculation(drafter="model", max_nodes=8),
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


def _stack(drafts: tuple[DraftOptions, ...] = DRAFTS, **options: Any) -> LocalStack:
    return LocalStack(
        StackOptions(drafts=drafts, target_environment=NEVER_GIVES_UP, orchestrator_environment=PATIENT, **options)
    )


async def _compare(
    client: OutriderClient,
    prompts: tuple[str, ...],
    num_tokens: int,
    seed: int | None,
    speculations: Mapping[str, Speculation] = SPECULATIONS,
) -> list[list[int]]:
    """Asserts that every drafter gives what plain decoding alone gives, all at once; returns the outputs."""
    outputs = []
    for number, prompt in enumerate(prompts):
        parameters = _parameters(None if seed is None else seed + number, num_tokens)
        plain, _ = await _output(client, prompt, parameters, PLAIN)
        found = await asyncio.gather(
            *(_output(client, prompt, parameters, speculation) for speculation in speculations.values())
        )
        for name, (drafted, rate) in zip(speculations, found, strict=True):
            assert drafted == plain, (name, prompt)
            # With the same noise and the same bits a model is a perfect draft of itself.
            assert name not in ("model", "model, ahead") or rate == 1.0, prompt
            assert not name.startswith(("block", "eagle3")) or rate > 0, (name, prompt)
        outputs.append(plain)
    return outputs


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shipped() -> AsyncIterator[OutriderClient]:
    """A client of the target with the drafts that ship."""
    async with _stack(SHIPPED_DRAFTS) as stack, stack.client() as client:
        await until_all_in_rotation(stack)
        yield client


@pytest.mark.parametrize(
    ("prompt", "seed"), [(VARIED[3], None), (COPYING[0], None), (VARIED[0], 5)], ids=["greedy", "copy", "temperature-1"]
)
async def test_what_ships(shipped: OutriderClient, prompt: str, seed: int | None) -> None:
    await _compare(shipped, (prompt,), 16, seed, SHIPPED)


async def test_a_conversation_goes_on_as_if_it_were_sent_whole(shipped: OutriderClient) -> None:
    parameters = SamplingParameters(temperature=0, max_tokens=48)
    messages: list[Message] = []
    conversation = Conversation(shipped, parameters=parameters)
    for line in ("My name is Ada. Say hello in one short sentence.", "What is my name?"):
        turn = Generation()
        async for event in conversation.send(line):
            turn.add(event)
        messages.append(Message("user", line))
        whole = await shipped.complete(GenerationRequest(messages=messages, parameters=parameters))
        assert turn.finish_reason is FinishReason.STOP
        assert (turn.text, turn.token_ids) == (whole.text, whole.token_ids)
        messages.append(Message("assistant", turn.text))
    assert turn.accepted is not None
    assert turn.accepted.session_len > 0


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
    async with _stack(dtype="float32") as stack, stack.client() as client:
        outputs = await _compare(client, VARIED[:10] + COPYING[:2], 96, None)
    expected = _transformers_outputs(VARIED[:10] + COPYING[:2], 96, torch.float32)
    assert outputs == expected


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [None, 5], ids=["greedy", "temperature-1"])
async def test_on_a_gpu(seed: int | None) -> None:
    prompts = (*VARIED[:3], COPYING[0])
    async with _stack(device="cuda") as stack, stack.client() as client:
        await until_all_in_rotation(stack)
        outputs = await _compare(client, prompts, 64, seed)
        each = [_parameters(None if seed is None else seed + number, 64) for number in range(len(prompts))]
        together = await asyncio.gather(*(_output(client, *asked, PLAIN) for asked in zip(prompts, each, strict=True)))
        assert [token_ids for token_ids, _ in together] == outputs


@pytest.mark.gpu
@pytest.mark.timeout(600)
async def test_a_target_that_is_killed_on_a_gpu_changes_no_token() -> None:
    async def run(prompt: str) -> list[int]:
        nonlocal num_going, num_replaced
        request = GenerationRequest(messages=[Message("user", prompt)], parameters=parameters, speculation=reported)
        token_ids: list[int] = []
        async for event in client.generate(request, timeout_s=120):
            match event:
                case Delta():
                    num_going += not token_ids
                    token_ids.extend(event.token_ids)
                    if num_going == len(prompts):
                        stack.targets[0].kill()
                case Notice(kind=NoticeKind.TARGET_REPLACED):
                    num_replaced += 1
                case Finished():
                    assert not event.statistics.varying_numerics
        return token_ids

    parameters = SamplingParameters(temperature=1, seed=7, max_tokens=400, ignore_eos=True)
    reported = Speculation(disabled=True, report=True)
    prompts, num_going, num_replaced = (*VARIED[:5], COPYING[0]), 0, 0
    async with LocalStack(StackOptions(device="cuda", drafts=(), num_targets=2)) as stack, stack.client() as client:
        await until_all_in_rotation(stack)
        alone = [(await _output(client, prompt, parameters, PLAIN))[0] for prompt in prompts]
        assert await asyncio.gather(*map(run, prompts)) == alone
        assert num_replaced
