"""The values of the nodes of a draft's trees: acceptance rates that are measured, weighed by the draft's probabilities.

How often the target goes on with a draft's first, second, ... choice is measured, and so is whether the probabilities
that the draft gives them inform (`outrider.speculation.acceptance`). The target values the nodes that it receives in
the same way; here no rate of a later rank is above that of one before it.
"""

import heapq
from collections.abc import Callable, Sequence

from outrider.speculation.acceptance import MAX_DEPTH, AcceptanceRates


class NodeValues:
    """Values of nodes by depth, rank and likelihood; see the module.

    Args:
        rates: where the target's outcomes are kept.
    """

    def __init__(self, rates: AcceptanceRates) -> None:
        self._rates = rates
        self._ranks: dict[int, list[float]] = {}

    @classmethod
    def of_all_sessions(cls) -> "NodeValues":
        """Return values that are learnt from all sessions of a drafter, and hold for each of them."""
        return cls(AcceptanceRates.of_all_sessions())

    @classmethod
    def of_one_session(cls) -> "NodeValues":
        """Return values that are learnt from one session, for which the draft's probabilities always count."""
        return cls(AcceptanceRates(tests_likelihoods=False))

    def observe(self, depth: int, likelihoods: Sequence[float], matched: int | None) -> None:
        """Observe the choice with which the target went on.

        Args:
            depth: of the choices, from 1.
            likelihoods: the draft's probabilities of them, by rank; 0 where they do not count.
            matched: rank, from 1, of the choice that the target continued with; None if it was none of them.
        """
        self._rates.observe(depth, likelihoods, matched)
        self._ranks.clear()

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
            likelihood: the draft's probability of it; 0 where it does not count.
        """
        return self._rates.weighed(self.ranks(depth)[rank - 1], rank, likelihood)

    def numbers(self, num_depths: int) -> list[float]:
        """Return what the values of nodes follow from, as `outrider.native` reads it.

        Args:
            num_depths: of the deepest nodes; at least 1.

        Returns:
            `ranks` of as many depths, at most `MAX_DEPTH`, one after another; and `AcceptanceRates.weights`.
        """
        depths = range(1, min(num_depths, MAX_DEPTH) + 1)
        return [value for depth in depths for value in self.ranks(depth)] + self._rates.weights()


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
