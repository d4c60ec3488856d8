"""The values of the nodes of trees: acceptance rates that are measured, weighted by the draft's probabilities.

How often the target goes on with a draft's first, second, ... choice is measured (`outrider.speculation.acceptance`).
Of two choices of one rank that one is worth more which the draft finds more probable, relative to the mean of choices
of that rank: so values keep their measured mean, however over- or underconfident the draft is. The probability's
power of 0.75 did as well as 0.5 and 1 where it was tried: greedy and sampled, waiting and running ahead, for drafts
of five qualities. Where a draft is just as sure of itself when it is wrong, its probabilities mislead: they count
only as long as the outcomes are more likely under values with them than under the rates alone.
"""

import heapq
from collections.abc import Callable, Sequence
from math import log
from typing import Final

from outrider.speculation.acceptance import LEAST_RATE, MAX_RANK, AcceptanceRates

_POWER: Final = 0.75
_PRIOR_EVIDENCE: Final = 4.0
"""Evidence for the draft's probabilities before any outcome, in nats."""
_MAX_VALUE: Final = 0.999
_DECAY: Final = 0.998
_WEIGHT: Final = 30.0
"""Where all sessions add to the values, they are learnt slowly: fast changes would be noise in the order of nodes."""


class NodeValues:
    """Values of nodes by depth, rank and likelihood; see the module.

    Args:
        rates: where the target's outcomes are kept.
        tests_likelihoods: whether outcomes decide if the draft's probabilities count; else they always do.
    """

    def __init__(self, rates: AcceptanceRates, *, tests_likelihoods: bool = False) -> None:
        self._rates = rates
        self._tests_likelihoods = tests_likelihoods
        self._evidence = _PRIOR_EVIDENCE
        self._powers = [0.0] * MAX_RANK
        self._weights = [0.0] * MAX_RANK
        self._ranks: dict[int, list[float]] = {}

    @classmethod
    def of_all_sessions(cls) -> "NodeValues":
        """Return values that are learnt from all sessions of a drafter, and hold for each of them."""
        rates = AcceptanceRates(decay=_DECAY, prior_weight=_WEIGHT, pooled_weight=_WEIGHT)
        return cls(rates, tests_likelihoods=True)

    @classmethod
    def of_one_session(cls) -> "NodeValues":
        """Return values that are learnt from one session."""
        return cls(AcceptanceRates())

    def observe(self, depth: int, likelihoods: Sequence[float], matched: int | None) -> None:
        """Observe the choice with which the target went on.

        Args:
            depth: of the choices, from 1.
            likelihoods: the draft's probabilities of them, by rank, which were observed.
            matched: rank, from 1, of the choice that the target continued with; None if it was none of them.
        """
        if self._tests_likelihoods:
            self._test(self.ranks(depth), likelihoods, matched)
        self._rates.observe(depth, len(likelihoods), matched)
        self._ranks.clear()

    def observe_likelihoods(self, likelihoods: Sequence[float]) -> None:
        """Observe the draft's probabilities of its choices after a node, by rank."""
        for place, likelihood in enumerate(likelihoods):
            self._powers[place] = _DECAY * self._powers[place] + likelihood**_POWER
            self._weights[place] = _DECAY * self._weights[place] + 1.0

    def _test(self, ranks: Sequence[float], likelihoods: Sequence[float], matched: int | None) -> None:
        """Add by how much an outcome is more likely under values with the draft's probabilities than without them."""
        evidence = 0.0
        for rank, likelihood in enumerate(likelihoods, 1):
            without = min(_MAX_VALUE, ranks[rank - 1])
            value = min(_MAX_VALUE, max(LEAST_RATE, ranks[rank - 1] * self._factor(rank, likelihood)))
            evidence += log(value / without) if rank == matched else log((1 - value) / (1 - without))
        self._evidence = _DECAY * self._evidence + evidence

    def _factor(self, rank: int, likelihood: float) -> float:
        """Return the weight of a probability, whose mean over choices of a rank is 1; 0 where none was observed."""
        total = self._powers[rank - 1]
        return likelihood**_POWER * self._weights[rank - 1] / total if total > 0 else 0.0

    def ranks(self, depth: int) -> Sequence[float]:
        """Return the mean values of choices at a depth, by rank: none more than the one before."""
        found = self._ranks.get(depth)
        if found is None:
            found, least = [], 1.0
            for value in self._rates.values(depth):
                least = min(least, value)
                found.append(least)
            self._ranks[depth] = found
        return found

    def value(self, depth: int, rank: int, likelihood: float) -> float:
        """Return about the probability that the target goes on with a choice where it has accepted its parent.

        Args:
            depth: of the choice.
            rank: of the choice, from 1.
            likelihood: the draft's probability of it, which was observed.
        """
        value = self.ranks(depth)[rank - 1]
        return value if self._evidence < 0 else min(1.0, value * self._factor(rank, likelihood))


def least_value(ranks: Callable[[int], Sequence[float]], depth: int, num_nodes: int) -> float:
    """Return the value of the least of the best `num_nodes` nodes of an endless tree below a depth.

    Args:
        ranks: returns the values of choices at a depth, by rank, where their parent is accepted.
        depth: of the root.
        num_nodes: at least 1.
    """
    heap = [(-value, 1) for value in ranks(depth + 1)]
    heapq.heapify(heap)
    least = 1.0
    for _ in range(num_nodes):
        value, level = heapq.heappop(heap)
        least = -value
        for rate in ranks(depth + level + 1):
            heapq.heappush(heap, (value * rate, level + 1))
    return least
