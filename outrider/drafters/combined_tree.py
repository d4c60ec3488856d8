"""The proposals of two drafters for one text as one tree, whose nodes name those that proposed them."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Final

from outrider.speculation.acceptance import AcceptanceRates
from outrider.tokens import ROOT, NodeKind, ProposalNode

_ROOT_NODE: Final = ProposalNode(ROOT, 0, NodeKind.GUESSED)


class CombinedNode:
    """A token that one drafter has proposed, or both.

    Attributes:
        proposed: the node as it was proposed; its parent's number is that in its drafter's proposal.
        parent: the node before it; None for the root.
        names: the drafters that proposed it, in a fixed order.
        drafter: these joined by "+", as they were when it was sent, or are now.
        rank: among its parent's children of the same drafters, from 1.
        depth: below the root that the tree began with.
        number: under which it was sent; 0 where it was not, or is the root that the tree began with.
        children: by token id.
    """

    __slots__ = ("children", "depth", "drafter", "names", "number", "parent", "proposed", "rank")

    def __init__(self, parent: "CombinedNode | None", proposed: ProposalNode, drafter: str) -> None:
        self.proposed = proposed
        self.parent = parent
        self.names: tuple[str, ...] = (drafter,)
        self.drafter = drafter
        self.rank = 1
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.number = ROOT
        self.children: dict[int, CombinedNode] = {}


class CombinedTree:
    """Nodes of several drafters; those worth most are sent first.

    A node is worth the product, along its path, of the acceptance rates of its drafters, depth and rank, weighed by the
    drafter's own probabilities, much as where it is verified.

    Args:
        drafters: their names, in the order in which nodes have them.
        rates: by drafter; they learn from the text.

    Attributes:
        root: the node that the text has come to.
    """

    def __init__(self, drafters: Sequence[str], rates: AcceptanceRates) -> None:
        self._drafters = drafters
        self.root = CombinedNode(None, _ROOT_NODE, "")
        self._rates = rates
        self._num_sent = 0
        self._musts: list[CombinedNode] = []

    def add(
        self, parent: CombinedNode, node: ProposalNode, drafter: str, *, must_be_sent: bool = False
    ) -> CombinedNode:
        """Add a node that a drafter has proposed; return it, or the one with the same token that is there already.

        Those that must be sent are sent first, in the order in which they were added, whatever they are worth.
        """
        known = parent.children.get(node.token_id)
        if known is None:
            known = parent.children[node.token_id] = CombinedNode(parent, node, drafter)
        elif drafter not in known.names:
            known.names = tuple(name for name in self._drafters if name == drafter or name in known.names)
            if not known.number:
                known.drafter = "+".join(known.names)
        if must_be_sent:
            self._musts.append(known)
        return known

    def follow(self, token_ids: Sequence[int]) -> tuple[bool, list[tuple[str, ...]]]:
        """Move the root along the text as far as the tree has it, and learn from it.

        Returns:
            Whether all of these tokens were sent, and the drafters of those that the tree has.
        """
        all_sent, drafters = True, list[tuple[str, ...]]()
        for token_id in token_ids:
            _rank(self.root)
            child = self.root.children.get(token_id)
            self._observe(child)
            if child is None:
                return False, drafters
            drafters.append(child.names)
            all_sent = all_sent and child.number > 0
            # Nodes that can no longer be accepted are dropped.
            self.root.children = {token_id: child}
            child.parent, self.root = None, child
        return all_sent, drafters

    def take(self, max_nodes: int, *, is_chain: bool) -> list[ProposalNode]:
        """Return nodes to be sent now, parents before their children.

        Args:
            max_nodes: most nodes below the text, those that were sent before included; 0 for all that there are.
            is_chain: whether a node has one child at most.
        """
        made = [self._send(node) for node in self._musts if not node.number]
        self._musts = []
        room = max_nodes - sum(node.number > 0 for node in self._below_root()) if max_nodes else None
        for node in self._best_first(is_chain=is_chain):
            if room is not None and room <= 0:
                break
            if not node.number:
                made.append(self._send(node))
                room = None if room is None else room - 1
        return made

    def _send(self, node: CombinedNode) -> ProposalNode:
        assert node.parent is not None
        self._num_sent += 1
        node.number = self._num_sent
        item = node.proposed
        return replace(item, parent=node.parent.number, drafter=node.drafter)

    def _below_root(self) -> Iterator[CombinedNode]:
        nodes = list(self.root.children.values())
        for node in nodes:
            nodes += node.children.values()
            yield node

    def _best_first(self, *, is_chain: bool) -> Iterator[CombinedNode]:
        """Yield all nodes below the root, those worth most first, parents before their children."""
        ties = count()
        heap: list[tuple[float, int, CombinedNode]] = []

        def offer(parent: CombinedNode, value: float) -> None:
            _rank(parent)
            children = list(parent.children.values())
            if is_chain and children:
                children = [max(children, key=lambda child: (child.number > 0, self._value(child)))]
            for child in children:
                heapq.heappush(heap, (-value * self._value(child), next(ties), child))

        offer(self.root, 1.0)
        while heap:
            negated, _, node = heapq.heappop(heap)
            yield node
            offer(node, -negated)

    def _value(self, node: CombinedNode) -> float:
        """Return about the probability that the target accepts a node where it has accepted its parent."""
        return self._rates.of(node.drafter).value(node.depth, node.rank, node.proposed.likelihood)

    def _observe(self, matched: CombinedNode | None) -> None:
        """Have the rates learn with which child of the root the text goes on."""
        likelihoods: dict[str, list[float]] = {}
        for child in self.root.children.values():
            likelihoods.setdefault(child.drafter, []).append(child.proposed.likelihood)
        for drafter, of_ranks in likelihoods.items():
            rank = matched.rank if matched is not None and matched.drafter == drafter else None
            self._rates.of(drafter).observe(self.root.depth + 1, of_ranks, rank)


def _rank(parent: CombinedNode) -> None:
    """Set the ranks of a node's children."""
    nums: dict[str, int] = {}
    for child in parent.children.values():
        child.rank = nums[child.drafter] = nums.get(child.drafter, 0) + 1
