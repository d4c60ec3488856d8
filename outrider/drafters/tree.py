"""A session's proposal while it is drafted: one tree, grown best first, whether it waits for verdicts or runs ahead.

Of every node that the draft has run, its choices for the next token are known, in order (`choices`). A choice is worth
the product of the values on its path (`tree_order`, `node_values`): how often the target goes on with the draft's
first, second, ... choice and, under `coupled`, how probable the draft finds this one. The nodes worth most are run
next, and the best become the proposal.

- A tree that runs ahead of verdicts is endless. Its choices become nodes, and are sent, if they are worth as much as
  the least of the best `lookahead` nodes of such a tree, where deeper nodes are worth less, because they are needed
  later. So the main line comes first, and beside it, for each number of its tokens that the target may accept, fewer
  alternatives the deeper they are. When the text goes on along the tree, the nodes below gain in value, and the tree
  grows on.
- A tree that waits is as deep as a round verifies along one path, and takes as many steps. Its choices become nodes
  once those after nodes that are still to be run are expected to be worth less, so that the best of all are sent (as
  in EAGLE-2, Li et al. 2024, section 4).
- A chain is the tree of one branch: each node has one choice, which is run next.

Under `rejection` a sampled token becomes a node as soon as its parent is run, whatever it is, and which other nodes are
run and sent follows from depths and ranks alone, which are known before any token is. A tree that waits is a sampled
line then, as deep as it may be, which the best guesses beside it fill up.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from torch import Tensor

from outrider.drafters.choices import Choice, Choices, Place, TreeOptions, new_choices
from outrider.drafters.drafter import OpenProposal
from outrider.drafters.node_values import NodeValues
from outrider.drafters.tree_bounds import TreeBounds
from outrider.drafters.tree_order import Node, NodeOrder
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.parameters import AcceptanceRule
from outrider.speculation.acceptance import MAX_RANK
from outrider.tokens import NodeKind, ProposalNode

MAX_WIDTH: Final = 16
"""Nodes of one session that are run in a step, at most; how many are depends on the cost of rows."""
_MAX_NODES_OF_ONE_ROOT: Final = 16384


class DraftTree:
    """The tree of one proposal; see the module.

    Args:
        proposal: the requested proposal; the tree adds no nodes to it by itself (see `take`).
        max_nodes: nodes of a proposal whose request does not bound them; 0 for no bound of the drafter's own.
        choices: makes the choices after nodes.
        values: of its nodes; the tree adds the outcomes that it observes.

    Attributes:
        proposal: see there.
        root: the node that the text has come to.
    """

    def __init__(self, proposal: OpenProposal, max_nodes: int, choices: Choices, values: NodeValues) -> None:
        self.proposal = proposal
        self.root = Node(None, 0, Choice(0))
        self._bounds = TreeBounds(proposal, max_nodes)
        self._choices = choices
        self._values = values
        self._order = NodeOrder(proposal, values)
        self._made: list[ProposalNode] = []
        self._num_numbered = self._num_live = self._num_steps = 0
        self._max_depth = 0
        self._unaffordable: set[Node] = set()
        self._frontier: list[tuple[float, Node]] = []
        self._is_whole = False
        self._least = self._least_value()

    @property
    def has_run_root(self) -> bool:
        """Whether the draft's predictions after the root are known, or need not be."""
        return self.root.children is not None or len(self.proposal.token_ids) >= self._bounds.end_len

    @property
    def is_awaited(self) -> bool:
        """Whether the main line is shorter than what the target can verify."""
        return self._max_depth - self.root.depth < self.proposal.num_speculative_tokens

    @property
    def waits(self) -> bool:
        """Whether it waits for verdicts."""
        return self._bounds.waits

    def frontier(self, width: int = MAX_WIDTH) -> list[tuple[float, Node]]:
        """Return nodes to be run next, with their values, those worth most first; none where no more pays."""
        return self._frontier[:width]

    def position(self, node: Node) -> int:
        """Return the session position of a node's token."""
        return self.proposal.root_len + node.depth - 1

    def live(self) -> Iterator[Node]:
        """Yield the root and all choices below it that are known."""
        nodes = [self.root]
        for node in nodes:
            nodes += node.children or ()
            yield node

    def postpone(self, node: Node) -> None:
        """Leave out a node for which there is no memory until the text has gone on."""
        self._unaffordable.add(node)
        self._decide()

    def expand(self, nodes: Sequence[Node], logits: Tensor) -> None:
        """Add the draft's predictions after nodes that were run: logits [F, D], over the draft's vocabulary."""
        places = [Place(self._path(node), node.segment) for node in nodes]
        found = self._choices.after(places, logits, 1 if self._bounds.is_chain else MAX_RANK)
        for node, choices in zip(nodes, found, strict=True):
            node.children = [Node(node, rank, choice) for rank, choice in enumerate(choices, 1)]
            for child in filter(self._is_sent_at_once, node.children):
                self._send(child)
        self._num_steps += 1
        self._decide()

    def take(self) -> list[ProposalNode]:
        """Return the nodes that have been made since the last call, parents before their children."""
        made, self._made = self._made, []
        return made

    def follow(self, token_ids: Sequence[int]) -> bool:
        """Move the root along the text as far as the tree has it; return whether all of that was sent.

        Then the tree goes on below the text. Else it has only observed the outcome.
        """
        goes_on = self._num_numbered <= _MAX_NODES_OF_ONE_ROOT
        for token_id in token_ids:
            children = self.root.children or ()
            child = next((child for child in children if child.token_id == token_id), None)
            likelihoods = [self._order.likelihood(item) for item in children]
            self._values.observe(self.root.depth + 1, likelihoods, child.rank if child else None)
            if child is None:
                return False
            goes_on = goes_on and child.number > 0
            # Nodes that can no longer be reached are dropped.
            self.root.parent, self.root.children = None, [child]
            self.root = child
        if goes_on:
            self._go_on()
        return goes_on

    def _go_on(self) -> None:
        sent = [node for node in self.live() if node.number or node is self.root]
        self._num_live = len(sent) - 1
        self._max_depth = max(node.depth for node in sent)
        self._unaffordable.clear()
        self._num_steps, self._is_whole = 0, False
        self._least = self._least_value()
        self._decide()

    @property
    def _compares(self) -> bool:
        """Whether the best nodes are known only once all nodes with possibly better children have been run."""
        return self.waits and self._is_coupled

    @property
    def _is_coupled(self) -> bool:
        return self.proposal.terms.acceptance_rule is AcceptanceRule.COUPLED

    def _least_value(self) -> float:
        """Return from which value on a choice becomes a node, as long as more nodes are to be run; see the module."""
        if self.waits:
            return 0.0 if self._compares else math.inf
        return 0.0 if self._bounds.is_chain else self._order.least_value(self.root.depth, self._bounds.num_nodes)

    def _may_run(self, node: Node, end_depth: int) -> bool:
        is_end = node.token_id in self.proposal.terms.stop_token_ids
        return node.children is None and node not in self._unaffordable and not is_end and node.depth < end_depth

    def _decide(self) -> None:
        """Decide which choices are sent, and which nodes are run next."""
        best = self._best(self._least)
        self._frontier = [] if self._is_whole else self._to_run(best)
        if self.waits and not self._frontier and self.root.children is not None:
            self._is_whole = True
            # Choices of less value fill the proposal up.
            best = self._best(0.0)
        rivals = self._frontier if self._compares else ()
        floor = max((self._order.first_below(node, value) for value, node in rivals), default=0.0)
        for value, node in best:
            if not node.number and value >= floor:
                self._send(node)

    def _best(self, least: float) -> list[tuple[float, Node]]:
        """Return the nodes that were sent, and the best choices for which there is room beside them."""
        room, num_sent = self._bounds.num_nodes - self._num_live, self._num_live
        best: list[tuple[float, Node]] = []
        for value, node in self._order.best_first(self.root, self._bounds.end_depth(self.root.depth)):
            if node.number:
                num_sent -= 1
            elif room > 0 and value >= least:
                room -= 1
            elif num_sent:
                continue
            else:
                break
            best.append((value, node))
        return best

    def _to_run(self, best: Sequence[tuple[float, Node]]) -> list[tuple[float, Node]]:
        """Return which of the best nodes have yet to be run: those after which a choice may be worth as much."""
        if self.waits and self._num_steps >= self.proposal.num_speculative_tokens:
            return []
        # Whatever the choices after a node that is sent, there is room for the first of them.
        room = self._bounds.num_nodes - (self._num_live if self._compares else len(best))
        least = 0.0 if self.waits else self._least
        if self._compares and len(best) >= self._bounds.num_nodes:
            least = best[-1][0]
        end_depth = self._bounds.end_depth(self.root.depth)
        found = [
            (value, node)
            for value, node in best
            if self._may_run(node, end_depth) and self._order.first_below(node, value) >= least
        ]
        return found[: max(0, room)]

    def _is_sent_at_once(self, node: Node) -> bool:
        """Whether a choice becomes a node whatever it is: a sampled one, which must not be withheld for its value."""
        return node.choice.distribution is not None

    def _send(self, node: Node) -> None:
        assert node.parent is not None
        self._num_numbered += 1
        self._num_live += 1
        node.number = self._num_numbered
        kind = NodeKind.GUESSED if node.choice.distribution is None else NodeKind.DRAFTED
        # A drafted node belongs to the chain of its parent.
        node.segment = node.number if kind is NodeKind.GUESSED else node.parent.segment
        self._max_depth = max(self._max_depth, node.depth)
        likelihood = node.choice.likelihood if self._is_coupled else 0.0
        distribution = node.choice.distribution
        self._made.append(ProposalNode(node.parent.number, node.token_id, kind, distribution, likelihood=likelihood))

    def _path(self, node: Node) -> tuple[int, ...]:
        """Return the tokens below the session's down to a node, its own included."""
        token_ids: list[int] = []
        while node is not self.root:
            token_ids.append(node.token_id)
            assert node.parent is not None
            node = node.parent
        return tuple(reversed(token_ids))


def root_tree(
    proposal: OpenProposal,
    options: TreeOptions,
    vocabulary: DraftVocabulary,
    all_sessions: NodeValues,
    one_session: NodeValues,
) -> DraftTree:
    """Return a tree that has yet to grow.

    Args:
        proposal: the requested proposal.
        options: of the drafter's trees.
        vocabulary: the draft's.
        all_sessions: values of nodes, learnt from all that the drafter drafts.
        one_session: those of this session. A tree under `rejection` follows from them alone: values learnt from
            another session of the same seed, and so of the same noise, may depend on the tokens that this one is about
            to sample.
    """
    is_coupled = proposal.terms.acceptance_rule is AcceptanceRule.COUPLED
    choices = new_choices(proposal, options, vocabulary)
    return DraftTree(proposal, options.max_nodes, choices, all_sessions if is_coupled else one_session)
