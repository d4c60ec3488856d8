"""The values of the nodes of trees: acceptance rates that are measured, weighted by the draft's probabilities.

How often the target goes on with a draft's first, second, ... choice is measured (`outrider.speculation.acceptance`).
Of two choices of one rank that one is worth more which the draft finds more probable, relative to the mean probability
of choices of that rank: so values keep their measured mean, however over- or underconfident the draft is. The
ratio's power of 0.75 did as well as any of 0, 0.5 and 1 where it was tried: greedy and sampled, waiting and running
ahead, for drafts of five qualities.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Final

from outrider.speculation.acceptance import MAX_RANK, AcceptanceRates

_POWER: Final = 0.75
_DECAY: Final = 0.998
_WEIGHT: Final = 30.0
"""Where all sessions add to the values, they are learnt slowly: fast changes would be noise in the order of nodes."""


class NodeValues:
    """Values of nodes by depth, rank and likelihood; see the module.

    Args:
        rates: where the target's outcomes are kept.
    """

    def __init__(self, rates: AcceptanceRates) -> None:
        self._rates = rates
        self._likelihoods = [0.0] * MAX_RANK
        self._weights = [0.0] * MAX_RANK
        self._ranks: dict[int, list[float]] = {}

    @classmethod
    def of_all_sessions(cls) -> "NodeValues":
        """Return values that are learnt from all sessions of a drafter, and hold for each of them."""
        return cls(AcceptanceRates(decay=_DECAY, prior_weight=_WEIGHT, pooled_weight=_WEIGHT))

    @classmethod
    def of_one_session(cls) -> "NodeValues":
        """Return values that are learnt from one session."""
        return cls(AcceptanceRates())

    def observe(self, depth: int, num_ranks: int, matched: int | None) -> None:
        """Observe the choice with which the target went on; see `AcceptanceRates.observe`."""
        self._rates.observe(depth, num_ranks, matched)
        self._ranks.clear()

    def observe_likelihoods(self, likelihoods: Sequence[float]) -> None:
        """Observe the draft's probabilities of its choices after a node, by rank."""
        for place, likelihood in enumerate(likelihoods):
            self._likelihoods[place] = _DECAY * self._likelihoods[place] + likelihood
            self._weights[place] = _DECAY * self._weights[place] + 1.0

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
        mean = self._likelihoods[rank - 1] / self._weights[rank - 1]
        return min(1.0, self.ranks(depth)[rank - 1] * (likelihood / mean) ** _POWER) if mean > 0 else 0.0


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
