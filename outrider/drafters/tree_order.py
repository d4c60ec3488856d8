"""The nodes of a draft tree, and their order: those worth most first.

A node is worth the product of the values along its path (`node_values`), and less the deeper it is where the tree runs
ahead of verdicts. It is never worth more than its parent, so the best nodes are a tree.
"""

import heapq
from collections.abc import Iterator
from itertools import count
from typing import Final

from outrider.drafters.choices import Choice
from outrider.drafters.drafter import OpenProposal
from outrider.drafters.node_values import NodeValues, least_value
from outrider.parameters import AcceptanceRule
from outrider.tokens import ROOT

URGENCY: Final = 0.9
"""The factor of a node's value for each step that it is deeper in a tree that runs ahead, where it is needed later."""


class Node:
    """A choice after a node that was run, or the root of a tree.

    Attributes:
        parent: the node that it follows.
        rank: among its parent's choices, from 1.
        choice: its token, and the draft's probability of it.
        depth: below the root that the tree began with.
        number: under which it was sent; 0 where it was not, or is the root that the tree began with.
        segment: see `choices.Place`.
        children: choices after it, in order; None until it is run.
    """

    __slots__ = ("children", "choice", "depth", "number", "parent", "rank", "segment")

    def __init__(self, parent: "Node | None", rank: int, choice: Choice) -> None:
        self.parent = parent
        self.rank = rank
        self.choice = choice
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.number = self.segment = ROOT
        self.children: list[Node] | None = None

    @property
    def token_id(self) -> int:
        """Its token."""
        return self.choice.token_id


class NodeOrder:
    """Orders the nodes of one proposal's tree; see the module.

    Args:
        proposal: the proposal.
        values: of its nodes.
    """

    def __init__(self, proposal: OpenProposal, values: NodeValues) -> None:
        self._values = values
        self._is_coupled = proposal.terms.acceptance_rule is AcceptanceRule.COUPLED
        self._runs_ahead = proposal.lookahead > 0
        self._urgency = URGENCY if self._runs_ahead else 1.0

    def likelihood(self, node: Node) -> float:
        """Return the draft's probability of a choice as far as the order may depend on it; 0 where it may not.

        Under `rejection` a tree that runs ahead has sampled tokens and guesses compete for the rows of steps; one that
        waits has sampled all that it may before it takes a guess, so that no sampled token depends on its guesses.
        """
        return node.choice.likelihood if self._is_coupled or not self._runs_ahead else 0.0

    def first_below(self, node: Node, value: float) -> float:
        """Return the mean value of the first choice after a node of that value which has not been run."""
        return value * self._urgency * self._values.ranks(node.depth + 1)[0]

    def least_value(self, depth: int, num_nodes: int) -> float:
        """Return the value of the least of the best `num_nodes` nodes of an endless tree below a depth."""
        return least_value(self._ranks, depth, num_nodes)

    def best_first(self, root: Node, end_depth: int) -> Iterator[tuple[float, Node]]:
        """Yield the known choices below a root with their values: parents before children, siblings by rank.

        Args:
            root: the root.
            end_depth: depth of nodes whose children are left out.
        """
        ties = count()
        heap: list[tuple[float, int, Node, float]] = []
        value_of, likelihood_of, urgency = self._values.value, self.likelihood, self._urgency

        def offer(parent: Node, place: int, value: float, most: float) -> None:
            children = parent.children
            if children and place < len(children) and parent.depth < end_depth:
                child = children[place]
                step = urgency * value_of(child.depth, child.rank, likelihood_of(child))
                heapq.heappush(heap, (-min(most, value * step), next(ties), child, value))

        offer(root, 0, 1.0, 1.0)
        while heap:
            negated, _, node, above = heapq.heappop(heap)
            yield -negated, node
            assert node.parent is not None
            offer(node, 0, -negated, 1.0)
            # A choice is worth no more than one that the draft prefers, whatever their probabilities say.
            offer(node.parent, node.rank, above, -negated)

    def _ranks(self, depth: int) -> list[float]:
        return [self._urgency * value for value in self._values.ranks(depth)]
