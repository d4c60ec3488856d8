"""Small Markov models with known distributions: the next token depends on the last one."""

from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

V = 3
"""Vocabulary size of the models here."""

Text = tuple[int, ...]


class Model(Protocol):
    """A model that is defined by its distributions."""

    def distribution(self, text: Text) -> Tensor:
        """Return the distribution after a text: float64 [V]."""


@dataclass(frozen=True, eq=False)
class MarkovChain:
    """Row t of `rows`, float64 [V + 1, V], is the distribution after token t; the last row is of the first token."""

    rows: Tensor

    def distribution(self, text: Text) -> Tensor:
        return self.rows[text[-1] if text else V]

    def joint(self, num: int) -> dict[Text, float]:
        """Return the probability of every text of `num` tokens."""
        joint: dict[Text, float] = {}
        for text in product(range(V), repeat=num):
            probability = 1.0
            for position, token_id in enumerate(text):
                probability *= float(self.distribution(text[:position])[token_id])
            joint[text] = probability
        return joint


def random_chain(seed: int, scale: float = 1.0) -> MarkovChain:
    generator = torch.Generator().manual_seed(seed)
    return MarkovChain((torch.randn(V + 1, V, generator=generator, dtype=torch.float64) * scale).softmax(-1))


def only(chain: MarkovChain, token_ids: tuple[int, ...]) -> MarkovChain:
    """Return the chain conditioned on these token ids."""
    mask = torch.zeros(V, dtype=torch.float64)
    mask[list(token_ids)] = 1
    rows = chain.rows * mask
    return MarkovChain(rows / rows.sum(-1, keepdim=True))


TARGET = random_chain(1)
PAIRS: dict[str, tuple[MarkovChain, MarkovChain]] = {
    "agreeing": (TARGET, TARGET),
    "disagreeing": (TARGET, random_chain(2, scale=2.0)),
    "disjoint": (only(TARGET, (0, 1)), only(random_chain(3), (2,))),
}
"""Pairs of target and draft."""


def total_variation(left: dict[Text, float], right: dict[Text, float]) -> float:
    return sum(abs(left.get(text, 0.0) - right.get(text, 0.0)) for text in left.keys() | right.keys()) / 2
