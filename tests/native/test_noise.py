"""Keyed noise of many tokens: the bits are those of PyTorch's operators, by every variant."""

import pytest
import torch
from torch import Tensor

from outrider import native
from outrider.native import Variant
from outrider.speculation.randomness import Counter, KeyedSource, Purpose, vocabulary_exponential

BEST = native.best_variant()
pytestmark = pytest.mark.skipif(BEST is None, reason="no native operators here")
VARIANTS = [item for item in Variant if BEST is not None and item <= BEST]
COUNTERS = [
    Counter(Purpose.TARGET, 0),
    Counter(Purpose.DRAFT, 2**32 - 1, 2**32 - 1, 2**24 - 1),
    Counter(Purpose.RESIDUAL, 7, 3, 1),
]
CPU = torch.device("cpu")


def by_torch(monkeypatch: pytest.MonkeyPatch, source: KeyedSource, token_ids: Tensor, counter: Counter) -> Tensor:
    """Returns the noise that PyTorch's operators make."""
    with monkeypatch.context() as patch:
        patch.setattr(native, "loaded_variant", lambda: None)
        return source.exponential(token_ids, counter)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda item: item.name)
@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 9001])
def test_the_bits_are_those_of_torch(variant: Variant, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spread = torch.randint(2**31, (size,), generator=torch.Generator().manual_seed(size)).unique()
    for seed in (0, 2**64 - 1, 0x1234_5678_9ABC_DEF0):
        source = KeyedSource(seed)
        for counter in COUNTERS:
            for token_ids in (torch.arange(size), spread, spread[::2]):
                expected = by_torch(monkeypatch, source, token_ids, counter)
                with monkeypatch.context() as patch:
                    patch.setattr(native, "loaded_variant", lambda: variant)
                    assert torch.equal(source.exponential(token_ids, counter), expected)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda item: item.name)
@pytest.mark.parametrize("size", [1, 700, 20_000])
def test_rows_have_counters_and_keys_of_their_own(variant: Variant, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.randint(2**32, (3, 5, 1), generator=torch.Generator().manual_seed(size))
    words, key = (numbers[0], 0, 2), (numbers[1], numbers[2])
    monkeypatch.setattr(native, "loaded_variant", lambda: None)
    expected = vocabulary_exponential(size, words, key, CPU)
    monkeypatch.setattr(native, "loaded_variant", lambda: variant)
    assert torch.equal(vocabulary_exponential(size, words, key, CPU), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.arange(4)}, "no row"),
        ({"token_ids": torch.zeros(1, 4)}, "int64"),
        ({"token_ids": torch.zeros(3, 4, dtype=torch.int64)}, "as many rows"),
        ({"token_ids": torch.zeros(8, 2, dtype=torch.int64).T}, "contiguous"),
        ({"counters": torch.zeros(2, 4, dtype=torch.int64)}, "no row"),
        ({"counters": torch.zeros(2, 5)}, "int64"),
        ({"variant": 7}, "variant 7"),
    ],
)
def test_what_does_not_fit_is_an_error(change: dict[str, object], message: str) -> None:
    arguments = {"token_ids": torch.zeros(1, 4, dtype=torch.int64), "counters": torch.zeros(2, 5, dtype=torch.int64)}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.outrider.uniform_noise.default(**arguments | {"variant": 0} | change)


def test_no_tokens_have_no_noise() -> None:
    none = torch.ops.outrider.uniform_noise.default(torch.zeros(1, 0).long(), torch.zeros(2, 5).long(), 0)
    assert none.shape == (2, 0) and none.dtype == torch.float64
