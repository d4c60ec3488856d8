"""The scores of tokens that a draft expects to win a race: logarithms of weight / noise, by every variant."""

import pytest
import torch
from torch import Tensor

from outrider import native
from outrider.native import Variant
from outrider.speculation.randomness import Counter, KeyedSource, Purpose

BEST = native.best_variant()
pytestmark = pytest.mark.skipif(BEST is None, reason="no native operators here")
VARIANTS = [item for item in Variant if BEST is not None and item <= BEST]
SOURCE = KeyedSource(0x1234_5678_9ABC_DEF0)
DRAWN = torch.ops.outrider.drawn_scores


def counters(*positions: int) -> Tensor:
    return torch.tensor([(*Counter(Purpose.TARGET, at).words, *SOURCE.key) for at in positions])


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda item: item.name)
@pytest.mark.parametrize("size", [1, 255, 257, 100_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_they_are_those_of_exact_noise(variant: Variant, size: int, dtype: torch.dtype, temperature: float) -> None:
    generator = torch.Generator().manual_seed(size)
    token_ids = torch.randint(2**31, (size,), generator=generator).unique()
    scores = (4 * torch.randn(3, len(token_ids), generator=generator)).to(dtype)
    scores[1, 0] = -torch.inf
    scores[1, -1] = 30.0
    found = DRAWN.default(scores, token_ids, counters(7, 8), [1, 0, 1], 1 / temperature, int(variant))
    noise = torch.stack([SOURCE.exponential(token_ids, Counter(Purpose.TARGET, at)) for at in (8, 7, 8)])
    exact = (scores.double() - scores.double().amax(-1, keepdim=True)) / temperature - noise.log()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(2, 4).double()}, "bfloat16 or float32"),
        ({"token_ids": torch.arange(3)}, "one for each score"),
        ({"token_ids": torch.zeros(4)}, "must be int64"),
        ({"counters": torch.zeros(1, 4, dtype=torch.int64)}, r"int64 \[R, 5\]"),
        ({"noise_rows": [0]}, "each row has a counter"),
        ({"noise_rows": [0, 1]}, "no counter 1"),
        ({"noise_rows": [-1, 0]}, "no counter -1"),
        ({"variant": 4}, "variant 4"),
    ],
)
def test_what_does_not_fit_is_an_error(change: dict[str, object], message: str) -> None:
    arguments = {
        "scores": torch.zeros(2, 4),
        "token_ids": torch.arange(4),
        "counters": counters(3),
        "noise_rows": [0, 0],
        "inverse_temperature": 1.0,
        "variant": 0,
    }
    assert DRAWN.default(**arguments).shape == (2, 4)
    with pytest.raises(RuntimeError, match=message):
        DRAWN.default(**arguments | change)
