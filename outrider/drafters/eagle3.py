"""Drafting with an EAGLE-3 head (Li et al. 2025): one layer over the target's features and the tokens that follow them.

A column of the head is a position whose feature the target has sent, with the token after it; its output predicts the
token after that. Columns are run once and kept as keys and values. Below the last one a tree grows: a drafted token has
no feature, and the output of its parent is used in its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from outrider.control.pass_times import PassTimes
from outrider.drafters.choices import TreeOptions
from outrider.drafters.columns import HeadState
from outrider.drafters.drafter import Drafter, DrafterInfo, OpenProposal, StepRows
from outrider.drafters.features import Features
from outrider.drafters.node_values import NodeValues
from outrider.drafters.shares import share_rows
from outrider.drafters.states import BoundedStates
from outrider.drafters.tree import DraftTree, root_tree
from outrider.drafters.tree_order import Node
from outrider.errors import Overloaded
from outrider.lm.heads.columns import ColumnPasses, Columns, Rows
from outrider.lm.heads.vocabulary import DraftVocabulary

_WIDTH: Final = 12
"""Nodes of one session that are run in a step, at most: a whole depth of a tree, but for nodes that are seldom sent."""


@dataclass(slots=True)
class OpenTree:
    """A proposal's tree while it is drafted, and the head's outputs for it.

    Attributes:
        tree: the tree.
        state: of its session.
        edge: nodes of the current pass, or the root.
        outputs: of each node that was run, and of the root: [1, H], or of a block [K, H].
        seen: the nodes' slots to which each node that was run attends, its own included.
        num_slots: slots after the columns that are taken.
    """

    tree: DraftTree
    state: HeadState
    edge: list[Node]
    outputs: dict[Node, Tensor]
    seen: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    num_slots: int = 0

    def enter(self) -> None:
        """Assign slots to the nodes of the next pass."""
        self.edge = [node for _, node in self.tree.frontier(_WIDTH)]
        for node in self.edge:
            assert node.parent is not None
            self.seen[node] = (*self.seen.get(node.parent, ()), self.num_slots)
            self.num_slots += 1


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Limits of a drafter over a target's features.

    Attributes:
        kv_budget_bytes: keys, values and waiting features of all sessions together.
        prefill_chunk_len: rows of one pass over all sessions; every session has at least one.
        tree: of its trees.
    """

    kv_budget_bytes: int
    prefill_chunk_len: int
    tree: TreeOptions


