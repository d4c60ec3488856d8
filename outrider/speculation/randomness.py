"""Keyed randomness: every random number is a pure function of a seed and a counter.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), on Python's
integers or integer tensors, so that all devices produce the same integers; a native operator makes the same ones for
many tokens on a CPU. Uniform and exponential noise made from them is float64; ties go to the lowest token id.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

import torch
from torch import Tensor

from outrider import native

Word: TypeAlias = int | Tensor
"""A 32-bit word as an int, or one per element of an int64 tensor; the tensors of one computation broadcast."""

Words: TypeAlias = tuple[Word, Word, Word]
"""The three upper words of Philox counters; the lowest one is free for an index."""

Key: TypeAlias = tuple[Word, Word]
"""The two words of a Philox key."""

_MASK: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10
_MAX_SEGMENT: Final = 2**24 - 1
_NUM_ALONE: Final = 256
"""Tokens with a counter each that the native operator is given one by one: each takes it 1 us, where operations on
tensors take 350 us for any number."""
_FEW_BLOCKS: Final = 16
"""Blocks that are made one by one on Python's integers: each takes 9 us."""
# Above this share of the vocabulary, noise for all of it costs less than noise for the support alone.
_DENSE_SHARE: Final = 0.25


class Purpose(IntEnum):
    """The purposes of random decisions; no counter may be used for two decisions."""

    TARGET = 0
    """The target's own token under `coupled`; the draft uses the same noise to predict it."""
    DRAFT = 1
    """The draft's token under `rejection`."""
    ACCEPT = 2
    """Whether a drafted token is accepted under `rejection`."""
    RESIDUAL = 3
    """The recovered or bonus token under `rejection`."""


@dataclass(frozen=True, slots=True)
class Counter:
    """The identity of one random decision of a session.

    Attributes:
        purpose: of the decision.
        position: session position of the token that it affects, in [0, 2**32).
        base_len: under `rejection` the session length that the round continues, in [0, 2**32), because draws beyond a
            rejection affected the outcome and must not be reused in the next round; 0 under `coupled`, which depends
            on the position alone.
        segment: number of the node below which the drafted chain starts, in [0, 2**24); `ROOT` for the first chain.
            Chains of one tree overlap in position, and the draws of one can affect whether another is verified.
    """

    purpose: Purpose
    position: int
    base_len: int = 0
    segment: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.position <= _MASK and 0 <= self.base_len <= _MASK and 0 <= self.segment <= _MAX_SEGMENT):
            raise ValueError(f"{self} is out of range")

    @property
    def words(self) -> Words:
        """The three upper words of the decision's Philox counters."""
        return self.position, self.base_len, self.purpose | self.segment << 8


def philox4x32(index: Word, words: Words, key: Key) -> tuple[Word, Word, Word, Word]:
    """Return Philox4x32-10 of the counters (index, *words) (Salmon et al. 2011, section 3.3).

    Args:
        index: the first counter word of each block, in [0, 2**32).
        words: the other three counter words, in [0, 2**32).
        key: two words, in [0, 2**32).

    Returns:
        Four words, each in [0, 2**32): ints for ints, int64 tensors of the common shape where there is a tensor.
    """
    state: tuple[Word, Word, Word, Word] = (index, *words)
    word_0, word_1, word_2, word_3 = state
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        # Only the factors must be exact words. Words 1 and 3 are kept as full products, and products of tensors wrap
        # around the sign: their lower 32 bits are still correct, and the mask selects them.
        product_0, product_1 = word_0 * _MULTIPLIERS[0], word_2 * _MULTIPLIERS[1]
        word_0, word_2 = _mix(product_1, word_1, key_0), _mix(product_0, word_3, key_1)
        word_1, word_3 = product_1, product_0
        key_0, key_1 = (key_0 + _WEYL[0]) & _MASK, (key_1 + _WEYL[1]) & _MASK
    return word_0, word_1 & _MASK, word_2, word_3 & _MASK


class KeyedSource:
    """The production `DecisionSource`: each decision is a function of a seed and the decision's counter.

    Args:
        seed: in [0, 2**64).
    """

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed}, must be in [0, 2**64)")
        self._key = (seed & _MASK, seed >> 32)

    @property
    def key(self) -> tuple[int, int]:
        """The low and the high 32 bits of the seed."""
        return self._key

    def pick(self, weights: Tensor, counter: Counter) -> int:
        """Return a token id sampled with probability proportional to `weights`, by the Gumbel-max trick.

        The argmax of log(weight) + Gumbel noise is computed as that of weight / exponential noise, which is equal and
        takes a third of the logarithms. No noise is computed if only one weight is positive.

        Args:
            weights: float64 [V], at least 0, with a positive one; need not sum to 1.
            counter: of the decision; the noise of a token does not depend on the weights.

        Raises:
            ValueError: no weight is positive.
        """
        num_support = int(torch.count_nonzero(weights))
        if num_support == 0:
            raise ValueError("no weight is positive")
        if num_support == 1:
            return int(weights.argmax())
        if num_support > _DENSE_SHARE * weights.numel():
            token_ids = torch.arange(weights.numel(), device=weights.device)
            return int(self._race(weights, token_ids, counter).argmax())
        support = weights.nonzero().squeeze(1)
        return int(support[self._race(weights[support], support, counter).argmax()])

    def accept(self, probability: float, counter: Counter) -> bool:
        """Return True with this probability, in [0, 1]: never for 0, always for 1."""
        return self.uniform(counter) < probability

    def uniform(self, counter: Counter) -> float:
        """Return the counter's uniform random number in [0, 1), a multiple of 2**-53."""
        high, low, *_ = philox4x32(0, counter.words, self._key)
        return float(high << 21 | low >> 11) * 2.0**-53

    def exponential(self, token_ids: Tensor, counter: Counter) -> Tensor:
        """Return standard exponential noise, float64 [N], positive and finite, of ascending token ids, int64 [N]."""
        if token_ids[-1] == len(token_ids) - 1:  # ascending, so these are all ids from 0 on
            return vocabulary_exponential(len(token_ids), counter.words, self._key, token_ids.device).view(-1)
        return token_exponential(token_ids, counter.words, self._key)

    def _race(self, weights: Tensor, token_ids: Tensor, counter: Counter) -> Tensor:
        return self.exponential(token_ids, counter).reciprocal_().mul_(weights)


