"""Batched draws: each is the pick from its own distribution, and independent of the other rows."""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.parameters import SamplingParameters
from outrider.speculation.draws import Draw, _places_of_largest, target_draws
from outrider.speculation.randomness import Counter, KeyedSource, Purpose, vocabulary_exponential
from outrider.speculation.sampling import NoPossibleToken, SamplingMetadata, TokenHistory, target_distribution
from tests.masks import allowed_by, random_mask
from tests.oracle import reference_distribution
from tests.repetition import seeds

NUM = 33
SIZES = [3, 16, 1001, 49152]

PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    {"top_p": 0.9, "min_p": 0.001},
    {"min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"top_k": 7, "logit_bias": {0: 3.0, 1: -2.0}},
    {"temperature": 0.3, "top_p": 0.5, "min_tokens": 20},
    {"temperature": 5.0, "top_p": 0.999},
    {"top_k": 1},
    {"temperature": 1e-5},
]


def random_logits(size: int, num: int = NUM, seed: int = 0) -> Tensor:
    logits = torch.randn(num, size, generator=torch.Generator().manual_seed(seed)) * 3
    logits[1::4] = logits[1::4].bfloat16().float()  # ties
    logits[2::5, ::3] = -math.inf
    return logits


def random_draws(size: int, num: int = NUM, seed: int = 0) -> list[Draw]:
    draw = random.Random(seed)
    return [_random_draw(draw, row, size) for row in range(num)]


def _random_draw(draw: random.Random, row: int, size: int) -> Draw:
    parameters = SamplingParameters(**draw.choice(PARAMETERS))
    prompt, output = ([draw.randrange(size) for _ in range(draw.randrange(30))] for _ in range(2))
    allowed = random_mask(draw, size, must=1) if draw.random() < 0.3 else None
    metadata = SamplingMetadata(parameters, TokenHistory(prompt, output, parameters), (size - 1,), allowed)
    return Draw(row, metadata, KeyedSource(draw.getrandbits(64)).key, draw.randrange(2**31))


def distribution_of(logits: Tensor, draw: Draw) -> Tensor:
    return target_distribution(logits, draw.metadata)


def source_of(draw: Draw) -> KeyedSource:
    return KeyedSource(draw.key[0] | draw.key[1] << 32)


def picked(logits: Tensor, draw: Draw) -> int:
    return source_of(draw).pick(distribution_of(logits, draw), Counter(Purpose.TARGET, draw.position))


def batches(num: int) -> Iterator[list[int]]:
    """Yield rows in batches of several sizes, in several orders."""
    order = random.Random(num).sample(range(NUM), NUM)
    for start in range(0, NUM, num):
        yield order[start : start + num]


def alone(logits: Tensor, draw: Draw) -> int:
    only = Draw(0, draw.metadata, draw.key, draw.position)
    return target_draws(logits[draw.row : draw.row + 1].clone(), [only])[0]


@pytest.mark.parametrize(
    ("num", "size"),
    [
        *product([2, 3, 5, 16, NUM], SIZES[:-1]),
        (NUM, SIZES[-1]),
        *(pytest.param(num, SIZES[-1], marks=pytest.mark.slow) for num in (2, 3, 5, 16)),
    ],
)
def test_a_draw_is_the_same_alone_and_beside_others(num: int, size: int) -> None:
    logits, draws = random_logits(size), random_draws(size, seed=num)
    expected = [alone(logits, draw) for draw in draws]
    for rows in batches(num):
        assert target_draws(logits, [draws[row] for row in rows]) == [expected[row] for row in rows]


@pytest.mark.parametrize(
    ("seed", "size"),
    [
        *product(range(4), SIZES[:-1]),
        (0, SIZES[-1]),
        *(pytest.param(seed, SIZES[-1], marks=pytest.mark.slow) for seed in range(1, 4)),
    ],
)
def test_a_draw_is_the_pick_from_its_distribution(seed: int, size: int) -> None:
    logits, draws = random_logits(size, seed=seed), random_draws(size, seed=seed)
    expected = [picked(row, draw) for row, draw in zip(logits, draws, strict=True)]
    assert target_draws(logits, draws) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("seed", seeds(4, 20))
