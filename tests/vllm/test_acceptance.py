"""A draft is accepted as often by vLLM as by our own target, position by position."""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench.prompts import VARIED
from outrider.client import DraftOptions, GenerationRequest, LocalStack, OutriderClient, Speculation, StackOptions
from outrider.client.events import Delta
from outrider.lm.embedded import ensure_embedded
from outrider.parameters import SamplingParameters
from outrider.tokens import TokenOrigin
from tests.vllm.real import DISTILLED, REAL, engine, remote_draft

pytestmark = [pytest.mark.vllm, pytest.mark.embedded, pytest.mark.timeout(1800)]

NUM = 5
NUM_TOKENS = 160
LEAST_ROUNDS = 2000
MOST_APART = 0.02
PATIENT = {"OUTRIDER_ADAPTIVE_SPECULATION": "false", "OUTRIDER_DRAFT_MAX_WAIT_S": "30"}


def rates(lengths: Sequence[int]) -> list[float]:
    """Returns, for each position of a proposal, the share of rounds that accepted it and all before it."""
    return [sum(length > place for length in lengths) / len(lengths) for place in range(NUM)]


def accepted_lengths(origins: Iterable[TokenOrigin]) -> list[int]:
    """Returns the accepted tokens of each round: a round ends with the target's own token."""
    lengths, run = [], 0
    for origin in origins:
        if origin is TokenOrigin.ACCEPTED:
            run += 1
        else:
            lengths.append(run)
            run = 0
    # The first round has no proposal yet.
    return lengths[1:]


async def own_lengths(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Returns the accepted tokens of each round of our own stack."""
    draft = DraftOptions("model", DISTILLED, environment={"OUTRIDER_DTYPE": "auto"})
    options = StackOptions(
        drafts=(draft,),
        dtype="float32",
        target_environment={"OUTRIDER_ADAPTIVE_SPECULATION": "false"},
        orchestrator_environment={"OUTRIDER_DRAFT_MAX_WAIT_S": "30"},
    )
    speculation = Speculation(num_speculative_tokens=NUM, max_nodes=NUM, lookahead=0)
    parameters = SamplingParameters(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

    async def one(client: OutriderClient, prompt: Sequence[int]) -> list[int]:
        request = GenerationRequest(token_ids=tuple(prompt), parameters=parameters, speculation=speculation)
        origins = [
            origin async for event in client.generate(request) if isinstance(event, Delta) for origin in event.origins
        ]
        return accepted_lengths(origins)

    async with LocalStack(options) as stack, stack.client() as client:
        found = await asyncio.gather(*(one(client, prompt) for prompt in prompts))
    return [length for lengths in found for length in lengths]


async def test_a_draft_is_accepted_as_often_as_by_our_own_target(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ensure_embedded())
    prompts = [tokenizer.encode(f"Question: {text}\nAnswer:") for text in VARIED]
    sampling = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    async with (
        remote_draft(DISTILLED) as draft,
        engine(
            ensure_embedded(),
            tmp_path / "log",
            draft.address,
            options={"engine": REAL, "num_speculative_tokens": NUM},
            OUTRIDER_LOOKAHEAD="0",
            **PATIENT,
        ) as running,
    ):
        counts = (await running.run(prompts, sampling, together=True))["counts"]
    lengths = await own_lengths(prompts)
    assert counts["verified_at"][0] >= LEAST_ROUNDS
    assert len(lengths) >= LEAST_ROUNDS
    # Every round waited for its whole proposal; only the last ones of a request are shorter.
    assert counts["verified_at"][-1] > 0.95 * counts["verified_at"][0]
    vllm = [accepted / counts["verified_at"][0] for accepted in counts["accepted_at"]]
    print(f"vLLM {[round(rate, 4) for rate in vllm]}, own {[round(rate, 4) for rate in rates(lengths)]}")
    assert max(abs(one - other) for one, other in zip(vllm, rates(lengths), strict=True)) < MOST_APART
