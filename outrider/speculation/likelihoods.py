"""Whether a draft's own probabilities tell which of its choices the target goes on with, and how they weigh.

Of two choices of one rank that one is worth more which the draft finds more probable. Its probability counts relative
to the mean over choices of that rank which could be accepted: so values keep their measured mean, however over- or
underconfident the draft is. Before any outcome it counts nothing. Where a draft is just as sure of itself when it is
wrong, its probabilities mislead: they count only as long as the outcomes are more likely under values with them than
under the rates alone.
"""

from math import log
from typing import Final

_PRIOR_EVIDENCE: Final = 4.0
"""Evidence for the draft's probabilities before any outcome, in nats."""
_EQUALLY: Final = 1.0
"""Choices of a rank that those count for which are taken for equally probable, before there are any outcomes."""
_DECAY: Final = 0.998
_LEAST: Final = 1e-4
_MOST: Final = 0.999


class Likelihoods:
    """Weighs the rates of choices by the draft's probabilities of them; see the module.

    Args:
        num_ranks: largest rank.
        tests: whether outcomes decide if the probabilities count; else they always do.
    """

    def __init__(self, num_ranks: int, *, tests: bool) -> None:
        self._tests = tests
        self._evidence = _PRIOR_EVIDENCE
        self._sums = [0.0] * num_ranks
        self._nums = [0.0] * num_ranks

    def observe(self, rank: int, likelihood: float, rate: float, hit: bool) -> None:
        """Observe a choice whose parent the target has accepted.

        Args:
            rank: of the choice, from 1.
            likelihood: the draft's probability of it, above 0.
            rate: of choices in its place, without it.
            hit: whether the target went on with it.
        """
        if self._tests:
            value, without = self._value(rate, rank, likelihood), _bounded(rate)
            gain = log(value / without) if hit else log((1 - value) / (1 - without))
            self._evidence = _DECAY * self._evidence + gain
        self._sums[rank - 1] = _DECAY * self._sums[rank - 1] + likelihood
        self._nums[rank - 1] = _DECAY * self._nums[rank - 1] + 1.0

    def weighed(self, rate: float, rank: int, likelihood: float) -> float:
        """Return about the probability that the target goes on with a choice, given the rate of choices in its place.

        Args:
            rate: that one.
            rank: of the choice, from 1.
            likelihood: the draft's probability of it; 0 where it does not say.
        """
        return rate if likelihood <= 0 or self._evidence < 0 else self._value(rate, rank, likelihood)

    def _value(self, rate: float, rank: int, likelihood: float) -> float:
        total, num = self._sums[rank - 1], self._nums[rank - 1]
        return _bounded(rate * (num * likelihood + _EQUALLY) / (total + _EQUALLY))


def _bounded(value: float) -> float:
    return min(_MOST, max(_LEAST, value))
