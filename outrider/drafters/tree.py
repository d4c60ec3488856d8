"""A session's proposal while it is drafted: one tree, grown best first, whether it waits for verdicts or runs ahead.

Of every node that the draft has run, its choices for the next token are known, in order (`choices`). A choice is worth
the product of what those on its path are worth (`node_values`): how often the target goes on with the draft's first,
second, ... choice and, under `coupled`, how probable the draft finds this one. The nodes worth most are run next, and
the best become the proposal. A node is never worth more than its parent, so the best are a tree.

- A tree that runs ahead of verdicts is endless. Its choices become nodes, and are sent, if they are worth as much as
  the least of the best `lookahead` nodes of such a tree, and what is deeper is worth less, because it is needed later.
  So the main line comes first, and beside it, for each number of its tokens that the target may accept, fewer
  alternatives the deeper they are. When the text goes on along the tree, what is below gains in value, and the tree
  grows on.
- A tree that waits is as deep as a round verifies along one path, and takes as many steps. Its choices become nodes
  once those behind nodes that are still to be run are expected to be worth less, so that the best of all are sent (as
  in EAGLE-2, Li et al. 2024, section 4).
- A chain is the tree of one branch: each node has one choice, which is run next.

Under `rejection` a sampled token becomes a node as soon as its parent is run, whatever it is, and what else is run and
sent follows from depths and ranks alone, which are known before any token is. A tree that waits is a sampled line then,
as deep as it may be, which the best guesses beside it fill up.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final

from torch import Tensor

from outrider.drafters.choices import Choice, Choices, Place, TreeOptions, new_choices
from outrider.drafters.drafter import OpenProposal
from outrider.drafters.node_values import NodeValues, least_value
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.parameters import AcceptanceRule
from outrider.speculation.acceptance import MAX_RANK
from outrider.tokens import ROOT, NodeKind, ProposalNode

MAX_WIDTH: Final = 16
"""Nodes of one session that are run in a step, at most; how many are depends on what rows cost."""
URGENCY: Final = 0.9
"""What a node is worth less for each step that it is deeper, where it is needed that much later."""
_MAX_NODES_SINCE_PLANTED: Final = 16384


class Node:
    """A choice behind a node that was run, or what the tree was planted under.

    Attributes:
        parent: the node that it follows.
        rank: among its parent's choices, from 1.
        choice: its token, and what the draft finds of it.
        depth: below what the tree was planted under.
        number: as it was sent; 0 where it was not, or is what the tree was planted under.
        segment: see `choices.Place`.
        children: choices behind it, in order; None until it is run.
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


