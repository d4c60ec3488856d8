"""Keyed randomness: published vectors, ranges, uniformity, independence and tails, at fixed seeds."""

import math
from itertools import pairwise

import pytest
import torch
from scipy import stats
from torch import Tensor

from outrider import native
from outrider.speculation.randomness import Counter, KeyedSource, Purpose, philox4x32, token_exponential

ALPHA = 1e-6
"""Significance level of the statistical tests; seeds are fixed, so that results are deterministic."""

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""Counter, key and output of philox4x32-10 in Random123's kat_vectors."""


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


def exponential(seed: int, counter: Counter, num: int = 4096) -> Tensor:
    return KeyedSource(seed).exponential(torch.arange(num), counter)


@pytest.mark.parametrize(("counter", "key", "output"), VECTORS)
def test_integers_give_the_published_vectors(counter: str, key: str, output: str) -> None:
    index, *rest = words(counter)
    low, high = words(key)
    assert philox4x32(index, (rest[0], rest[1], rest[2]), (low, high)) == words(output)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("counter", "key", "output"), VECTORS)
def test_tensors_give_the_published_vectors(counter: str, key: str, output: str, device: str) -> None:
    index, *rest = words(counter)
    low, high = words(key)
    blocks = philox4x32(torch.tensor([0, index], device=device), (rest[0], rest[1], rest[2]), (low, high))
    assert tuple(int(torch.as_tensor(word)[1]) for word in blocks) == words(output)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_and_integers_agree(device: str) -> None:
    index = torch.randint(0, 2**32, (500,), generator=torch.Generator().manual_seed(0))
    blocks = philox4x32(index.to(device), (7, 2**32 - 1, 12345), (2**31, 99))
    rows = list(zip(*(torch.as_tensor(word).tolist() for word in blocks), strict=True))
    assert rows == [philox4x32(value, (7, 2**32 - 1, 12345), (2**31, 99)) for value in index.tolist()]


def test_different_counters_have_different_words() -> None:
    counters = [
        Counter(purpose, position, base_len, segment)
        for purpose in Purpose
        for position in (0, 1, 2**32 - 1)
        for base_len in (0, 1, 2**32 - 1)
        for segment in (0, 1, 2**24 - 1)
    ]
    assert len({counter.words for counter in counters}) == len(counters)
    assert all(0 <= word < 2**32 for counter in counters for word in counter.words)


@pytest.mark.parametrize("values", [(-1, 0, 0), (2**32, 0, 0), (0, -1, 0), (0, 2**32, 0), (0, 0, -1), (0, 0, 2**24)])
def test_counters_out_of_range_are_refused(values: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        Counter(Purpose.TARGET, *values)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_out_of_range_are_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="seed"):
        KeyedSource(seed)


@pytest.mark.parametrize("num", [1, 17, 256, 257])
def test_tokens_may_have_a_counter_each(num: int) -> None:
    draw = torch.Generator().manual_seed(num)
    token_ids, positions, seeds = (torch.randint(2**16, (num,), generator=draw) for _ in range(3))
    words = positions, 0, int(Purpose.TARGET)
    noise = token_exponential(token_ids, words, (seeds, seeds + 1))
    rows = zip(noise, token_ids, positions.tolist(), seeds.tolist(), strict=True)
    for value, token_id, position, seed in rows:
        source = KeyedSource(seed + ((seed + 1) << 32))
        assert value == source.exponential(token_id.view(1), Counter(Purpose.TARGET, position))


@pytest.mark.parametrize("size", [1, 2, 3, 50, 257])
def test_a_tokens_noise_does_not_depend_on_which_others_are_asked_for(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "loaded_variant", lambda: None)
    counter = Counter(Purpose.TARGET, 11)
    source = KeyedSource(5)
    all_noise = source.exponential(torch.arange(257), counter)
    token_ids = torch.randperm(257, generator=torch.Generator().manual_seed(size))[:size].sort().values
    assert torch.equal(source.exponential(token_ids, counter), all_noise[token_ids])


