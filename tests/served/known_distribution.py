"""Whether what heads draft for follows the distribution of their target, a small transformer, exactly computed."""

import asyncio
import itertools
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.client import GenerationRequest, OutriderClient, Speculation
from outrider.parameters import AcceptanceRule, SamplingParameters
from tests.served.fit import SIGNIFICANCE, p_value

PROMPT = [1, 3, 9, 20, 2, 1, 4]
NUM_SAMPLES, NUM_TOKENS, CONCURRENCY = 1000, 4, 16
ALLOWED = (10, 20, 30, 40)
"""The only tokens that a bias leaves likely, so that few outputs are possible."""


def read_target(folder: Path) -> PreTrainedModel:
    """Returns a target as transformers runs it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


async def check_distribution(client: OutriderClient, target: Path) -> None:
    """Check the joint distribution of the first tokens under both rules, with chains and trees."""
    expected = distribution(target)
    for rule, max_nodes in itertools.product((AcceptanceRule.COUPLED, AcceptanceRule.REJECTION), (3, 9)):
        chosen = Speculation(acceptance_rule=rule, max_nodes=max_nodes)
        assert p_value(await sample(client, chosen), expected) > SIGNIFICANCE, (rule, max_nodes)


async def sample(client: OutriderClient, speculation: Speculation) -> list[tuple[int, ...]]:
    """Returns the outputs of as many requests, each with noise of its own."""
    seeds, outputs, num_accepted = iter(range(NUM_SAMPLES)), [], 0

    async def run() -> None:
        nonlocal num_accepted
        for seed in seeds:
            bias = dict.fromkeys(ALLOWED, 60.0)
            parameters = SamplingParameters(seed=seed, max_tokens=NUM_TOKENS, logit_bias=bias)
            request = GenerationRequest(token_ids=PROMPT, parameters=parameters, speculation=speculation)
            generation = await client.complete(request)
            outputs.append(tuple(generation.token_ids))
            num_accepted += generation.statistics.num_accepted_tokens

    await asyncio.gather(*(run() for _ in range(CONCURRENCY)))
    assert num_accepted > NUM_SAMPLES / 4
    return outputs


def distribution(target: Path) -> dict[tuple[int, ...], float]:
    """Returns the target's distribution of the first tokens, of which only those that are allowed are likely."""
    model, found = read_target(target), {(): 1.0}
    for _ in range(NUM_TOKENS):
        texts = torch.tensor([[*PROMPT, *path] for path in found])
        shares = model(texts).logits[:, -1, list(ALLOWED)].double().softmax(-1).tolist()
        pairs = zip(found.items(), shares, strict=True)
        found = {
            (*path, token_id): before * share
            for (path, before), row in pairs
            for token_id, share in zip(ALLOWED, row, strict=True)
        }
    return found
