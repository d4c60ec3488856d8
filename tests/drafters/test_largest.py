"""The largest scores: those that `torch.topk` gives, and of equals the lowest place first."""

import math

import pytest
import torch

from outrider.drafters.largest import largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 8, 500, 2048, 2049, 5000, 49_152, 50_257])
@pytest.mark.parametrize("num", [1, 8])
def test_equals_topk(size: int, num: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size + num)
    scores, num = torch.randn(5, size, dtype=dtype), min(num, size)
    values, places = largest(scores, num)
    expected = scores.topk(num)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)


@pytest.mark.parametrize("size", [64, 5000, 50_257])
def test_the_first_of_equals_is_at_the_lowest_place(size: int) -> None:
    torch.manual_seed(size)
    for levels in (1, 3, 40):
        scores = torch.randint(levels, (20, size)).float()
        values, places = largest(scores, 8)
        assert torch.equal(values, scores.topk(8).values)
        assert torch.equal(scores.gather(1, places), values)
        assert torch.equal(places[:, 0], scores.argmax(-1))
        assert all(len(set(row)) == 8 for row in places.tolist())


@pytest.mark.parametrize("size", [300, 5000, 50_257])
def test_what_is_excluded_comes_last(size: int) -> None:
    scores = torch.full((2, size), -math.inf)
    scores[0, [size - 1, 7]] = torch.tensor([1.0, 2.0])
    values, places = largest(scores, 4)
    assert values[0].tolist() == [2.0, 1.0, -math.inf, -math.inf]
    assert places[0, :2].tolist() == [7, size - 1]
    assert values[1].isneginf().all()
    assert (places < size).all()
