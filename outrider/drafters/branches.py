"""The KV caches of a session and its tree: one for the text and what continues it, one for each branch.

A branch begins as a fork of the one that it leaves, whose pages it shares. A node that was run is held by the branch on
which it was run first. When the text goes on along a branch, that branch's cache becomes the text's.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from outrider.drafters.cached_tokens import CachedTokens
from outrider.drafters.node_values import NodeValues
from outrider.drafters.tree import DraftTree, Node


@dataclass(slots=True, eq=False)
class Branch:
    """A cache, and what it holds of the tree.

    Attributes:
        cached: the cache.
        nodes: those run on it that can still happen, from the top down.
        num_shared_bytes: of the pages that it shares since it was forked.
    """

    cached: CachedTokens
    nodes: list[Node] = field(default_factory=list)
    num_shared_bytes: int = 0


class SessionCaches:
    """See the module.

    Args:
        text: the cache of the session's text.

    Attributes:
        node_values: of this session's nodes.
        tree: what the branches belong to; None where nothing is drafted.
    """

    def __init__(self, text: CachedTokens) -> None:
        self.node_values = NodeValues.of_one_session()
        self.tree: DraftTree | None = None
        self._main = Branch(text)
        self._sides: list[Branch] = []
        self._holders: dict[Node, Branch] = {}

    @property
    def text(self) -> CachedTokens:
        """The cache of the session's text, which may hold a branch of the tree beyond it."""
        return self._main.cached

    @property
    def has_branches(self) -> bool:
        """Whether there is memory that the text and the main line do not need."""
        return bool(self._sides)

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes; what branches share counts once."""
        own = (max(0, side.cached.num_bytes - side.num_shared_bytes) for side in self._sides)
        return self.text.num_bytes + sum(own)

    def release(self) -> None:
        """Gives the memory back."""
        self.end()
        self.text.release()

    def end(self) -> None:
        """Forgets the tree, and all branches but the one that the text's cache holds."""
        for side in self._sides:
            side.cached.truncate(0)
        self.tree, self._sides, self._holders, self._main.nodes = None, [], {}, []

    def plant(self, root: Node) -> None:
        """Learns that the text was run up to the root."""
        self._main.nodes = [root]
        self._holders[root] = self._main

    def enter(self, node: Node, length: int) -> CachedTokens | None:
        """Returns the cache on which a node is to be run behind its parent; None where that one goes on otherwise.

        Args:
            node: its parent was run.
            length: tokens of the session up to the parent, it included.
        """
        branch = self._holder_above(node)
        if branch.nodes[-1] is not node.parent:
            return None
        # What is behind it can no longer happen.
        branch.cached.truncate(length)
        self._hold(node, branch)
        return branch.cached

    def fork(self, node: Node, length: int) -> CachedTokens:
        """Returns a cache on which a node is to be run beside what continues its parent; see `enter`."""
        forked = self._holder_above(node).cached.fork(length)
        side = Branch(forked, num_shared_bytes=forked.kv_cache.shared_bytes(length))
        self._sides.append(side)
        self._hold(node, side)
        return forked

    def _holder_above(self, node: Node) -> Branch:
        assert node.parent is not None
        return self._holders[node.parent]

    def _hold(self, node: Node, branch: Branch) -> None:
        branch.nodes.append(node)
        self._holders[node] = branch

    def leave(self, node: Node) -> None:
        """Takes back that a node is to be run."""
        branch = self._holders.pop(node)
        branch.nodes.remove(node)
        if not branch.nodes and branch in self._sides:
            self._sides.remove(branch)
            branch.cached.truncate(0)

    def advance(self, root: Node, parent: Node, live: Collection[Node]) -> None:
        """Learns that the text has gone on down to a node; drops what can no longer happen.

        Args:
            root: that node; it may not have been run yet.
            parent: of that node; it was run.
            live: nodes that can still happen, the root included.
        """
        holder = self._holders.get(root) or self._holders[parent]
        if holder is not self._main:
            self._sides = [self._main, *(side for side in self._sides if side is not holder)]
            self._main, holder.num_shared_bytes = holder, 0
        self._holders = {node: branch for node, branch in self._holders.items() if node in live}
        for branch in (self._main, *self._sides):
            branch.nodes = [node for node in branch.nodes if node in live]
        for side in self._sides:
            if not side.nodes:
                side.cached.truncate(0)
        self._sides = [side for side in self._sides if side.nodes]