@pytest.mark.parametrize("bits", [0, 2**32 - 1])
@pytest.mark.parametrize("num", [3, 100])
def test_noise_is_finite_and_positive_at_both_ends(num: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "loaded_variant", lambda: None)
    monkeypatch.setattr("outrider.speculation.randomness.philox4x32", lambda index, *_: [index * 0 + bits] * 4)
    noise = KeyedSource(0).exponential(torch.arange(num), Counter(Purpose.TARGET, 0))
    assert bool(((noise > 0) & noise.isfinite()).all())
    assert float(noise[0]) == pytest.approx(53 * math.log(2) if bits == 0 else 2.0**-53, rel=1e-9)


class FixedUniform(KeyedSource):
    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def uniform(self, counter: Counter) -> float:
        return self.value


@pytest.mark.parametrize("value", [0.0, 0.5, 1 - 2.0**-53])
def test_the_impossible_never_happens_and_the_certain_always_does(value: float) -> None:
    counter = Counter(Purpose.ACCEPT, 0)
    assert not FixedUniform(value).accept(0.0, counter)
    assert FixedUniform(value).accept(1.0, counter)
    assert FixedUniform(value).accept(math.nextafter(value, 1), counter)
    assert not FixedUniform(value).accept(value, counter)


def test_uniforms_are_uniform_over_positions() -> None:
    source = KeyedSource(42)
    values = [source.uniform(Counter(Purpose.ACCEPT, position, 7)) for position in range(20_000)]
    assert all(0 <= value < 1 for value in values)
    assert stats.kstest(values, "uniform").pvalue > ALPHA
    # All 53 bits are used, each as often set as not.
    for bit in range(53):
        num_set = sum(int(value * 2**53) >> bit & 1 for value in values)
        assert stats.binomtest(num_set, len(values)).pvalue > ALPHA


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_noise_is_exponential_over_tokens(seed: int) -> None:
    noise = exponential(seed, Counter(Purpose.TARGET, 9), 100_000)
    assert stats.kstest(noise.numpy(), "expon").pvalue > ALPHA


def test_noise_is_exponential_over_positions() -> None:
    noise = torch.stack([exponential(3, Counter(Purpose.TARGET, position), 20) for position in range(2000)])
    for token_id in range(20):
        assert stats.kstest(noise[:, token_id].numpy(), "expon").pvalue > ALPHA


@pytest.mark.parametrize("num", [300_000, pytest.param(4_000_000, marks=pytest.mark.slow)])
def test_tails_are_those_of_the_exponential(num: int) -> None:
    noise = exponential(17, Counter(Purpose.TARGET, 1), num)
    for threshold in (8.0, 10.0, 12.0):
        assert stats.binomtest(int((noise > threshold).sum()), num, math.exp(-threshold)).pvalue > ALPHA
        small = math.exp(-threshold)
        assert stats.binomtest(int((noise < small).sum()), num, -math.expm1(-small)).pvalue > ALPHA


NEIGHBOURS = {
    "positions": (0, Counter(Purpose.DRAFT, 6, 5)),
    "purposes": (0, Counter(Purpose.RESIDUAL, 5, 5)),
    "base lengths": (0, Counter(Purpose.DRAFT, 5, 6)),
    "segments": (0, Counter(Purpose.DRAFT, 5, 5, 1)),
    "seeds": (1, Counter(Purpose.DRAFT, 5, 5)),
    "seeds' upper words": (2**32, Counter(Purpose.DRAFT, 5, 5)),
}


@pytest.mark.parametrize("what", NEIGHBOURS)
def test_noise_is_independent_across(what: str) -> None:
    seed, counter = NEIGHBOURS[what]
    one = exponential(0, Counter(Purpose.DRAFT, 5, 5)).neg().exp().numpy()
    other = exponential(seed, counter).neg().exp().numpy()
    assert stats.spearmanr(one, other).pvalue > ALPHA
    table = stats.binned_statistic_2d(one, other, None, "count", bins=8).statistic
    assert stats.chi2_contingency(table).pvalue > ALPHA


