"""The largest scores and their shares: those that PyTorch gives, and of equals the lowest place first."""

import math

import pytest
import torch

from outrider import native
from outrider.drafters.largest import largest_shares
from outrider.native import Variant

BEST = native.best_variant()
VARIANTS = [None, *(item for item in Variant if BEST is not None and item <= BEST)]
TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=VARIANTS, ids=lambda item: "torch" if item is None else item.name, autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Variant | None:
    """The variant that finds them; None for PyTorch's operators."""
    monkeypatch.setattr(native, "loaded_variant", lambda: request.param)
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 8, 127, 500, 2048, 2049, 8192, 50_257])
@pytest.mark.parametrize("num", [1, 8])
def test_equals_topk_and_softmax(size: int, num: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size + num)
    for spread in (0.01, 1.0, 30.0):
        # Evenly spaced in any order, so that no two are equal, but where bfloat16 makes them so.
        scores = spread * (torch.stack([torch.randperm(size) for _ in range(5)]) / size - 0.5)
        scores, num = scores.to(dtype), min(num, size)
        places, shares = largest_shares(scores, num, is_softmax=True)
        expected = scores.float().topk(num)
        assert torch.equal(scores.float().gather(1, places), expected.values)
        if dtype is torch.float32:
            assert torch.equal(places, expected.indices)
        wanted = scores.double().softmax(-1).gather(1, places)
        torch.testing.assert_close(shares.double(), wanted, rtol=2e-3, atol=0)


@pytest.mark.parametrize("size", [1, 500, 8192])
def test_shares_of_scores_themselves(size: int) -> None:
    torch.manual_seed(size)
    scores, num = torch.rand(5, size) ** 20, min(3, size)
    scores[1], scores[2, 0] = 0.0, 1e30
    places, shares = largest_shares(scores, num, is_softmax=False)
    wanted = scores.double() / scores.double().sum(-1, keepdim=True)
    wanted[1] = 0.0
    torch.testing.assert_close(shares.double(), wanted.gather(1, places), rtol=2e-3, atol=0)
    assert torch.equal(scores.gather(1, places), scores.topk(num).values)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [64, 5000, 50_257])
def test_the_first_of_equals_is_at_the_lowest_place(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    for levels in (1, 3, 40):
        scores = torch.randint(levels, (20, size)) - 1.0
        # Of the zeros some are negative, which is no less.
        scores = torch.where(scores == 0, torch.where(torch.rand(20, size) < 0.5, 0.0, -0.0), scores).to(dtype)
        places, _ = largest_shares(scores, 8, is_softmax=True)
        assert torch.equal(scores.gather(1, places), scores.topk(8).values)
        assert torch.equal(places[:, 0], scores.argmax(-1))
        assert all(len(set(row)) == 8 for row in places.tolist())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [300, 5000, 50_257])
def test_what_is_excluded_comes_last_and_has_no_share(size: int, dtype: torch.dtype) -> None:
    scores = torch.full((2, size), -math.inf, dtype=dtype)
    scores[0, [size - 1, 7]] = torch.tensor([1.0, 2.0], dtype=dtype)
    scores[1, 3] = -1e30
    places, shares = largest_shares(scores, 4, is_softmax=True)
    assert places[0, :2].tolist() == [7, size - 1]
    torch.testing.assert_close(shares[0, :2].double(), torch.tensor([2.0, 1.0]).double().softmax(-1), rtol=2e-3, atol=0)
    assert shares[0, 2:].tolist() == [0.0, 0.0]
    assert (int(places[1, 0]), shares[1].tolist()) == (3, [pytest.approx(1.0, rel=1e-3), 0.0, 0.0, 0.0])


def test_rows_that_do_not_lie_together(variant: Variant | None) -> None:
    scores = torch.randn(40, 3000)
    whole, part = scores[::2, 5:2900], scores[::2, 5:2900].contiguous()
    found, wanted = (largest_shares(item, 4, is_softmax=True) for item in (whole, part))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.skipif(BEST is None, reason="no native operators here")
def test_what_the_operator_cannot_do_is_refused() -> None:
    operator = torch.ops.outrider.largest_scores.default
    for num in (0, 9):
        with pytest.raises(RuntimeError, match="of 8 scores has no"):
            operator(torch.zeros(2, 8), num, True, 0)
    with pytest.raises(RuntimeError, match="bfloat16 or float32"):
        operator(torch.zeros(2, 8).double(), 1, True, 0)
    with pytest.raises(RuntimeError, match="contiguous"):
        operator(torch.zeros(8, 8)[:, ::2], 1, True, 0)
    with pytest.raises(RuntimeError, match="variant 7"):
        operator(torch.zeros(2, 8), 1, True, 7)
