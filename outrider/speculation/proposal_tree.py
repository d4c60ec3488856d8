"""A proposal tree that outlives rounds: the draft's nodes beyond a session's text, and the text's place among them.

A tree has a base, the committed length that its node 0 stands for, and grows while the text advances: each verdict
moves its root down to the target's last token and drops the nodes that can no longer be accepted. Nodes keep the
numbers under which they were sent, so that draft and target need not agree on when a verdict arrived. The text may be
ahead of the tree: nodes that arrive then move the root along the tokens output in the meantime, until the root has
caught up with the text or the draft turns out to have taken another branch.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from outrider.speculation.acceptance import AcceptanceRates
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree


@dataclass(slots=True)
class _Live:
    """A live node: one that can still be accepted.

    Attributes:
        node: as it was sent; None for node 0.
        depth: steps below the base.
        rank: among its parent's children, from 1, in order of arrival.
        own_rank: among those of them that the same drafter has proposed.
        num_children: number of children that have arrived, dropped ones included.
        num_by_drafter: of these, by their drafter, where they name one.
        drafted: whether one of these is a drafted node.
        children: live children by token id.
    """

    node: ProposalNode | None
    depth: int
    rank: int
    own_rank: int
    num_children: int = 0
    num_by_drafter: dict[str, int] | None = None
    drafted: bool = False
    children: dict[int, int] = field(default_factory=dict)

    @property
    def drafter(self) -> str:
        """The drafter that proposed it; empty where it does not say."""
        return "" if self.node is None else self.node.drafter

    @property
    def likelihood(self) -> float:
        """The draft's probability of it after its parent; 0 where it does not say."""
        return 0.0 if self.node is None else self.node.likelihood


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node to be verified by the target, or expanded by a draft.

    Attributes:
        number: of the node.
        value: estimated probability that it is accepted, times `urgency` per step of depth; in (0, 1).
    """

    number: int
    value: float


class Lookahead:
    """A proposal tree whose root follows the text; see the module.

    Invariant: while the text is ahead of the root, only the root is live.

    Args:
        base_len: session length that node 0 stands for, in tokens.
        rates: acceptance rates, updated with the draft's choices; new ones if None.
    """

    def __init__(self, base_len: int, rates: AcceptanceRates | None = None) -> None:
        self.base_len = base_len
        self.num_numbered = 0
        """Nodes that were added, including those that could no longer be accepted when they arrived."""
        self.root = ROOT
        self._rates = AcceptanceRates() if rates is None else rates
        self._live = {ROOT: _Live(None, 0, 0, 0)}
        # Tokens of the text beyond the root, each with whether the rates learn from it.
        self._ahead: deque[tuple[int, bool]] = deque()

    def __len__(self) -> int:
        """Return the number of live nodes below the root."""
        return len(self._live) - 1

    @property
    def is_caught_up(self) -> bool:
        """Whether the root has caught up with the text, so that the nodes below it continue the text."""
        return not self._ahead

    @property
    def root_depth(self) -> int:
        """Steps from the base to the root."""
        return self._live[self.root].depth

    @property
    def max_depth(self) -> int:
        """Steps from the root to the deepest live node."""
        return max(item.depth for item in self._live.values()) - self.root_depth

    def add(self, node: ProposalNode) -> int:
        """Add a node and return its number.

        Raises:
            ValueError: the parent was never sent, a sibling has the same token id, or both are drafted.
        """
        number = self.num_numbered + 1
        if not 0 <= node.parent < number:
            raise ValueError(f"node {number} has parent {node.parent}, which does not exist")
        parent = self._live.get(node.parent)
        if parent is not None:
            self._attach(number, node, parent)
        self.num_numbered = number
        return number

    def follow(self, token_ids: Sequence[int], *, observes: bool = True) -> None:
        """Move the root along the tokens that were appended to the text; `observes` where the rates learn from them."""
        for token_id in token_ids:
            if self._ahead:
                self._ahead.append((token_id, observes))
            else:
                self._step(token_id, observes=observes)

    def has_path(self, token_ids: Sequence[int]) -> bool:
        """Return whether the tree has a path of these token ids below the root."""
        number: int | None = None if self._ahead else self.root
        for token_id in token_ids:
            number = None if number is None else self._live[number].children.get(token_id)
        return number is not None

    def drafters(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return the drafters of the nodes below the root along these tokens, as far as there are any."""
        found: list[str] = []
        number = None if self._ahead else self.root
        for token_id in token_ids:
            number = None if number is None else self._live[number].children.get(token_id)
            if number is not None:
                found.append(self._live[number].drafter)
        return tuple(found)

    def value(self, number: int) -> float:
        """Return the estimated probability that the target accepts a live node, given that it accepted the parent."""
        item = self._live[number]
        rates = self._rates.of(item.node.drafter) if item.node is not None and item.node.drafter else self._rates
        return rates.value(item.depth, item.own_rank, item.likelihood)

    def is_live(self, number: int) -> bool:
        """Return whether a node can still be accepted, or is the root."""
        return number in self._live

    def depth(self, number: int) -> int:
        """Return the steps from the base to a live node."""
        return self._live[number].depth

    def num_children(self, number: int) -> int:
        """Return the number of children of a live node that have arrived, dropped ones included."""
        return self._live[number].num_children

    def children(self, number: int) -> Sequence[int]:
        """Return the numbers of a live node's live children, in order of arrival."""
        return list(self._live[number].children.values())

    def node(self, number: int) -> ProposalNode:
        """Return a live node as it was sent; raise ValueError for node 0."""
        node = self._live[number].node
        if node is None:
            raise ValueError("node 0 is the base of the tree, not a proposed node")
        return node

    def path(self, number: int) -> tuple[int, ...]:
        """Return the numbers from a child of the root down to a live node, both included; empty for the root."""
        steps: list[int] = []
        while number != self.root:
            steps.append(number)
            number = self.node(number).parent
        return tuple(reversed(steps))

    def drafted_line(self, max_depth: int) -> list[int]:
        """Return the chain of drafted nodes below the root, at most `max_depth` of them."""
        line: list[int] = []
        number: int | None = self.root
        while number is not None and len(line) < max_depth:
            drafted = (child for child in self.children(number) if self.node(child).kind is NodeKind.DRAFTED)
            number = next(drafted, None)
            line += [] if number is None else [number]
        return line

    def candidates(self, max_depth: int, urgency: float = 1.0) -> Iterator[Candidate]:
        """Yield live nodes in descending order of value, parents before their children; none if the text is ahead.

        Args:
            max_depth: maximum steps below the root.
            urgency: factor of a node's value for each step below the root, in (0, 1].
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
        """Return the tree of these live nodes below the root, renumbered from 1; parents come before their children."""
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
        own_rank = parent.num_children
        if node.drafter:
            nums = parent.num_by_drafter = parent.num_by_drafter or {}
            own_rank = nums[node.drafter] = nums.get(node.drafter, 0) + 1
        item = _Live(node, parent.depth + 1, parent.num_children, own_rank)
        if not self._ahead:
            parent.children[node.token_id] = number
            self._live[number] = item
            return
        token_id, observes = self._ahead[0]
        matches = node.token_id == token_id
        if observes:
            self._rates.observe_one(item.depth, item.rank, matches, node.likelihood)
            if node.drafter:
                self._rates.of(node.drafter).observe_one(item.depth, own_rank, matches, node.likelihood)
        if matches:
            self._ahead.popleft()
            self.root, self._live = number, {number: item}

    def _step(self, token_id: int, *, observes: bool) -> None:
        root = self._live[self.root]
        child = root.children.get(token_id)
        if observes:
            self._observe(root, None if child is None else self._live[child])
        if child is None:
            self._ahead.append((token_id, observes))
            root.children = {}
            self._live = {self.root: root}
        else:
            self.root = child
            self._live = {number: self._live[number] for number in self._below(child)}

    def _observe(self, root: _Live, matched: _Live | None) -> None:
        """Have the rates, of the draft and of each drafter, learn with which child of the root the text went on."""
        # In order of arrival, and so of their ranks.
        children = [self._live[number] for number in root.children.values()]
        self._rates.observe(root.depth + 1, [child.likelihood for child in children], matched.rank if matched else None)
        for drafter in root.num_by_drafter or ():
            rank = matched.own_rank if matched is not None and matched.drafter == drafter else None
            own = [child.likelihood for child in children if child.drafter == drafter]
            self._rates.of(drafter).observe(root.depth + 1, own, rank)

    def _below(self, number: int) -> list[int]:
        """Return a node and all live nodes below it."""
        found = [number]
        for item in found:
            found.extend(self._live[item].children.values())
        return found