class Eagle3Drafter(Drafter):
    """A `Drafter` that runs an EAGLE-3 head; a step is a pass over the rows of all sessions.

    Args:
        passes: of the head.
        vocabulary: the tokens that it can predict.
        info: identity and limits.
        options: see there.
    """

    def __init__(
        self, passes: ColumnPasses, vocabulary: DraftVocabulary, info: DrafterInfo, options: HeadOptions
    ) -> None:
        self.times = PassTimes()
        self._passes = passes
        self._vocabulary = vocabulary
        self._info = info
        self._options = options
        self._device = passes.device
        num_heads, head_dim, width = passes.num_kv_heads, passes.head_dim, info.feature_width
        self._column_bytes = 4 * num_heads * head_dim
        self._states = BoundedStates(
            lambda: HeadState(num_heads, head_dim, width, passes.device), options.kv_budget_bytes
        )
        self._trees: dict[OpenProposal, OpenTree] = {}
        self._node_values = NodeValues.of_all_sessions()

    @property
    def info(self) -> DrafterInfo:
        """Identity and limits."""
        return self._info

    @property
    def used_bytes(self) -> int:
        """Memory of keys, values and waiting features, in bytes."""
        return self._states.used_bytes

    def resume(self, session_id: str) -> int:
        """Drop waiting features, whose tokens are unknown from now on; those of the columns are kept."""
        state = self._states.find(session_id)
        if state is None:
            return 0
        state.features.restart(state.num_columns)
        return state.num_columns

    def give(self, session_id: str, features: Features) -> bool:
        """Keep features until their tokens arrive; return whether there is a gap before them."""
        has_gap = self._states.use(session_id).features.give(features)
        self._states.weigh(session_id)
        self._states.make_room(0, {session_id})
        return has_gap

    def truncate(self, session_id: str, length: int) -> None:
        """Keep the columns: they are compared with the session's tokens when the session drafts again."""
        if (state := self._states.find(session_id)) is not None:
            state.recheck_from(length)

    def advance(self, proposal: OpenProposal, token_ids: Sequence[int]) -> bool:
        """Observe the outcome of the proposal; the next one is drafted anew, from the target's own features."""
        state = self._states.find(proposal.session_id)
        if state is not None and state.drafted is not None and state.drafted.proposal is proposal:
            state.drafted.follow(token_ids)
            state.drafted = None
        return False

    def forget(self, session_id: str) -> None:
        """Drop the state of the session."""
        self._states.forget(session_id)

    @torch.no_grad()
    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        """Run one pass: of each session columns that are missing, or the nodes at the edge of its tree."""
        self._forget_trees(set(proposals))
        ready = [item for item in self._admitted(proposals) if self._is_ready(item)]
        waiting = [item for item in ready if item not in self._trees]
        wanted = [len(item.token_ids) - 1 - self._state(item).num_columns for item in waiting]
        shares = dict(zip(waiting, share_rows(wanted, self._options.prefill_chunk_len), strict=True))
        rows = [self._columns(item, shares[item]) if item in shares else self._edge(item) for item in ready]
        if rows:
            outputs = self._passes.run([self._state(item) for item in ready], rows)
            for item, output in zip(ready, outputs, strict=True):
                self._store(item, output, shares.get(item, 0))
            self._grow(ready)
        columns = [(row.num_rows, row.first) for row in rows if isinstance(row, Columns)]
        num_nodes = sum(row.num_rows for row in rows if isinstance(row, Rows))
        return StepRows.of(num_nodes, columns)

    def _forget_trees(self, active: set[OpenProposal]) -> None:
        """Drop the trees of proposals that were replaced, or whose session's state was evicted."""
        self._trees = {
            item: tree
            for item, tree in self._trees.items()
            if item in active and tree.state is self._states.find(item.session_id)
        }

    def _state(self, proposal: OpenProposal) -> HeadState:
        return self._states.use(proposal.session_id)

    def _admitted(self, proposals: Sequence[OpenProposal]) -> list[OpenProposal]:
        """Make room for the keys and values of proposals; refuse those for which there is none."""
        in_use = {item.session_id for item in proposals}
        admitted, needed_bytes = [], 0
        for item in proposals:
            capacity = len(self._state(item).keys)
            length = len(item.token_ids) + max(item.max_nodes, item.num_speculative_tokens)
            more_bytes = max(0, length - capacity) * self._column_bytes
            if self._states.make_room(needed_bytes + more_bytes, in_use):
                needed_bytes += more_bytes
                admitted.append(item)
            else:
                in_use.discard(item.session_id)
                item.refuse(Overloaded("the sessions that draft now fill the budget"))
        return admitted

    def _is_ready(self, proposal: OpenProposal) -> bool:
        """Return whether a pass can advance the proposal; where features are missing, mark the proposal so."""
        if proposal in self._trees:
            return True
        state, num_needed = self._state(proposal), len(proposal.token_ids) - 1
        if not num_needed:
            proposal.complete = True  # no token is predicted after a single one
            return False
        state.match(proposal.token_ids)
        known = state.last_output
        if state.num_columns == num_needed and (known is None or len(known) < self._size(proposal)):
            state.truncate(num_needed - 1)
        if state.features.end < num_needed:
            proposal.missing_features_from = state.features.end
            return False
        if state.num_columns == num_needed and state.last_output is not None:
            self._root(proposal, state.last_output)
            self._grow([proposal])
        return not proposal.complete

    def _size(self, proposal: OpenProposal) -> int:
        """Return the rows of a pass that predict what follows the text: that of the last column."""
        return 1

    def _columns(self, proposal: OpenProposal, num: int) -> Columns:
        state = self._state(proposal)
        first = state.num_columns
        features = state.features.take(num).to(self._device)
        return Columns(features, proposal.token_ids[first + 1 : first + 1 + num], first)

    def _edge(self, proposal: OpenProposal) -> Rows:
        item, num_columns = self._trees[proposal], self._state(proposal).num_columns
        num_before = item.num_slots
        item.enter()
        slots = range(item.num_slots)
        among_nodes = torch.tensor([[slot in item.seen[node] for slot in slots] for node in item.edge])
        mask = functional.pad(among_nodes, (num_columns, 0), value=True).to(self._device)
        hidden = torch.cat([item.outputs[node.parent] for node in item.edge if node.parent is not None])
        token_ids = [node.token_id for node in item.edge]
        # A drafted token is one column after its parent.
        positions = [num_columns - 1 + node.depth for node in item.edge]
        return Rows(hidden, self._passes.embed(token_ids), positions, num_columns + num_before, mask)

    def _store(self, proposal: OpenProposal, output: Tensor, num_columns: int) -> None:
        """Store the outputs of a pass for a session; those of columns begin with the last one's."""
        state, item = self._state(proposal), self._trees.get(proposal)
        if item is not None:
            item.outputs.update(zip(item.edge, torch.split(output, 1), strict=True))
            return
        first = state.num_columns
        state.extend(proposal.token_ids[first : first + num_columns + 1], output)
        self._states.weigh(proposal.session_id)
        if state.num_columns == len(proposal.token_ids) - 1:
            self._root(proposal, output)

    def _root(self, proposal: OpenProposal, output: Tensor) -> None:
        state = self._state(proposal)
        tree = root_tree(proposal, self._options.tree, self._vocabulary, self._node_values, state.node_values)
        state.drafted = tree
        self._trees[proposal] = OpenTree(tree, state, [tree.root], {tree.root: output})

    def _grow(self, proposals: Sequence[OpenProposal]) -> None:
        """Grow the trees by the rows of the last pass; complete the proposals whose trees are whole."""
        items = [self._trees[item] for item in proposals if item in self._trees]
        if not items:
            return
        outputs = torch.cat([item.outputs[node] for item in items for node in item.edge])
        logits = torch.split(self._passes.logits(outputs)[1], [len(item.edge) for item in items])
        for item, part in zip(items, logits, strict=True):
            item.tree.expand(item.edge, part)
            if not item.tree.frontier(_WIDTH):
                item.tree.proposal.fill(item.tree.take())
                del self._trees[item.tree.proposal]
