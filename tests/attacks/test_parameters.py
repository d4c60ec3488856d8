"""Attacks of any client by sampling parameters that are in range, and beyond the numbers of a computer."""

import itertools

import pytest
import torch

from outrider.errors import InvalidArgument
from outrider.parameters import MAX_LOGIT_BIASES, SamplingParameters
from outrider.speculation.sampling import SamplingMetadata, TokenHistory, target_distribution
from tests.orchestrator.scripted import ScriptedTarget
from tests.orchestrator.stage import asking, orchestrating

TINY = 1e-310
"""Not 0, and nothing can be divided by it."""
V = 32


@pytest.mark.parametrize("name", ["repetition_penalty", "temperature", "top_p"])
async def test_attack_03_a_parameter_next_to_nothing_is_named(
    session_store_url: str, target: ScriptedTarget, name: str
) -> None:
    async with orchestrating(session_store_url, (target,)) as orchestrator:
        with pytest.raises(InvalidArgument) as caught:
            await orchestrator.events(asking(**{name: TINY}))
        assert caught.value.field == name
    assert not target.of("open")


def test_attack_03_no_parameters_in_range_make_a_law_that_is_none() -> None:
    torch.manual_seed(3)
    rows = [torch.randn(V) * 30, torch.randn(V) * 1e30, torch.linspace(-1, 1, V) * torch.finfo(torch.float32).max]
    history = list(range(V))
    extremes = {
        "temperature": (1e-12, 1.0, 100.0),
        "repetition_penalty": (0.01, 10.0),
        "penalties": (-2.0, 2.0),
        "top_p": (1e-12, 1.0),
        "min_p": (0.0, 1.0),
        "top_k": (0, 1),
        "logit_bias": ({}, dict.fromkeys(range(V), -100.0), {0: 100.0}),
    }
    for values in itertools.product(*extremes.values()):
        chosen = dict(zip(extremes, values, strict=True))
        penalty = chosen.pop("penalties")
        parameters = SamplingParameters(**chosen, presence_penalty=penalty, frequency_penalty=penalty)
        seen = TokenHistory(history, history * 100, parameters)
        for logits in rows:
            distribution = target_distribution(logits, SamplingMetadata(parameters, seen, ()))
            assert distribution.isfinite().all()
            assert distribution.sum() == pytest.approx(1)


def test_attack_03_what_is_in_use_elsewhere_stays_possible() -> None:
    for values in (
        {"temperature": 0},
        {"temperature": 1e-10, "top_p": 1e-9},
        {"temperature": 2.0, "repetition_penalty": 2.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 0.5, "min_p": 0.9, "top_k": 2**31 - 1},
        {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIASES), -100.0), "logprobs": 20, "seed": 2**64 - 1},
    ):
        SamplingParameters(**values)  # type: ignore[arg-type]
