"""The place of each row's largest score: that of `argmax`, whatever the scores, their type, threads and variant."""

import pytest
import torch

from outrider import native
from outrider.native import Variant
from outrider.parameters import SamplingParameters
from outrider.speculation.draws import Draw, target_draws
from outrider.speculation.sampling import SamplingMetadata, TokenHistory

BEST = native.best_variant()
pytestmark = pytest.mark.skipif(BEST is None, reason="no native operators here")


@pytest.fixture(params=[item for item in Variant if BEST is not None and item <= BEST], ids=lambda item: item.name)
def variant(request: pytest.FixtureRequest) -> int:
    """Each variant that this CPU can run."""
    return int(request.param)


def compared(scores: torch.Tensor, variant: int) -> None:
    """Compares with PyTorch's operator."""
    places, are_finite = torch.ops.outrider.places_of_largest.default(scores, variant)
    expected = scores.float().argmax(-1)
    assert torch.equal(places, expected)
    assert are_finite.bool().tolist() == scores.gather(1, expected[:, None])[:, 0].isfinite().tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 500, 49152])
def test_it_is_that_of_argmax(size: int, dtype: torch.dtype, variant: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for spread in (0.0, 1e-40, 1.0, 1e30):
        compared((spread * torch.randn(40, size, generator=generator)).to(dtype), variant)
    compared(torch.randint(-3, 3, (40, size), generator=generator).to(dtype), variant)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_zeros_of_both_signs_are_equal_and_no_number_is_larger_than_nan(dtype: torch.dtype, variant: int) -> None:
    scores = torch.full((8, 300), -torch.inf)
    scores[0, 200], scores[0, 210] = -0.0, 0.0
    scores[1, 150], scores[1, 3] = torch.inf, 3e38
    scores[2, 290], scores[2, 10] = torch.nan, torch.inf
    scores[3, [250, 140]] = -torch.tensor(torch.nan)
    scores[4, 299] = -3e38
    scores[5] = torch.nan
    scores[6, 128:], scores[6, 5] = -1.0, -1.0
    compared(scores.to(dtype), variant)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_greedy_tokens_are_those_without_the_operator(
    dtype: torch.dtype, variant: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randint(-40, 40, (5, 1000)).to(dtype)
    logits[3], logits[4, 7] = -torch.inf, torch.nan
    chosen = []
    for row in range(5):
        # A penalty changes the logits of one row, and their type.
        parameters = SamplingParameters(temperature=0, presence_penalty=float(row == 2))
        metadata = SamplingMetadata(parameters, TokenHistory((), (), parameters), ())
        chosen.append(Draw(row, metadata, (0, 0), 9))
    monkeypatch.setattr(native, "loaded_variant", lambda: Variant(variant))
    found = target_draws(logits, chosen)
    monkeypatch.setattr(native, "loaded_variant", lambda: None)
    assert found == target_draws(logits, chosen)
    assert found[:3] == logits[:3].argmax(-1).tolist() and found[3:] == [None, None]


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (torch.zeros(2, 8).double(), "bfloat16 or float32"),
        (torch.zeros(8), "must have rows"),
        (torch.zeros(8, 2).T, "contiguous"),
        (torch.zeros(2, 0), "no scores"),
    ],
)
def test_what_does_not_fit_is_an_error(scores: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.ops.outrider.places_of_largest.default(scores, 0)


def test_a_variant_that_the_cpu_lacks_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="variant 7"):
        torch.ops.outrider.places_of_largest.default(torch.zeros(2, 8), 7)
