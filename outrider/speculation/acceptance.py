"""Measured acceptance rates of a draft's first, second, ... choice at each depth, with exponential decay.

A proposal node is the draft's first, second, ... choice after its parent; this number is its rank. The acceptance rate
of a depth and rank estimates the probability that the target continues with such a node, given that it accepted the
parent. The product of the rates along a path estimates the probability that the target accepts the whole path; a tree
of a given size accepts the most tokens if it consists of the nodes with the largest products. The number of choices
per token then falls geometrically with depth, which is the allocation that Speculative Speculative Decoding (ICLR 2026)
derives. The rates do not depend on the value of a token, so that using them under the `rejection` rule does not change
the output distribution.

Where a draft combines several drafters, each has rates of its own beside those of the draft as a whole, with ranks
among its own choices.

A rate is the mean over all choices of its depth and rank. Where the draft says how probable it finds a choice, its
value is the rate times that probability, relative to the mean for the rank (`likelihoods`). The probability tells one
text from another then, and what the rates of one session would add is mostly chance: those of all sessions count.
"""

from collections.abc import Sequence
from typing import Final

from outrider.speculation.likelihoods import MOST, Likelihoods

MAX_RANK: Final = 8
"""Largest rank, counted from 1; a draft makes no more choices per token."""
MAX_DEPTH: Final = 8
"""Largest depth below a tree's base that has rates of its own, counted from 1; deeper nodes use those of this depth."""
_PRIOR: Final = (0.7, 0.08, 0.04, 0.02, 0.015, 0.01, 0.008, 0.006)
_PRIOR_WEIGHT: Final = 4.0
_POOLED_WEIGHT: Final = 8.0
_DECAY: Final = 0.98
_SHARED_DECAY: Final = 0.998
_SHARED_WEIGHT: Final = 30.0
"""Where all sessions add to the rates, they are learnt slowly: fast changes would be noise in the order of nodes."""
_MAX_DRAFTERS: Final = 8
_OTHERS: Final = "others"
LEAST_RATE: Final = 1e-4
"""Smallest rate, of a choice that was never accepted."""


class _Share:
    """A hit rate with exponential decay."""

    __slots__ = ("_decay", "num_cases", "num_hits")

    def __init__(self, decay: float) -> None:
        self.num_cases = 0.0
        self.num_hits = 0.0
        self._decay = decay

    def observe(self, hit: bool) -> None:
        self.num_cases = self._decay * self.num_cases + 1.0
        self.num_hits = self._decay * self.num_hits + hit

    def towards(self, value: float, weight: float) -> float:
        """Return the hit rate after adding `weight` cases of rate `value`."""
        return (self.num_hits + weight * value) / (self.num_cases + weight)


