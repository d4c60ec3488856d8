"""Keyed randomness: every random number is a pure function of a seed and a counter.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), on integer tensors, so that
all devices give the same integers. What is made of them is float64; ties go to the lowest token id.
"""

import secrets
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch

_MASK: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10


class Purpose(IntEnum):
    """What a counter decides; no counter may decide twice."""

    TARGET = 0
    """The target's own token under `coupled`; the draft looks at the same noise to guess it."""
    DRAFT = 1
    """The draft's token under `rejection`."""
    ACCEPT = 2
    """Whether a drafted token is accepted under `rejection`."""
    RESIDUAL = 3
    """The recovered or bonus token under `rejection`."""


@dataclass(frozen=True, slots=True)
class Counter:
    """Names one decision of a session.

    Attributes:
        purpose: what it decides.
        position: session position of the token that it concerns, below 2**32.
        base_len: under `rejection` the length that the round continues, because draws beyond a rejection decided the
            outcome and must be new in the next round; 0 under `coupled`, where the position alone decides.
        segment: counts the drafted chains that one round verifies one after another, below 2**24.
    """

    purpose: Purpose
    position: int
    base_len: int = 0
    segment: int = 0


def philox4x32(index: torch.Tensor, words: tuple[int, int, int], key: tuple[int, int]) -> list[torch.Tensor]:
    """Returns Philox4x32-10 of the counters (index, *words).

    Args:
        index: int64 [N], the first counter word of each block, in [0, 2**32).
        words: the other three counter words.
        key: two words.

    Returns:
        Four int64 tensors [N] with values in [0, 2**32).
    """
    state = [index, *(torch.full_like(index, word) for word in words)]
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        # Products reach 2**64; their wrapped bits are right, and the masks undo the arithmetic shift.
        product_0, product_1 = state[0] * _MULTIPLIERS[0], state[2] * _MULTIPLIERS[1]
        state = [
            (product_1 >> 32).bitwise_and_(_MASK).bitwise_xor_(state[1]).bitwise_xor_(key_0),
            product_1.bitwise_and_(_MASK),
            (product_0 >> 32).bitwise_and_(_MASK).bitwise_xor_(state[3]).bitwise_xor_(key_1),
            product_0.bitwise_and_(_MASK),
        ]
        key_0, key_1 = (key_0 + _WEYL[0]) & _MASK, (key_1 + _WEYL[1]) & _MASK
    return state


def random_seed() -> int:
    """Returns 64 random bits of the operating system's, for requests that come without a seed."""
    return secrets.randbits(64)


class KeyedSource:
    """The `DecisionSource` of production: decisions follow from a seed and the decision's counter.

    Args:
        seed: in [0, 2**64).
    """

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed}, must be in [0, 2**64)")
        self._key = (seed & _MASK, seed >> 32)

    def pick(self, weights: torch.Tensor, counter: Counter) -> int:
        """Returns a token drawn with probability proportional to `weights`, by the Gumbel-max trick.

        Args:
            weights: float64 [V], at least 0, with a positive sum.
            counter: names the decision; the noise of a token does not depend on the weights.
        """
        return self.rank(weights, counter, 1)[0]

    def rank(self, weights: torch.Tensor, counter: Counter, num: int) -> list[int]:
        """Returns the first `num` tokens in the order of weight and noise; `pick` takes the first. May be fewer."""
        support = torch.nonzero(weights).squeeze(1)
        if len(support) == 1:
            return [int(support)]
        scores = weights[support].log_() + self.gumbel(support, counter)
        if num == 1:
            return [int(support[scores.argmax()])]
        order = torch.sort(scores, descending=True, stable=True).indices[:num]
        return [int(token_id) for token_id in support[order]]

    def accept(self, probability: float, counter: Counter) -> bool:
        """Returns True with that probability; never for 0, always for 1."""
        return self.uniform(counter) < probability

    def uniform(self, counter: Counter) -> float:
        """Returns the counter's uniform number, in [0, 1), a multiple of 2**-53."""
        high, low, *_ = philox4x32(torch.zeros(1, dtype=torch.int64), _words(counter), self._key)
        return ((int(high) << 21) | (int(low) >> 11)) * 2.0**-53

    def gumbel(self, token_ids: torch.Tensor, counter: Counter) -> torch.Tensor:
        """Returns standard Gumbel noise, float64 [N], of ascending token ids, int64 [N].

        Block v // 2 gives the noise of tokens v and v + 1 (v even), two words each, of which 52 bits are used: then
        (bits + 1/2) / 2**52 is exact and lies strictly between 0 and 1.
        """
        blocks, place = torch.unique_consecutive(token_ids >> 1, return_inverse=True)
        words = philox4x32(blocks, _words(counter), self._key)
        even, odd = ((words[i] << 20) | (words[i + 1] >> 12) for i in (0, 2))
        bits = torch.where((token_ids & 1).bool(), odd[place], even[place])
        uniform = bits.double().add_(0.5).mul_(2.0**-52)
        return uniform.log_().neg_().log_().neg_()


def _words(counter: Counter) -> tuple[int, int, int]:
    return counter.position, counter.base_len, counter.purpose | counter.segment << 8