def test_hundreds_of_small_draws_are_the_picks_from_the_oracles_distributions(seed: int, dtype: torch.dtype) -> None:
    size, num = 24, 100
    logits, draws = random_logits(size, num, seed).to(dtype), random_draws(size, num, seed)
    for token_id, draw, row in zip(target_draws(logits, draws), draws, logits.tolist(), strict=True):
        distribution = _reference(row, draw)
        assert source_of(draw).pick(torch.tensor(distribution), Counter(Purpose.TARGET, draw.position)) == token_id


def _reference(logits: Sequence[float], draw: Draw) -> list[float]:
    parameters, history = draw.metadata.parameters, draw.metadata.history
    output = [token_id for token_id, count in zip(*history.output_counts(), strict=True) for _ in range(count)]
    output = output or [0] * history.num_output  # stored only with penalties
    prompt = [] if not parameters.needs_history else history.seen()
    stops, mask = draw.metadata.stop_token_ids, draw.metadata.allowed
    allowed = None if mask is None else allowed_by(mask)
    distribution = reference_distribution(logits, parameters, prompt, output, stops, allowed)
    return [float(weight) for weight in torch.tensor(distribution, dtype=torch.float64)]


@pytest.mark.parametrize("size", SIZES)
def test_noise_of_a_row_has_the_same_bits_alone_and_beside_others(size: int) -> None:
    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(size)
    positions, low, high = (torch.randint(0, 2**32, (NUM, 1), generator=generator) for _ in range(3))
    together = vocabulary_exponential(size, (positions, 0, 0), (low, high), device)
    for row in range(NUM):
        key = int(low[row]), int(high[row])
        assert torch.equal(together[row], vocabulary_exponential(size, (int(positions[row]), 0, 0), key, device)[0])
        few = torch.randperm(size, generator=generator)[: max(size // 7, 1)].sort().values
        counter = Counter(Purpose.TARGET, int(positions[row]))
        source = KeyedSource(key[0] | key[1] << 32)
        assert torch.equal(together[row, few], source.exponential(few, counter))


def test_many_draws_may_be_of_one_row() -> None:
    logits, metadata = (
        random_logits(16),
        SamplingMetadata(SamplingParameters(), TokenHistory((), (), SamplingParameters()), ()),
    )
    draws = [Draw(3, metadata, (1, 2), position) for position in range(200)]
    assert target_draws(logits, draws) == [picked(logits[3], draw) for draw in draws]


def test_no_draws_give_no_tokens() -> None:
    assert target_draws(random_logits(16), []) == []


@pytest.mark.parametrize("bad", [[-math.inf, -math.inf], [math.nan, 1.0], [math.inf, 1.0]])
@pytest.mark.parametrize("values", [{}, {"temperature": 0}, {"top_k": 1}, {"top_p": 0.5}, {"logit_bias": {1: 1.0}}])
def test_logits_without_a_distribution_have_no_token(bad: list[float], values: dict[str, Any]) -> None:
    parameters = SamplingParameters(**values)
    metadata = SamplingMetadata(parameters, TokenHistory((), (), parameters), ())
    draws = [Draw(row, metadata, (0, 0), 0) for row in (1, 0)]
    logits = torch.tensor([[0.0, 1.0], bad])
    assert target_draws(logits, draws) == [None, target_draws(logits, draws[1:])[0]]
    with pytest.raises(NoPossibleToken, match="finite"):
        target_distribution(logits[1], metadata)


def test_ties_go_to_the_lowest_id() -> None:
    parameters = SamplingParameters(temperature=0)
    metadata = SamplingMetadata(parameters, TokenHistory((), (), parameters), ())
    logits = torch.zeros(40, 49152).bfloat16()
    logits[:, [70, 30000, 49151]] = 1
    assert target_draws(logits, [Draw(row, metadata, (0, 0), 0) for row in range(40)]) == [70] * 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 100, 128, 384, 4096])
def test_the_largest_logit_is_the_first_of_equals_or_a_nan(size: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(size)
    scores = torch.randint(4, (6, size), generator=draw).to(dtype)
    scores[1], scores[2] = -torch.inf, torch.inf
    scores[3, size // 2], scores[4, -1] = torch.nan, torch.nan
    rows = [[math.inf if math.isnan(value) else value for value in row] for row in scores.tolist()]
    expected = [row.index(max(row)) for row in rows]
    assert _places_of_largest(scores).tolist() == expected
