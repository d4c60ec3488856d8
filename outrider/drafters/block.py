"""Drafting a whole block in one pass: a proposal's depths cost a lookup and two small products each.

The pass runs the columns that are missing, as `eagle3` does, and behind the last one the mask rows of the block
(`outrider.lm.heads.block`). The tree then grows depth by depth, over the nodes of all sessions together: row k of a
session's block gives the logits after each of its nodes of that depth, with the transition from the node's token. Where
it can, one native operator does all of that (`grown_tree`).
"""

from collections.abc import Sequence
from dataclasses import replace as with_changes

import torch
from torch import Tensor

from outrider.drafters.drafter import DrafterInfo, OpenProposal, StepRows
from outrider.drafters.eagle3 import Eagle3Drafter, HeadOptions, OpenTree
from outrider.drafters.grown_tree import TreeGrower
from outrider.drafters.tree_order import Node
from outrider.lm.heads.block_passes import BlockPasses, BlockRun
from outrider.lm.heads.columns import Columns
from outrider.lm.heads.vocabulary import DraftVocabulary

_WIDTH = 12
"""Nodes of a session that are expanded at a time, at most."""


class BlockDrafter(Eagle3Drafter):
    """A `Drafter` that runs a block head; a step is a pass over the rows of all sessions, and completes a proposal.

    Args:
        passes: of the head.
        vocabulary: the tokens that it can predict.
        info: identity and limits.
        options: see there.
    """

    def __init__(self, passes: BlockRun, vocabulary: DraftVocabulary, info: DrafterInfo, options: HeadOptions) -> None:
        super().__init__(passes, vocabulary, info, options)
        self._block_size = passes.block_size
        self._transition = passes.transition
        self._grower = TreeGrower(passes, vocabulary, options.tree, _WIDTH) if isinstance(passes, BlockPasses) else None
        self._blocks: dict[OpenProposal, Tensor] = {}

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a path that one step drafts: the block's."""
        return self._block_size

    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        """Run one pass: of each session columns that are missing, and its block once they end the text."""
        for item in proposals:
            item.num_speculative_tokens = min(item.num_speculative_tokens, self._block_size)
        self._blocks.clear()
        return super().step(proposals)

    def _columns(self, proposal: OpenProposal, num: int) -> Columns:
        """Return new columns, and the mask rows of a block where they end the text."""
        columns = super()._columns(proposal, num)
        ends_text = columns.end == len(proposal.token_ids) - 1
        return with_changes(columns, num_masks=self._size(proposal) - 1, ends_text=True) if ends_text else columns

    def _size(self, proposal: OpenProposal) -> int:
        """Return the rows of a block: one for each token of a path."""
        return max(1, proposal.num_speculative_tokens)

    def _root(self, proposal: OpenProposal, output: Tensor) -> None:
        if self._grower is not None and self._grower.can_grow(proposal):
            self._blocks[proposal] = output[: self._size(proposal)]
        else:
            super()._root(proposal, output)

    def _grow(self, proposals: Sequence[OpenProposal]) -> None:
        """Grow the trees to the end and complete their proposals."""
        if self._grower is not None and self._blocks:
            blocks, self._blocks = self._blocks, {}
            for tree in self._grower.grow(list(blocks), list(blocks.values()), self._node_values):
                self._state(tree.proposal).drafted = tree
                tree.proposal.fill(tree.nodes())
        self._grow_in_steps(proposals)

    def _grow_in_steps(self, proposals: Sequence[OpenProposal]) -> None:
        """Grow trees depth by depth, over the nodes of all sessions together."""
        items = [self._trees.pop(item) for item in proposals if item in self._trees]
        if not items:
            return
        blocks = [item.outputs[item.tree.root] for item in items]
        states, logits = self._passes.logits(torch.cat(blocks))
        states = self._transition.states(states)
        firsts = [sum(map(len, blocks[:place])) for place in range(len(items))]
        edges = [(item, first, item.edge) for item, first in zip(items, firsts, strict=True)]
        while edges:
            self._expand(edges, states, logits)
            edges = [(item, first, edge) for item, first, _ in edges if (edge := _edge(item))]
        for item in items:
            item.tree.proposal.fill(item.tree.take())

    def _expand(self, edges: Sequence[tuple[OpenTree, int, list[Node]]], states: Tensor, logits: Tensor) -> None:
        """Expand nodes of all sessions, given all rows' parts of a transition, [R, rank], and logits, [R, D]."""
        rows = [first + node.depth for _, first, nodes in edges for node in nodes]
        before = [_token_before(item, node) for item, _, nodes in edges for node in nodes]
        found = self._transition.logits(logits, states, rows, before)
        first = 0
        for item, _, nodes in edges:
            item.tree.expand(nodes, found[first : first + len(nodes)])
            first += len(nodes)


def _token_before(item: OpenTree, node: Node) -> int:
    """Return the token of a node; at the root the text's last one."""
    return item.tree.proposal.token_ids[-1] if node is item.tree.root else node.token_id


def _edge(item: OpenTree) -> list[Node]:
    return [node for _, node in item.tree.frontier(_WIDTH)]
