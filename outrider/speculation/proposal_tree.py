"""What a draft has proposed ahead of a session's text, and where the text has come to in it.

A tree is planted under a committed length, and grows while the text advances: each verdict moves its root down to the
token that the target said last, and drops what can no longer happen. Nodes keep the numbers under which they were
sent, so that draft and target need not agree on when a verdict came. The target may be ahead of what it has: then nodes
that arrive still move the root along the tokens that it gave meanwhile, until it is where the text is, or it is clear
that the draft took another way.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from outrider.speculation.acceptance import AcceptanceRates
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree


@dataclass(slots=True)
class _Live:
    """A node that can still happen.

    Attributes:
        node: as it was sent; the root that was planted has none.
        depth: below what the tree was planted under.
        rank: among its parent's children, from 1, in order of arrival.
        num_children: children that it ever had.
        drafted: whether one of these was drafted.
        children: by token id, those that can still happen.
    """

    node: ProposalNode | None
    depth: int
    rank: int
    num_children: int = 0
    drafted: bool = False
    children: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that could be verified, or run by a draft.

    Attributes:
        number: of the node.
        value: probability, about, that it is accepted; less where deeper ones are worth less.
    """

    number: int
    value: float


class Lookahead:
    """A planted tree; see the module.

    Invariant: while tokens are ahead of the root, only the root is live.

    Args:
        planted_len: session length that node 0 stands for.
        rates: take in how the draft's choices fare.
    """

    def __init__(self, planted_len: int, rates: AcceptanceRates | None = None) -> None:
        self.planted_len = planted_len
        self.num_numbered = 0
        """Nodes that were added, those that came in vain included."""
        self.root = ROOT
        self._rates = AcceptanceRates() if rates is None else rates
        self._live = {ROOT: _Live(None, 0, 0)}
        self._ahead: deque[int] = deque()

    def __len__(self) -> int:
        """Live nodes below the root."""
        return len(self._live) - 1

    @property
    def is_abreast(self) -> bool:
        """Whether the root is where the text is: what is below continues it."""
        return not self._ahead

    @property
    def root_depth(self) -> int:
        """Steps from where it was planted to the root."""
        return self._live[self.root].depth

    @property
    def max_depth(self) -> int:
        """Steps from the root to the deepest live node."""
        return max(item.depth for item in self._live.values()) - self.root_depth

    def add(self, node: ProposalNode) -> int:
        """Takes a node in; returns its number.

        Raises:
            ValueError: its parent was never sent, a sibling has its token, or is drafted as it is.
        """
        number = self.num_numbered + 1
        if not 0 <= node.parent < number:
            raise ValueError(f"node {number} has parent {node.parent}, which does not exist")
        parent = self._live.get(node.parent)
        if parent is not None:
            self._attach(number, node, parent)
        self.num_numbered = number
        return number

    def follow(self, token_ids: Sequence[int]) -> None:
        """Moves the root along the text, which goes on with these tokens."""
        for token_id in token_ids:
            if self._ahead:
                self._ahead.append(token_id)
            else:
                self._step(token_id)

    def has_path(self, token_ids: Sequence[int]) -> bool:
        """Whether all these tokens are here, one below the other."""
        number: int | None = None if self._ahead else self.root
        for token_id in token_ids:
            number = None if number is None else self._live[number].children.get(token_id)
        return number is not None

    def value(self, number: int) -> float:
        """Returns the probability, about, that the target goes on with a live node where it has come to its parent."""
        item = self._live[number]
        return self._rates.value(item.depth, item.rank)

    def is_live(self, number: int) -> bool:
        """Whether a node can still happen, or is the root."""
        return number in self._live

    def depth(self, number: int) -> int:
        """Returns the steps from where the tree was planted to a live node."""
        return self._live[number].depth

    def num_children(self, number: int) -> int:
        """Returns how many children a live node ever had."""
        return self._live[number].num_children

    def children(self, number: int) -> Sequence[int]:
        """Returns the numbers of a live node's live children, in order of arrival."""
        return list(self._live[number].children.values())

    def node(self, number: int) -> ProposalNode:
        """Returns a live node as it was sent."""
        node = self._live[number].node
        if node is None:
            raise ValueError("what a tree was planted under is no node of it")
        return node

    def path(self, number: int) -> tuple[int, ...]:
        """Returns the numbers from a child of the root down to a live node, both included; empty for the root."""
        steps: list[int] = []
        while number != self.root:
            steps.append(number)
            number = self.node(number).parent
        return tuple(reversed(steps))

    def drafted_line(self, max_depth: int) -> list[int]:
        """Returns the drafted nodes below the root, each the child of the one before, down to a depth."""
        line: list[int] = []
        number: int | None = self.root
        while number is not None and len(line) < max_depth:
            drafted = (child for child in self.children(number) if self.node(child).kind is NodeKind.DRAFTED)
            number = next(drafted, None)
            line += [] if number is None else [number]
        return line

    def candidates(self, max_depth: int, urgency: float = 1.0) -> Iterator[Candidate]:
        """Yields the nodes down to a depth below the root, those worth most first, parents before their children.

        Args:
            max_depth: of these nodes.
            urgency: factor by which a node is worth less for each step that it is deeper, in (0, 1].
        """
        if self._ahead:
            return
        deepest = self.root_depth + max_depth
        heap = [(-urgency * self.value(child), child) for child in self._live[self.root].children.values()]
        heapq.heapify(heap)
        while heap:
            value, number = heapq.heappop(heap)
            item = self._live[number]
            if item.depth > deepest:
                continue
            yield Candidate(number, -value)
            for child in item.children.values():
                heapq.heappush(heap, (urgency * value * self.value(child), child))

    def tree(self, numbers: Sequence[int]) -> ProposalTree:
        """Returns the tree of these nodes under the root; parents come before their children."""
        tree = ProposalTree()
        renumbered = {self.root: ROOT}
        for number in numbers:
            node = self.node(number)
            renumbered[number] = tree.append(replace(node, parent=renumbered[node.parent]))
        return tree

    def _attach(self, number: int, node: ProposalNode, parent: _Live) -> None:
        if node.token_id in parent.children:
            raise ValueError(f"node {number} repeats token id {node.token_id} among the children of node {node.parent}")
        is_drafted = node.kind is NodeKind.DRAFTED
        if is_drafted and parent.drafted:
            raise ValueError(f"node {number} is a second drafted child of node {node.parent}")
        parent.drafted = parent.drafted or is_drafted
        parent.num_children += 1
        item = _Live(node, parent.depth + 1, parent.num_children)
        if not self._ahead:
            parent.children[node.token_id] = number
            self._live[number] = item
            return
        matches = node.token_id == self._ahead[0]
        self._rates.observe_one(item.depth, item.rank, matches)
        if matches:
            self._ahead.popleft()
            self.root, self._live = number, {number: item}

    def _step(self, token_id: int) -> None:
        root = self._live[self.root]
        child = root.children.get(token_id)
        matched = None if child is None else self._live[child].rank
        self._rates.observe(root.depth + 1, root.num_children, matched)
        if child is None:
            self._ahead.append(token_id)
            root.children = {}
            self._live = {self.root: root}
        else:
            self.root = child
            self._live = {number: self._live[number] for number in self._below(child)}

    def _below(self, number: int) -> list[int]:
        """Returns a node and all below it."""
        found = [number]
        for item in found:
            found.extend(self._live[item].children.values())
        return found
