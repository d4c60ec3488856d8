"""Whether a draft's own probabilities tell which of its choices the target goes on with, and how they weigh.

Of two choices of one rank that one is worth more which the draft finds more probable. Its probability counts relative
to the mean over choices of that rank which could be accepted: so values keep their measured mean, however over- or
underconfident the draft is. Before any outcome a probability counts nothing. Where a draft is just as sure of itself
when it is wrong, its probabilities mislead: they count only as long as the outcomes are more likely under values with
them than under the rates alone.
"""

from math import log
from typing import Final

_EVIDENCE: Final = 4.0
"""For the draft's probabilities before any outcome, in nats."""
_EVIDENCE_DECAY: Final = 0.998
_EQUALLY: Final = 1.0
"""Is added to both sums whose ratio weighs a choice: a few outcomes count little."""
_LEAST: Final = 1e-4
MOST: Final = 0.999
"""Largest value of a choice by its probability."""


class Likelihoods:
    """Weighs the rates of choices by the draft's probabilities of them; see the module.

    Args:
        num_ranks: largest rank.
        decay: factor of the weight of a choice for each later one of its rank.
        tests: whether outcomes decide if the probabilities count; else they always do.
    """

    def __init__(self, num_ranks: int, decay: float, *, tests: bool = True) -> None:
        self._decay = decay
        self._tests = tests
        # By how much the outcomes were more likely with the draft's probabilities than without, in nats.
        self._evidence = _EVIDENCE
        self._sums = [0.0] * num_ranks
        self._nums = [0.0] * num_ranks

    def test(self, rank: int, likelihood: float, rate: float, hit: bool) -> None:
        """Observe whether the target went on with a choice whose parent it has accepted, before it is added.

        Args:
            rank: of the choice, from 1.
            likelihood: the draft's probability of it, above 0.
            rate: of choices in its place, without it.
            hit: whether the target went on with it.
        """
        if not self._tests:
            return
        value, without = self._value(rate, rank, likelihood), _bounded(rate)
        gain = log(value / without) if hit else log((1 - value) / (1 - without))
        # Once for all choices after a node.
        decay = _EVIDENCE_DECAY if rank == 1 else 1.0
        self._evidence = decay * self._evidence + gain

    def add(self, rank: int, likelihood: float) -> None:
        """Add the draft's probability, above 0, of a choice whose parent the target has accepted, to the mean."""
        self._sums[rank - 1] = self._decay * self._sums[rank - 1] + likelihood
        self._nums[rank - 1] = self._decay * self._nums[rank - 1] + 1.0

    def weighed(self, rate: float, rank: int, likelihood: float) -> float:
        """Return about the probability that the target goes on with a choice, given the rate of choices in its place.

        Args:
            rate: that one.
            rank: of the choice, from 1.
            likelihood: the draft's probability of it; 0 where it does not say.
        """
        return self._value(rate, rank, likelihood) if likelihood > 0 and self.are_used else rate

    @property
    def are_used(self) -> bool:
        """Whether the draft's probabilities count."""
        return self._evidence >= 0

    def observed(self, rank: int) -> tuple[float, float]:
        """Return the sum of the draft's probabilities of choices of a rank, and their number, both decayed."""
        return self._sums[rank - 1], self._nums[rank - 1]

    def _value(self, rate: float, rank: int, likelihood: float) -> float:
        total, num = self.observed(rank)
        return _bounded(rate * (num * likelihood + _EQUALLY) / (total + _EQUALLY))


def _bounded(value: float) -> float:
    return min(MOST, max(_LEAST, value))