def test_noise_is_independent_across_neighbouring_tokens() -> None:
    noise = exponential(0, Counter(Purpose.TARGET, 5), 8192).neg().exp()
    # Within a block, and from block to block.
    assert stats.spearmanr(noise[0::2].numpy(), noise[1::2].numpy()).pvalue > ALPHA
    assert stats.spearmanr(noise[1:-1:2].numpy(), noise[2::2].numpy()).pvalue > ALPHA


def test_successive_uniforms_are_independent() -> None:
    source = KeyedSource(8)
    values = [source.uniform(Counter(Purpose.ACCEPT, position)) for position in range(10_000)]
    left, right = zip(*pairwise(values), strict=True)
    assert stats.spearmanr(left, right).pvalue > ALPHA


@pytest.mark.parametrize("weights", [[0.5, 0.2, 0.0, 0.3], [3.0, 1.0], [0.001, 0.999], [0.0] * 100 + [1.0, 2.0, 3.0]])
@pytest.mark.parametrize("num", [1000, pytest.param(16_000, marks=pytest.mark.slow)])
def test_picks_follow_the_weights(num: int, weights: list[float]) -> None:
    distribution = torch.tensor(weights, dtype=torch.float64)
    source = KeyedSource(123)
    picks = [source.pick(distribution, Counter(Purpose.TARGET, position)) for position in range(num)]
    support = [token_id for token_id, weight in enumerate(weights) if weight > 0]
    assert set(picks) <= set(support)
    expected = [num * weights[token_id] / sum(weights) for token_id in support]
    assert stats.chisquare([picks.count(token_id) for token_id in support], expected).pvalue > ALPHA


def test_a_pick_is_the_gumbel_max() -> None:
    source = KeyedSource(6)
    for position in range(50):
        distribution = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(position))
        counter = Counter(Purpose.TARGET, position)
        assert source.pick(distribution, counter) == int(
            (distribution.log() - source.exponential(torch.arange(64), counter).log()).argmax()
        )


@pytest.mark.parametrize("num_support", [2, 10, 63, 64])
def test_picks_from_a_part_of_the_vocabulary_use_the_same_noise(num_support: int) -> None:
    """The pick does not depend on whether noise is computed for all tokens or for the support alone."""
    source = KeyedSource(6)
    for position in range(50):
        generator = torch.Generator().manual_seed(position)
        distribution = torch.rand(64, dtype=torch.float64, generator=generator)
        distribution[torch.randperm(64, generator=generator)[num_support:]] = 0
        counter = Counter(Purpose.TARGET, position)
        assert source.pick(distribution, counter) == int(
            (distribution / source.exponential(torch.arange(64), counter)).argmax()
        )


class SameNoise(KeyedSource):
    def exponential(self, token_ids: Tensor, counter: Counter) -> Tensor:
        return torch.ones(len(token_ids), dtype=torch.float64)


@pytest.mark.parametrize("size", [5, 500])
def test_ties_go_to_the_lowest_id(size: int) -> None:
    distribution = torch.zeros(size, dtype=torch.float64)
    distribution[[1, 2, 4]] = 1 / 3
    assert SameNoise(0).pick(distribution, Counter(Purpose.TARGET, 0)) == 1


def test_one_possible_token_takes_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyedSource, "exponential", None)
    distribution = torch.zeros(10, dtype=torch.float64)
    distribution[7] = 1
    assert KeyedSource(0).pick(distribution, Counter(Purpose.TARGET, 0)) == 7


def test_weights_without_a_positive_one_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        KeyedSource(0).pick(torch.zeros(3, dtype=torch.float64), Counter(Purpose.TARGET, 0))


@pytest.mark.parametrize("device", DEVICES)
def test_picks_do_not_depend_on_the_device(device: str) -> None:
    distribution = torch.rand(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    source = KeyedSource(77)
    counters = [Counter(Purpose.TARGET, position) for position in range(20)]
    assert [source.pick(distribution.to(device), counter) for counter in counters] == [
        source.pick(distribution, counter) for counter in counters
    ]