class DraftTree:
    """See the module.

    Args:
        proposal: what is asked for; the tree adds nothing to it by itself (see `take`).
        max_nodes: nodes of a proposal that does not say how many it may have; 0 for no bound of the drafter's own.
        choices: makes the choices behind nodes.
        values: of its nodes; the tree adds to what they know.

    Attributes:
        proposal: what is asked for.
        root: the node that the text has come to.
    """

    def __init__(self, proposal: OpenProposal, max_nodes: int, choices: Choices, values: NodeValues) -> None:
        self.proposal = proposal
        self.root = Node(None, 0, Choice(0))
        self._max_nodes = max_nodes
        self._choices = choices
        self._values = values
        self._made: list[ProposalNode] = []
        self._num_numbered = self._num_live = self._num_steps = 0
        self._max_depth = 0
        self._given_up: set[Node] = set()
        self._frontier: list[tuple[float, Node]] = []
        self._is_whole = False
        self._least = self._least_value()

    @property
    def has_run_root(self) -> bool:
        """Whether it is known what the draft goes on with behind the root, or nothing has to be."""
        return self.root.children is not None or len(self.proposal.token_ids) >= self._end_len

    @property
    def is_awaited(self) -> bool:
        """Whether the main line is shorter than the target has use of."""
        return self._max_depth - self.root.depth < self.proposal.num_speculative_tokens

    @property
    def waits(self) -> bool:
        """Whether it waits for verdicts."""
        return not self.proposal.lookahead

    @property
    def is_chain(self) -> bool:
        """Whether nodes have one child at most."""
        # Where nobody bounds a proposal, one that waits is as large as what a round verifies along one path.
        return self._given_bound <= self.proposal.num_speculative_tokens and (self.waits or self._given_bound > 0)

    def frontier(self, width: int = MAX_WIDTH) -> list[tuple[float, Node]]:
        """Returns nodes to be run next, with their values, those worth most first; none where nothing more pays."""
        return self._frontier[:width]

    def position(self, node: Node) -> int:
        """Returns the session position of a node's token."""
        return self.proposal.planted_len + node.depth - 1

    def live(self) -> Iterator[Node]:
        """Yields the root and all choices below it that are known."""
        nodes = [self.root]
        for node in nodes:
            nodes += node.children or ()
            yield node

    def give_up(self, node: Node) -> None:
        """Learns that there is no memory to run a node; it is not wanted again before the text has gone on."""
        self._given_up.add(node)
        self._decide()

    def expand(self, nodes: Sequence[Node], logits: Tensor) -> None:
        """Takes what the draft gives behind nodes that were run: logits [F, D], over the draft's vocabulary."""
        places = [Place(self._path(node), node.segment) for node in nodes]
        found = self._choices.behind(places, logits, 1 if self.is_chain else MAX_RANK)
        for node, choices in zip(nodes, found, strict=True):
            node.children = [Node(node, rank, choice) for rank, choice in enumerate(choices, 1)]
            self._values.note([self._likelihood(child) for child in node.children])
            for child in filter(self._is_sent_at_once, node.children):
                self._send(child)
        self._num_steps += 1
        self._decide()

    def take(self) -> list[ProposalNode]:
        """Returns the nodes that have been made since the last time, parents before their children."""
        made, self._made = self._made, []
        return made

    def follow(self, token_ids: Sequence[int]) -> bool:
        """Moves the root along the text as far as the tree has it; returns whether all of that was sent.

        Then the tree goes on below the text. Else it has only learnt from it.
        """
        goes_on = self._num_numbered <= _MAX_NODES_SINCE_PLANTED
        for token_id in token_ids:
            children = self.root.children or ()
            child = next((child for child in children if child.token_id == token_id), None)
            self._values.observe(self.root.depth + 1, len(children), child.rank if child else None)
            if child is None:
                return False
            goes_on = goes_on and child.number > 0
            # What can no longer happen is let go.
            self.root.parent, self.root.children = None, [child]
            self.root = child
        if goes_on:
            self._go_on()
        return goes_on

    def _go_on(self) -> None:
        sent = [node for node in self.live() if node.number or node is self.root]
        self._num_live = len(sent) - 1
        self._max_depth = max(node.depth for node in sent)
        self._given_up.clear()
        self._num_steps, self._is_whole = 0, False
        self._least = self._least_value()
        self._decide()

    @property
    def _given_bound(self) -> int:
        """Most nodes, as a request or the drafter says; 0 where neither does."""
        item = self.proposal
        return item.max_nodes or (max(self._max_nodes, item.num_speculative_tokens) if self._max_nodes else 0)

    @property
    def _bound(self) -> int:
        """Most nodes that are live at a time."""
        item, given = self.proposal, self._given_bound
        if self.waits:
            return given or item.num_speculative_tokens
        return min(given, item.lookahead) if given else item.lookahead

    @property
    def _end_len(self) -> int:
        terms = self.proposal.terms
        return min(self.proposal.max_len, terms.prompt_len + terms.parameters.max_tokens)

    @property
    def _compares(self) -> bool:
        """Whether what is worth most is known only when what could be worth more has been run."""
        return self.waits and self.proposal.terms.acceptance_rule is AcceptanceRule.COUPLED

    def _likelihood(self, node: Node) -> float:
        """Returns what the order may look at of how probable the draft finds a choice; 1 for nothing.

        Under `rejection` a tree that runs ahead has sampled tokens and guesses compete for what is run; one that waits
        has sampled all that it may before it takes a guess, so that no sampled token depends on which it takes.
        """
        is_coupled = self.proposal.terms.acceptance_rule is AcceptanceRule.COUPLED
        return node.choice.likelihood if is_coupled or self.waits else 1.0

    @property
    def _urgency(self) -> float:
        return 1.0 if self.waits else URGENCY

    def _least_value(self) -> float:
        """Returns from which value on a choice becomes a node, as long as more nodes are to be run; see the module."""
        if self.waits:
            return 0.0 if self._compares else math.inf
        return 0.0 if self.is_chain else least_value(self._ranks, self.root.depth, self._bound)

    def _ranks(self, depth: int) -> list[float]:
        return [self._urgency * value for value in self._values.ranks(depth)]

    def _below(self, node: Node, value: float) -> float:
        """Returns what the first choice behind a node that has not been run is worth on average."""
        return value * self._urgency * self._values.ranks(node.depth + 1)[0]

    def _has_room_below(self, node: Node) -> bool:
        """Whether a choice behind a node may become one."""
        is_deepest = self.waits and node.depth - self.root.depth >= self.proposal.num_speculative_tokens
        return not is_deepest and self.position(node) + 1 < self._end_len

    def _may_run(self, node: Node) -> bool:
        is_end = node.token_id in self.proposal.terms.stop_token_ids
        return node.children is None and node not in self._given_up and not is_end and self._has_room_below(node)

    def _ordered(self) -> Iterator[tuple[float, Node]]:
        """Yields what is known below the root, that worth most first: parents before children, siblings by rank."""
        ties, urgency = count(), self._urgency
        heap: list[tuple[float, int, Node, float]] = []

        def offer(parent: Node, place: int, value: float) -> None:
            if parent.children and place < len(parent.children) and self._has_room_below(parent):
                child = parent.children[place]
                step = urgency * self._values.value(child.depth, child.rank, self._likelihood(child))
                heapq.heappush(heap, (-value * step, next(ties), child, value))

        offer(self.root, 0, 1.0)
        while heap:
            negated, _, node, above = heapq.heappop(heap)
            yield -negated, node
            assert node.parent is not None
            offer(node, 0, -negated)
            offer(node.parent, node.rank, above)

    def _decide(self) -> None:
        """Decides what is sent, and what is to be run next."""
        best = self._best(self._least)
        self._frontier = [] if self._is_whole else self._to_run(best)
        if self.waits and not self._frontier and self.root.children is not None:
            self._is_whole = True
            # What was not worth it fills the proposal up.
            best = self._best(0.0)
        rivals = self._frontier if self._compares else ()
        floor = max((self._below(node, value) for value, node in rivals), default=0.0)
        for value, node in best:
            if not node.number and value >= floor:
                self._send(node)

    def _best(self, least: float) -> list[tuple[float, Node]]:
        """Returns the nodes that were sent, and the best choices for which there is room beside them."""
        room, num_sent = self._bound - self._num_live, self._num_live
        best: list[tuple[float, Node]] = []
        for value, node in self._ordered():
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
        """Returns which of the best nodes have yet to be run: those that have something behind them worth as much."""
        if self.waits and self._num_steps >= self.proposal.num_speculative_tokens:
            return []
        # Whatever is found behind a node that is sent, there is room for its first choice.
        room = self._bound - (self._num_live if self._compares else len(best))
        least = 0.0 if self.waits else self._least
        if self._compares and len(best) >= self._bound:
            least = best[-1][0]
        found = [(value, node) for value, node in best if self._may_run(node) and self._below(node, value) >= least]
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
        self._made.append(ProposalNode(node.parent.number, node.token_id, kind, node.choice.distribution))

    def _path(self, node: Node) -> tuple[int, ...]:
        """Returns the tokens below the session's down to a node, its own included."""
        token_ids: list[int] = []
        while node is not self.root:
            token_ids.append(node.token_id)
            assert node.parent is not None
            node = node.parent
        return tuple(reversed(token_ids))


def plant(
    proposal: OpenProposal,
    options: TreeOptions,
    vocabulary: DraftVocabulary,
    all_sessions: NodeValues,
    one_session: NodeValues,
) -> DraftTree:
    """Returns a tree that has yet to grow.

    Args:
        proposal: what is asked for.
        options: how the drafter drafts.
        vocabulary: the draft's.
        all_sessions: values of nodes, learnt from whatever the drafter drafts.
        one_session: those of this session. A tree under `rejection` follows from them alone: what is learnt from
            another session of the same seed, and so of the same noise, may depend on what this one is about to sample.
    """
    is_coupled = proposal.terms.acceptance_rule is AcceptanceRule.COUPLED
    choices = new_choices(proposal, options, vocabulary)
    return DraftTree(proposal, options.max_nodes, choices, all_sessions if is_coupled else one_session)