class AcceptanceRates:
    """Acceptance rates by depth and rank, of one session or of many; see the module.

    Args:
        prior: rates over all sessions, which are the initial rates of this one and are updated with it.
        decay: factor of the weight of a case for each later one, in (0, 1).
        prior_weight: weight of the initial rate, in cases, above 0.
        pooled_weight: weight of the rate over all depths at each depth, in cases, above 0.
        tests_likelihoods: whether outcomes decide if the draft's probabilities count, where there is no `prior`, which
            decides else; without it they always do.
    """

    def __init__(
        self,
        prior: "AcceptanceRates | None" = None,
        decay: float = _DECAY,
        prior_weight: float = _PRIOR_WEIGHT,
        pooled_weight: float = _POOLED_WEIGHT,
        *,
        tests_likelihoods: bool = True,
    ) -> None:
        self._prior = prior
        self._decay = decay
        self._prior_weight = prior_weight
        self._pooled_weight = pooled_weight
        self._tests_likelihoods = tests_likelihoods
        self._by_rank = [_Share(decay) for _ in range(MAX_RANK)]
        self._by_depth = [[_Share(decay) for _ in range(MAX_RANK)] for _ in range(MAX_DEPTH)]
        self._common: AcceptanceRates = self if prior is None else prior
        self._likelihoods: Likelihoods = (
            Likelihoods(MAX_RANK, decay, tests=tests_likelihoods) if prior is None else prior._likelihoods
        )
        self._of: dict[str, AcceptanceRates] = {}

    @classmethod
    def of_all_sessions(cls) -> "AcceptanceRates":
        """Return rates that are learnt from all sessions, such as are the `prior` of each."""
        return cls(decay=_SHARED_DECAY, prior_weight=_SHARED_WEIGHT)

    def of(self, drafter: str) -> "AcceptanceRates":
        """Return the rates of one of the drafters that a draft combines; these themselves where it is not named.

        Names come from the wire: those after the first few share their rates.
        """
        if not drafter:
            return self
        if drafter not in self._of:
            drafter = drafter if len(self._of) < _MAX_DRAFTERS else _OTHERS
        if drafter not in self._of:
            prior = None if self._prior is None else self._prior.of(drafter)
            self._of[drafter] = AcceptanceRates(
                prior,
                self._decay,
                self._prior_weight,
                self._pooled_weight,
                tests_likelihoods=self._tests_likelihoods,
            )
        return self._of[drafter]

    def observe(self, depth: int, likelihoods: Sequence[float], matched: int | None) -> None:
        """Record which of a draft's choices the target continued with.

        Args:
            depth: of these choices below the base, at least 1.
            likelihoods: the draft's probabilities of them, by rank; 0 where it does not say.
            matched: rank, from 1, of the choice that the target continued with; None if it was none of them.
        """
        for rank, likelihood in enumerate(likelihoods[:MAX_RANK], 1):
            self.observe_one(depth, rank, rank == matched, likelihood)

    def observe_one(self, depth: int, rank: int, hit: bool, likelihood: float = 0.0) -> None:
        """Record whether the target continued with one choice, which may have arrived after the verdict."""
        if rank > MAX_RANK:
            return
        if likelihood > 0:
            self._likelihoods.test(rank, likelihood, self._common._rate(depth, rank), hit)
        self._add(depth, rank, hit, likelihood)

    def _add(self, depth: int, rank: int, hit: bool, likelihood: float) -> None:
        if self._prior is not None:
            self._prior._add(depth, rank, hit, likelihood)
        elif likelihood > 0:
            self._likelihoods.add(rank, likelihood)
        self._by_rank[rank - 1].observe(hit)
        self._by_depth[min(depth, MAX_DEPTH) - 1][rank - 1].observe(hit)

    def value(self, depth: int, rank: int, likelihood: float = 0.0) -> float:
        """Return the estimated probability that the target continues with the choice of this rank, in (0, 1).

        The rate of the depth is smoothed with the rate of the rank over all depths, and that with the prior.

        Args:
            depth: of the choice, from 1.
            rank: of the choice, from 1.
            likelihood: the draft's probability of it; 0 where it does not say.
        """
        if rank > MAX_RANK:
            return LEAST_RATE
        if likelihood > 0 and self._likelihoods.are_used:
            return self.weighed(self._common._rate(depth, rank), rank, likelihood)
        return self._rate(depth, rank)

    def weighed(self, rate: float, rank: int, likelihood: float) -> float:
        """Return the value of a choice by the rate of its place, its rank, at most `MAX_RANK`, and its likelihood."""
        return max(LEAST_RATE, self._likelihoods.weighed(rate, rank, likelihood))

    def weights(self) -> list[float]:
        """Return the numbers from which `weighed` follows.

        Returns:
            By rank, up to `MAX_RANK`, the sums of the draft's probabilities, then as many numbers of them, all 0 where
            they do not count; the least and the most that a value can be.
        """
        used = self._likelihoods.are_used
        observed = [self._likelihoods.observed(rank) if used else (0.0, 0.0) for rank in range(1, MAX_RANK + 1)]
        return [*(total for total, _ in observed), *(num for _, num in observed), LEAST_RATE, MOST if used else 1.0]

    def values(self, depth: int) -> Sequence[float]:
        """Return the values of ranks 1 to `MAX_RANK` at a depth, of choices that come without a probability."""
        return [self._rate(depth, rank) for rank in range(1, MAX_RANK + 1)]

    def _rate(self, depth: int, rank: int) -> float:
        prior = _PRIOR[rank - 1] if self._prior is None else self._prior._rate(depth, rank)
        pooled = self._by_rank[rank - 1].towards(prior, self._prior_weight)
        own = self._by_depth[min(depth, MAX_DEPTH) - 1][rank - 1]
        return max(LEAST_RATE, own.towards(pooled, self._pooled_weight))

    def expected_accepted(self, max_length: int) -> list[float]:
        """Return the expected number of accepted tokens of chains of 0 to `max_length` first choices."""
        expected, reached = [0.0], 1.0
        for depth in range(1, max_length + 1):
            reached *= self.value(depth, 1)
            expected.append(expected[-1] + reached)
        return expected
