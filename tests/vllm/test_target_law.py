"""The distribution of what targets on vLLM output, through the whole stack, compared with the model's own.

Joint distribution of the first three tokens of 10,000 requests at temperature 1, with a draft that is the target, with
one that is another model, and with a wrong rule planted in vLLM, which must be caught.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.client import GenerationRequest, OutriderClient, Speculation
from outrider.parameters import AcceptanceRule, SamplingParameters
from tests.faults.stack import FaultOptions, fault_stack
from tests.served.fit import SIGNIFICANCE, p_value
from tests.vllm.environment import ENVIRONMENT, PYTHON, needs_vllm, save_tiny

pytestmark = [*needs_vllm, pytest.mark.timeout(1200)]

VOCABULARY, NUM_TOKENS, NUM_SAMPLES, CONCURRENCY = 32, 3, 10_000, 40
PROMPT = (1, 3, 2)
SHARPNESS = 5.0
"""By which a few tokens have most of the probability, so that most triples are expected often enough."""


@torch.inference_mode()
def first_tokens(folder: str) -> dict[tuple[int, ...], float]:
    """Returns the joint distribution of the first tokens after the prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        rows = model(torch.tensor([[*PROMPT, *tokens] for tokens in found])).logits[:, -1].double().softmax(-1)
        found = {
            (*tokens, token_id): weight * float(row[token_id])
            for (tokens, weight), row in zip(found.items(), rows, strict=True)
            for token_id in range(VOCABULARY)
        }
    return found


async def sample(client: OutriderClient) -> tuple[list[tuple[int, ...]], int, int]:
    """Returns the first tokens of requests with seeds 0, 1, 2, ..., and the proposed and the accepted tokens of all."""
    seeds = iter(range(NUM_SAMPLES))
    outputs: list[tuple[int, ...]] = []
    num_drafted = num_accepted = 0

    async def run() -> None:
        nonlocal num_drafted, num_accepted
        for seed in seeds:
            request = GenerationRequest(
                token_ids=PROMPT,
                parameters=SamplingParameters(seed=seed, max_tokens=NUM_TOKENS),
                speculation=Speculation(num_speculative_tokens=2),
            )
            generation = await client.complete(request, timeout_s=60)
            statistics = generation.statistics
            assert statistics.acceptance_rule is AcceptanceRule.ENGINE
            assert statistics.varying_numerics
            outputs.append(tuple(generation.token_ids))
            num_drafted += statistics.num_draft_tokens
            num_accepted += statistics.num_accepted_tokens

    await asyncio.gather(*(run() for _ in range(CONCURRENCY)))
    return outputs, num_drafted, num_accepted


@pytest.mark.parametrize("case", ["good", "bad", "wrong rule"])
async def test_the_first_tokens_have_the_models_distribution(case: str, tmp_path: Path) -> None:
    target = save_tiny(tmp_path / "target", VOCABULARY, sharpness=SHARPNESS)
    draft = target if case == "good" else save_tiny(tmp_path / "draft", VOCABULARY, 1, SHARPNESS)
    options = FaultOptions(
        num_targets=1,
        num_orchestrators=1,
        target=target,
        draft=draft,
        target_environment={**ENVIRONMENT, "PACED_TARGET_RULE": "wrong" if case == "wrong rule" else "right"},
        target_interpreter=PYTHON,
        target_module="tests.vllm.paced_target",
        ready_s=240.0,
    )
    (tmp_path / "stack").mkdir()
    async with fault_stack(tmp_path / "stack", options) as stack, stack.client() as client:
        outputs, num_drafted, num_accepted = await sample(client)
    found = p_value(outputs, first_tokens(target))
    rate = num_accepted / max(1, num_drafted)
    print(f"{case}: p = {found:.3g}, {num_drafted} tokens proposed, {rate:.0%} of them accepted")
    assert num_drafted > NUM_SAMPLES / 4, "proposals are a large part of it"
    assert (found < SIGNIFICANCE) == (case == "wrong rule")


def test_the_test_of_fit_has_power(tmp_path: Path) -> None:
    """Samples of another model are told apart."""
    right, other = (first_tokens(save_tiny(tmp_path / str(seed), VOCABULARY, seed, SHARPNESS)) for seed in (0, 1))
    outcomes: Sequence[tuple[int, ...]] = list(other)
    picks = torch.multinomial(torch.tensor(list(other.values())), NUM_SAMPLES, replacement=True)
    assert p_value([outcomes[index] for index in picks.tolist()], right) < SIGNIFICANCE
