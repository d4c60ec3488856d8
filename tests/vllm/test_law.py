"""The joint distribution of the first tokens that vLLM outputs with remote drafts, against the model's own.

The target is a Llama whose law is a Markov model's, so that the distribution is known exactly.
"""

import itertools
from pathlib import Path

import pytest

from bench.markov_llama import save
from outrider.lm.markov import MarkovModel
from tests.served.fit import SIGNIFICANCE, p_value
from tests.vllm.real import SMALL, engine, remote_draft

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TARGET = "markov:vocabulary=8,seed=7,scale=1.5"
DRAFTS = {"good": TARGET, "bad": "markov:vocabulary=8,seed=99,scale=1.5"}
PROMPT = (1, 3)
NUM_TOKENS = 3
NUM_SAMPLES = 10_000


def exact(model: MarkovModel) -> dict[tuple[int, ...], float]:
    """Returns the probability of each text of `NUM_TOKENS` tokens."""
    found = {}
    for text in itertools.product(range(model.options.vocabulary), repeat=NUM_TOKENS):
        probability, tokens = 1.0, [*PROMPT]
        for token in text:
            probability *= float(model.transitions[model.context(tokens), token])
            tokens.append(token)
        found[text] = probability
    return found


async def p_of(folder: Path, draft: str, module: str = "bench.vllm_process") -> tuple[float, dict[str, int]]:
    """Returns the p-value of the texts under a draft, and the plug-in's counts."""
    model = save(TARGET, folder / "target")
    options = {"engine": {**SMALL, "max_num_seqs": 128}, "num_speculative_tokens": 3, "module": module}
    variables = {"OUTRIDER_ADAPTIVE_SPECULATION": "false", "OUTRIDER_DRAFT_MAX_WAIT_S": "0.2"}
    async with (
        remote_draft(draft) as served,
        engine(folder / "target", folder / "log", served.address, options=options, **variables) as running,
    ):
        each = [{"seed": seed} for seed in range(NUM_SAMPLES)]
        sampling = {"temperature": 1.0, "max_tokens": NUM_TOKENS, "each": each}
        result = await running.run([PROMPT] * NUM_SAMPLES, sampling, together=True)
    return p_value([tuple(text) for text in result["token_ids"]], exact(model)), result["counts"]


@pytest.mark.parametrize("quality", DRAFTS)
async def test_sampled_text_has_the_models_own_distribution(quality: str, tmp_path: Path) -> None:
    value, counts = await p_of(tmp_path, DRAFTS[quality])
    assert value > SIGNIFICANCE
    assert counts["num_verified"] > NUM_SAMPLES / 2


async def test_a_planted_wrong_acceptance_is_noticed(tmp_path: Path) -> None:
    value, _ = await p_of(tmp_path, DRAFTS["good"], "tests.vllm.wrong_process")
    assert value < SIGNIFICANCE
