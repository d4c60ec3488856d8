"""The distribution of the next token, compared with the plain oracle and transformers' logits processors."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.parameters import SamplingParameters
from outrider.speculation.sampling import SamplingMetadata, TokenHistory, changed_logits, target_distribution
from tests.masks import allowed_by, mask_of, random_mask
from tests.oracle import reference_distribution

V = 40
STOP = (3, 17)


def random_logits(seed: int, size: int = V, scale: float = 2.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def distribution_of(
    logits: Tensor, prompt: Sequence[int] = (), output: Sequence[int] = (), stop: Sequence[int] = (), **values: Any
) -> Tensor:
    parameters = SamplingParameters(**values)
    return target_distribution(logits, SamplingMetadata(parameters, TokenHistory(prompt, output, parameters), stop))


def random_parameters(draw: random.Random) -> SamplingParameters:
    """Each parameter is at its default half of the time."""
    choices: dict[str, Any] = {
        "temperature": draw.choice([0.0, 0.1, 0.7, 1.5]),
        "top_k": draw.choice([1, 2, 5, 20, V, 2 * V]),
        "top_p": draw.choice([0.01, 0.3, 0.9, 0.999]),
        "min_p": draw.choice([0.01, 0.2, 1.0]),
        "repetition_penalty": draw.choice([0.5, 1.3, 2.0]),
        "presence_penalty": draw.choice([-1.0, 0.5, 2.0]),
        "frequency_penalty": draw.choice([-0.5, 0.25, 1.0]),
        "logit_bias": {token_id: draw.uniform(-5, 5) for token_id in draw.sample(range(V), 5)},
        "min_tokens": draw.choice([1, 5, 30]),
    }
    return SamplingParameters(**{name: value for name, value in choices.items() if draw.random() < 0.5})


@pytest.mark.parametrize("seed", range(400))
def test_any_parameters_give_the_oracles_distribution(seed: int) -> None:
    draw = random.Random(seed)
    parameters = random_parameters(draw)
    prompt = [draw.randrange(V) for _ in range(draw.randrange(10))]
    output = [draw.randrange(V) for _ in range(draw.randrange(10))]
    logits = random_logits(seed).to(draw.choice([torch.float32, torch.bfloat16, torch.float64]))
    before = logits.clone()
    mask = random_mask(draw, V, must=0) if draw.random() < 0.3 else None
    history = TokenHistory(prompt, output, parameters)
    distribution = target_distribution(logits, SamplingMetadata(parameters, history, STOP, mask))
    allowed = None if mask is None else allowed_by(mask)
    expected = reference_distribution(logits.tolist(), parameters, prompt, output, STOP, allowed)
    assert torch.equal(logits, before)
    assert distribution.dtype == torch.float64
    assert float(distribution.sum()) == pytest.approx(1, abs=1e-14)
    assert distribution.tolist() == pytest.approx(expected, abs=1e-13)
    assert [weight > 0 for weight in distribution.tolist()] == [weight > 0 for weight in expected]


PROCESSORS: dict[str, tuple[LogitsProcessor, dict[str, Any]]] = {
    "temperature": (TemperatureLogitsWarper(0.7), {"temperature": 0.7}),
    "top_k": (TopKLogitsWarper(7), {"top_k": 7}),
    "top_p": (TopPLogitsWarper(0.8), {"top_p": 0.8}),
    "min_p": (MinPLogitsWarper(0.1), {"min_p": 0.1}),
    "repetition_penalty": (RepetitionPenaltyLogitsProcessor(1.4), {"repetition_penalty": 1.4}),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("seed", range(20))
def test_meanings_are_those_of_transformers(name: str, seed: int) -> None:
    processor, values = PROCESSORS[name]
    logits = random_logits(seed).double()
    prompt, output = [1, 5, 5, 9], [2, 9, 30]
    scores = processor(torch.tensor([[*prompt, *output]]), logits[None].clone())[0]
    assert distribution_of(logits, prompt, output, **values).tolist() == pytest.approx(
        scores.softmax(-1).tolist(), abs=1e-13
    )


def test_truncations_apply_in_order() -> None:
    """top_p applies to the tokens after top_k: 0.5 / 0.8 reaches 0.6 alone, 0.5 would not."""
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    assert distribution_of(logits, top_k=2, top_p=0.6).tolist() == [1, 0, 0]
    assert distribution_of(logits, top_p=0.6).tolist() == pytest.approx([0.625, 0.375, 0])


def test_tokens_that_tie_with_the_kth_all_stay() -> None:
    distribution = distribution_of(torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0]), top_k=2)
    assert [weight > 0 for weight in distribution.tolist()] == [True, True, True, True, False]


def test_a_nucleus_takes_the_lower_id_first_among_equals() -> None:
    assert distribution_of(torch.zeros(4), top_p=0.5).tolist() == [0.5, 0.5, 0, 0]
    assert distribution_of(torch.zeros(4), top_p=0.26).tolist() == [0.5, 0.5, 0, 0]
    assert distribution_of(torch.zeros(4), top_p=0.01).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.9999])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_a_nucleus_of_a_large_vocabulary_is_the_same_whether_or_not_all_is_sorted(top_p: float, scale: float) -> None:
    logits = random_logits(1, size=5000, scale=scale).bfloat16()  # bfloat16 makes ties
    expected = reference_distribution(logits.tolist(), SamplingParameters(top_p=top_p))
    assert distribution_of(logits, top_p=top_p).tolist() == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_greedy_takes_the_lowest_id_among_the_largest(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.0, 7.0, 7.0, -1.0], dtype=dtype)
    distribution = distribution_of(logits, temperature=0, top_k=3, top_p=0.1, min_p=0.5)
    assert distribution.tolist() == [0, 1, 0, 0]
    assert distribution.dtype == torch.float64


@pytest.mark.parametrize("temperature", [1e-12, 1e-5])
def test_a_tiny_temperature_is_the_limit_and_not_infinite(temperature: float) -> None:
    assert distribution_of(torch.tensor([1.0, 3.0, 3.0, 2.0]), temperature=temperature).tolist() == [0, 0.5, 0.5, 0]


def test_impossible_tokens_stay_impossible() -> None:
    logits = torch.tensor([-math.inf, 0.0, 1.0])
    distribution = distribution_of(
        logits, [0], [0, 0], logit_bias={0: 100}, repetition_penalty=2, frequency_penalty=-2, temperature=0.5
    )
    assert distribution[0] == 0
    assert float(distribution.sum()) == pytest.approx(1)


@pytest.mark.parametrize("bad", [[-math.inf, -math.inf], [math.nan, 1.0], [math.inf, 1.0]])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_without_a_law_are_refused(bad: list[float], temperature: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        distribution_of(torch.tensor(bad), temperature=temperature)


@pytest.mark.parametrize("temperature", [0, 1])
def test_stop_tokens_are_withheld_until_min_tokens(temperature: float) -> None:
    logits = torch.zeros(V)
    logits[STOP[0]] = 9
    assert distribution_of(logits, output=[1], stop=STOP, min_tokens=2, temperature=temperature)[
        list(STOP)
    ].tolist() == [0, 0]
    assert distribution_of(logits, output=[1, 1], stop=STOP, min_tokens=2, temperature=temperature)[STOP[0]] > 0.9


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros(3, dtype=torch.float64)
    distribution = distribution_of(logits, prompt=[0, 0], output=[1, 2, 2], presence_penalty=1, frequency_penalty=0.5)
    assert distribution.tolist() == pytest.approx(
        torch.tensor([0, -1.5, -2.0], dtype=torch.float64).softmax(-1).tolist()
    )


@pytest.mark.parametrize(
    "values",
    [{}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.5}, {"min_tokens": 6}, {"frequency_penalty": 1.0}],
)
def test_a_history_along_a_branch_is_that_of_the_longer_output(values: dict[str, float]) -> None:
    parameters = SamplingParameters(**values)  # type: ignore[arg-type]
    base = TokenHistory([1, 2], [3, 4], parameters)
    longer = base.extended([5]).extended([]).extended([4, 1])
    logits = random_logits(0)
    expected = target_distribution(
        logits, SamplingMetadata(parameters, TokenHistory([1, 2], [3, 4, 5, 4, 1], parameters), STOP)
    )
    assert torch.equal(target_distribution(logits, SamplingMetadata(parameters, longer, STOP)), expected)
    unchanged = target_distribution(
        logits, SamplingMetadata(parameters, TokenHistory([1, 2], [3, 4], parameters), STOP)
    )
    assert torch.equal(target_distribution(logits, SamplingMetadata(parameters, base, STOP)), unchanged)
    assert (base.num_output, longer.num_output) == (2, 5)


def test_a_history_keeps_nothing_that_no_penalty_needs() -> None:
    history = TokenHistory([1, 2], [3], SamplingParameters()).extended([4])
    assert history.seen() == []
    assert history.output_counts() == ([], [])


def test_a_law_does_not_depend_on_what_else_is_in_memory() -> None:
    """A row of a batch and a copy of it alone have equal bits."""
    rows = random_logits(0, 5 * V).reshape(5, V)
    for row in rows:
        for values in ({}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 0}):
            assert torch.equal(distribution_of(row, **values), distribution_of(row.clone(), **values))


def test_where_a_constraint_must_end_min_tokens_does_not_hold_it_up() -> None:
    parameters, logits = SamplingParameters(min_tokens=5), random_logits(1)
    history = TokenHistory((), (), parameters)
    ends = SamplingMetadata(parameters, history, STOP, mask_of(STOP, V), must_end=True)
    assert target_distribution(logits, ends).nonzero().squeeze(1).tolist() == list(STOP)
    free = SamplingMetadata(parameters, history, STOP, mask_of((*STOP, 5), V))
    assert target_distribution(logits, free).nonzero().squeeze(1).tolist() == [5]


def test_rows_without_a_constraint_keep_their_bits_beside_others() -> None:
    parameters = SamplingParameters()
    history = TokenHistory((), (), parameters)
    logits = torch.stack([random_logits(seed) for seed in range(4)]).bfloat16()
    masked = [SamplingMetadata(parameters, history, (), mask_of((1, 2), V) if row % 2 else None) for row in range(4)]
    found = changed_logits(logits, masked)
    assert torch.equal(found[::2], logits[::2].float())
    assert found[1].isfinite().nonzero().squeeze(1).tolist() == [1, 2]
    assert torch.equal(found[1::2, 1:3], logits[1::2, 1:3].float())
