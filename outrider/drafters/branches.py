"""The KV caches of a session and its tree: one for the text and what continues it, one for each branch.

A branch begins as a fork of another, whose pages it shares. A node that was run is held by the branch on which it was
run first. When the text goes on along a branch, that branch's cache becomes the text's.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from outrider.drafters.cached_tokens import CachedTokens
from outrider.drafters.node_values import NodeValues
from outrider.drafters.tree import DraftTree
from outrider.drafters.tree_order import Node


@dataclass(slots=True, eq=False)
class Branch:
    """A cache, and the nodes of the tree in it.

    Attributes:
        cached: the cache.
        nodes: those run on it that can still be accepted, from the top down.
        num_shared_bytes: of the pages shared with the branch that it was forked from.
    """

    cached: CachedTokens
    nodes: list[Node] = field(default_factory=list)
    num_shared_bytes: int = 0


class SessionCaches:
    """The KV caches of one session; see the module.

    Args:
        text: the cache of the session's text.

    Attributes:
        node_values: of this session's nodes.
        tree: of the branches; None where nothing is drafted.
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
        """Whether there are branches besides the main line."""
        return bool(self._sides)

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes; what branches share counts once."""
        own = (max(0, side.cached.num_bytes - side.num_shared_bytes) for side in self._sides)
        return self.text.num_bytes + sum(own)

    def release(self) -> None:
        """Free the memory."""
        self.end()
        self.text.release()

    def end(self) -> None:
        """Drop the tree, and all branches but the one in the text's cache."""
        for side in self._sides:
            side.cached.truncate(0)
        self.tree, self._sides, self._holders, self._main.nodes = None, [], {}, []

    def set_root(self, root: Node) -> None:
        """Record that the text was run up to the root."""
        self._main.nodes = [root]
        self._holders[root] = self._main

    def continue_with(self, node: Node, length: int) -> CachedTokens | None:
        """Return the cache in which a node is run after its parent; None where another node follows there.

        Args:
            node: its parent was run.
            length: tokens of the session up to the parent, it included.
        """
        branch = self._holder_above(node)
        if branch.nodes[-1] is not node.parent:
            return None
        # Tokens after the parent can no longer be accepted.
        branch.cached.truncate(length)
        self._hold(node, branch)
        return branch.cached

    def fork(self, node: Node, length: int) -> CachedTokens:
        """Return a new branch in which a node is run after its parent, which another node follows in its own branch."""
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

    def withdraw(self, node: Node) -> None:
        """Take back a node that is not run after all."""
        branch = self._holders.pop(node)
        branch.nodes.remove(node)
        if not branch.nodes and branch in self._sides:
            self._sides.remove(branch)
            branch.cached.truncate(0)

    def advance(self, root: Node, parent: Node, live: Collection[Node]) -> None:
        """Make a node the root, to which the text has gone on; drop the branches that can no longer be accepted.

        Args:
            root: that node; it may not have been run yet.
            parent: of that node; it was run.
            live: nodes that can still be accepted, the root included.
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
