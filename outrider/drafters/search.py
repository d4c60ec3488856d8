"""Which tokens a proposal tree is made of, by what a draft holds them for. Arithmetic only, without tensors.

The tree grows depth by depth as in EAGLE-2 (Li et al. 2024, section 4): a node's confidence is the product of the
draft's probabilities along its path, which is about the probability that the node is accepted. The most confident nodes
are expanded, and of all that were considered the most confident make the proposal. A node is never more confident than
its parent, so these are a tree.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.tokens import ROOT, NodeKind, ProposalNode

MAX_BRANCHING: Final = 8
_MAX_WIDTH: Final = 12


@dataclass(frozen=True, slots=True)
class _Candidate:
    parent: int
    token_id: int
    log_confidence: float
    depth: int


class TreeSearch:
    """A tree that is being searched for; its candidates are numbered from 1, `ROOT` is the base.

    Args:
        depth: most nodes from the base to a leaf, at least 1.
        num_nodes: most nodes; not more than `depth` make a chain.
        stop_token_ids: tokens beyond which nothing is of use.
    """

    def __init__(self, depth: int, num_nodes: int, stop_token_ids: Collection[int] = ()) -> None:
        self.branching = 1 if num_nodes <= depth else min(MAX_BRANCHING, num_nodes)
        """Children that a node is considered to have."""
        self.frontier = [ROOT]
        """Numbers of the candidates to be expanded next; none once the tree is found."""
        self._depth = min(depth, num_nodes)
        self._num_nodes = num_nodes
        self._stop_token_ids = stop_token_ids
        self._candidates: list[_Candidate] = []

    def token_id(self, number: int) -> int:
        """Returns a candidate's token."""
        return self._candidates[number - 1].token_id

    def parent(self, number: int) -> int:
        """Returns the number of a candidate's parent."""
        return self._candidates[number - 1].parent

    def path(self, number: int) -> tuple[int, ...]:
        """Returns the tokens from the base down to a candidate, its own included."""
        token_ids: list[int] = []
        while number != ROOT:
            token_ids.append(self.token_id(number))
            number = self.parent(number)
        return tuple(reversed(token_ids))

    def expand(self, children: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Considers children of the frontier, and finds the next one.

        Args:
            children: for each candidate of the frontier tokens with the logarithm of their probability, at most 0, the
                likeliest first.
        """
        first, depth = len(self._candidates) + 1, 0
        for parent, tokens in zip(self.frontier, children, strict=True):
            above = self._candidates[parent - 1] if parent != ROOT else None
            confidence, depth = (above.log_confidence, above.depth + 1) if above else (0.0, 1)
            self._candidates += [_Candidate(parent, token_id, confidence + log, depth) for token_id, log in tokens]
        # One that is not among the best now will not be, and neither will what is below it.
        new = [number for number in self._best() if number >= first]
        useful = [number for number in new if self.token_id(number) not in self._stop_token_ids]
        self.frontier = useful[:_MAX_WIDTH] if depth < self._depth else []

    def nodes(self) -> list[ProposalNode]:
        """Returns the tree that was found, parents before children, at each depth the most confident first."""
        chosen = sorted(self._best(), key=lambda number: self._candidates[number - 1].depth)
        numbers = {ROOT: ROOT, **{number: place for place, number in enumerate(chosen, 1)}}
        return [
            ProposalNode(numbers[self.parent(number)], self.token_id(number), NodeKind.GUESSED) for number in chosen
        ]

    def _best(self) -> list[int]:
        """Returns the numbers of the most confident candidates, these first; of equals the one made first."""
        order = sorted(
            range(1, len(self._candidates) + 1), key=lambda number: -self._candidates[number - 1].log_confidence
        )
        return order[: self._num_nodes]
