"""Masks of constraints, for tests of what reads them."""

import random
from collections.abc import Collection

import torch
from torch import Tensor


def mask_of(token_ids: Collection[int], size: int) -> Tensor:
    """Return the mask that allows these tokens: int32 [size / 32, rounded up]."""
    words = [0] * -(-size // 32)
    for token_id in token_ids:
        words[token_id // 32] |= 1 << token_id % 32
    return torch.tensor([word - 2**32 if word >> 31 else word for word in words], dtype=torch.int32)


def random_mask(draw: random.Random, size: int, must: int) -> Tensor:
    """Return a mask that allows one token, and a random share of the others."""
    share = draw.choice([0.0, 0.01, 0.5, 1.0])
    return mask_of([token_id for token_id in range(size) if token_id == must or draw.random() < share], size)


def allowed_by(mask: Tensor) -> set[int]:
    """Return the tokens that a mask allows."""
    return {32 * place + bit for place, word in enumerate(mask.tolist()) for bit in range(32) if word >> bit & 1}
