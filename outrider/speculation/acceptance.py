"""How often what a draft ranks first, second, ... behind a token is what the target says: measured, old values fade.

A node of a proposal is the draft's first, second, ... choice behind its parent: its rank. Its value is about the
probability that the target, having come to the parent, goes on with it. Products of values along a path say what a node
is worth, and with them a tree of a given size is best made of the nodes worth most: then the choices that are worth
trying behind the d-th token of the main line get fewer geometrically with d, which is the allocation that Speculative
Speculative Decoding (ICLR 2026) derives. Values are known without looking at a token, so using them under the
`rejection` rule changes no law.
"""

from collections.abc import Sequence
from typing import Final

MAX_RANK: Final = 8
"""Choices behind a token that are told apart, from 1; a draft makes no more."""
MAX_DEPTH: Final = 8
"""Depths below what a tree was planted under that are told apart, from 1: deeper ones count as this one."""
_PRIOR: Final = (0.7, 0.08, 0.04, 0.02, 0.015, 0.01, 0.008, 0.006)
_PRIOR_WEIGHT: Final = 4.0
_POOLED_WEIGHT: Final = 8.0
_FADING: Final = 0.98
_LEAST: Final = 1e-4


class _Share:
    """A share of cases, of which an old one weighs less."""

    def __init__(self, fading: float) -> None:
        self.num_cases = 0.0
        self.num_hits = 0.0
        self._fading = fading

    def observe(self, hit: bool) -> None:
        self.num_cases = self._fading * self.num_cases + 1.0
        self.num_hits = self._fading * self.num_hits + hit

    def towards(self, value: float, weight: float) -> float:
        """Returns the share, with `weight` cases of another value among its own."""
        return (self.num_hits + weight * value) / (self.num_cases + weight)


class AcceptanceRates:
    """The values of nodes by depth and rank, of one session or of many; see the module.

    Args:
        prior: values over all sessions, to which this one adds, and from which it starts.
        fading: what a case counts after the next one, in (0, 1).
        prior_weight: cases that what it starts from counts for.
        pooled_weight: cases that what holds for all depths counts for at each of them.
    """

    def __init__(
        self,
        prior: "AcceptanceRates | None" = None,
        fading: float = _FADING,
        prior_weight: float = _PRIOR_WEIGHT,
        pooled_weight: float = _POOLED_WEIGHT,
    ) -> None:
        self._prior = prior
        self._prior_weight = prior_weight
        self._pooled_weight = pooled_weight
        self._by_rank = [_Share(fading) for _ in range(MAX_RANK)]
        self._by_depth = [[_Share(fading) for _ in range(MAX_RANK)] for _ in range(MAX_DEPTH)]

    def observe(self, depth: int, num_ranks: int, matched: int | None) -> None:
        """Takes in what the target said where a draft had made its choices.

        Args:
            depth: of these choices, at least 1.
            num_ranks: how many there were.
            matched: the rank, from 1, of the one that the target said; None where it said something else.
        """
        for rank in range(1, min(num_ranks, MAX_RANK) + 1):
            self.observe_one(depth, rank, rank == matched)

    def observe_one(self, depth: int, rank: int, hit: bool) -> None:
        """Takes in whether one choice, which may have come late, is what the target said."""
        if self._prior is not None:
            self._prior.observe_one(depth, rank, hit)
        if rank <= MAX_RANK:
            self._by_rank[rank - 1].observe(hit)
            self._by_depth[min(depth, MAX_DEPTH) - 1][rank - 1].observe(hit)

    def value(self, depth: int, rank: int) -> float:
        """Returns the probability that the target goes on with the choice of this rank, in (0, 1).

        What is known of a depth counts most; what little is known is filled up with what holds for all depths.
        """
        if rank > MAX_RANK:
            return _LEAST
        prior = _PRIOR[rank - 1] if self._prior is None else self._prior.value(depth, rank)
        pooled = self._by_rank[rank - 1].towards(prior, self._prior_weight)
        return max(_LEAST, self._by_depth[min(depth, MAX_DEPTH) - 1][rank - 1].towards(pooled, self._pooled_weight))

    def values(self, depth: int) -> Sequence[float]:
        """Returns the values of all ranks at a depth, the first choice's first."""
        return [self.value(depth, rank) for rank in range(1, MAX_RANK + 1)]

    def expected_accepted(self, length: int, depth: int = 0) -> float:
        """Returns how many tokens of a main line of a length, below that depth, are expected to be accepted."""
        total, reached = 0.0, 1.0
        for step in range(1, length + 1):
            reached *= self.value(depth + step, 1)
            total += reached
        return total