def token_exponential(token_ids: Tensor, words: Words, key: Key) -> Tensor:
    """Return standard exponential noise of tokens, each with a counter and key of its own.

    Block v // 2 is the source of the noise of tokens v and v + 1 (v even), two words each, of which 52 bits are used:
    (bits + 1/2) / 2**52 is exact and lies strictly between 0 and 1. A token's noise does not depend on which other
    tokens are computed.

    Args:
        token_ids: int64 [N], at least 0.
        words: ints, or int64 [N].
        key: ints, or int64 [N].

    Returns:
        float64 [N], positive and finite.
    """
    numbers = (*words, *key)
    if _runs_natively(token_ids.device):
        if not any(isinstance(number, Tensor) for number in numbers):
            return _exponential(_native(token_ids.unsqueeze(0), torch.tensor([numbers]))[0])
        if len(token_ids) <= _NUM_ALONE:
            counters = torch.stack([torch.as_tensor(number).expand(len(token_ids)) for number in numbers], dim=1)
            return _exponential(_native(token_ids.unsqueeze(1), counters).squeeze(1))
    even, odd = _pairs(token_ids >> 1, words, key)
    return _exponential(_uniform(torch.where((token_ids & 1).bool(), odd, even)))


def vocabulary_exponential(vocabulary_size: int, words: Words, key: Key, device: torch.device) -> Tensor:
    """Return the noise of `token_exponential` for all token ids of several rows.

    Args:
        vocabulary_size: V, at least 1.
        words: ints, or int64 [R, 1].
        key: ints, or int64 [R, 1].
        device: of the result and of all tensor arguments.

    Returns:
        float64 [R, V], positive and finite; [1, V] if all words are ints.
    """
    numbers = [torch.as_tensor(number) for number in (*words, *key)]
    num_rows = max(number.numel() for number in numbers)
    if _runs_natively(device):
        counters = torch.cat([number.view(-1, 1).expand(num_rows, 1) for number in numbers], dim=1)
        return _exponential(_native(torch.arange(vocabulary_size).unsqueeze(0), counters))
    blocks = torch.arange((vocabulary_size + 1) // 2, device=device).expand(num_rows, -1)
    bits = torch.stack(_pairs(blocks, words, key), dim=-1).flatten(1)
    return _exponential(_uniform(bits[:, :vocabulary_size]))


def _exponential(uniforms: Tensor) -> Tensor:
    return uniforms.log_().neg_()


def _uniform(bits: Tensor) -> Tensor:
    return bits.double().add_(0.5).mul_(2.0**-52)


def _runs_natively(device: torch.device) -> bool:
    return device.type == "cpu" and native.loaded_variant() is not None


def _native(token_ids: Tensor, counters: Tensor) -> Tensor:
    """Return the uniform random numbers of tokens, int64 [1, N] or [R, N], by counters and keys: float64 [R, N].

    Args:
        token_ids: at least 0.
        counters: of each row the three upper words of a counter and two of a key: int64 [R, 5].
    """
    variant = native.loaded_variant()
    assert variant is not None
    uniforms: Tensor = torch.ops.outrider.uniform_noise.default(token_ids.contiguous(), counters, int(variant))
    return uniforms


def _pairs(blocks: Tensor, words: Words, key: Key) -> tuple[Tensor, Tensor]:
    """Return 52 bits from each half of the blocks: of the even token ids, and of the odd ones."""
    if blocks.numel() <= _FEW_BLOCKS and not any(isinstance(number, Tensor) for number in (*words, *key)):
        found = [philox4x32(block, words, key) for block in blocks.flatten().tolist()]
        mixed = torch.tensor(found, device=blocks.device).T.reshape(4, *blocks.shape).unbind()
    else:
        mixed = tuple(torch.as_tensor(word) for word in philox4x32(blocks, words, key))
    return (mixed[0] << 20).bitwise_or_(mixed[1] >> 12), (mixed[2] << 20).bitwise_or_(mixed[3] >> 12)


def _mix(product: Word, word: Word, key: Word) -> Word:
    mixed = product >> 32
    mixed ^= key
    if isinstance(word, Tensor) and isinstance(mixed, Tensor) and word.numel() > mixed.numel():
        # Until the block index has mixed into a word, one element of it stands for a whole row.
        mixed = mixed.expand_as(word).clone()
    mixed ^= word
    mixed &= _MASK
    return mixed
