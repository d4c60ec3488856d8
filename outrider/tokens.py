"""Token spans, proposal trees and log-probabilities: the data types shared by all services."""

from dataclasses import dataclass, field
from enum import Enum
from math import isfinite

ROOT = 0
"""Number of a proposal tree's root, which stands for the base; nodes are numbered from 1."""
MAX_PROPOSAL_NODES = 1024
"""Maximum live nodes of one proposal, in a request's `max_nodes` and at a worker.

It bounds memory and message sizes. No pass verifies that many nodes, so no deployment needs another value."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens of a session, at positions [start, end)."""

    start: int
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ValueError(f"start is {self.start}, must be at least 0")

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class FeatureSpan:
    """The inputs of chosen target layers, concatenated, at positions start, start + 1, ...: bfloat16, little endian."""

    start: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Base:
    """The state that a proposal or verdict continues: session length in tokens, and the fencing token of its lease."""

    len: int
    fencing_token: int


class NodeKind(Enum):
    """The kinds of proposal nodes: sampled from the draft's distribution, or guessed; see `verification`."""

    DRAFTED = "drafted"
    GUESSED = "guessed"


class TokenOrigin(Enum):
    """The origins of output tokens; output tokens = accepted + recovered + bonus."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A distribution over token ids by its support: distinct ids, probabilities in (0, 1] that sum to 1 within 1e-6."""

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.probabilities) or not self.token_ids:
            raise ValueError("draft_distribution must have one probability per token id, and at least one")
        if len(set(self.token_ids)) != len(self.token_ids):
            raise ValueError("draft_distribution has a token id twice")
        if not all(isfinite(weight) and 0 < weight <= 1 + 1e-6 for weight in self.probabilities):
            raise ValueError("draft_distribution has a probability outside (0, 1]")
        if abs(sum(self.probabilities) - 1) > 1e-6:
            raise ValueError(f"draft_distribution sums to {sum(self.probabilities)!r}, must sum to 1")


@dataclass(frozen=True, slots=True)
class ProposalNode:
    """A proposed token below `parent` (`ROOT` or the number of an earlier node).

    `draft_distribution` is the distribution that a drafted token was sampled from; only the `rejection` rule needs it.
    `drafter` names the drafter that proposed it, or those that did, joined by "+", where a draft combines several.
    `likelihood` is the draft's own probability that the target goes on with the token after its parent, in [0, 1]; 0
    where it does not say. It decides which nodes are verified, never what they are verified to be.
    """

    parent: int
    token_id: int
    kind: NodeKind = NodeKind.DRAFTED
    draft_distribution: SparseDistribution | None = None
    drafter: str = ""
    likelihood: float = 0.0


@dataclass(frozen=True, slots=True)
class ProposalPart:
    """The nodes of a tree that were drafted together, as sent in one message.

    Attributes:
        base: the committed length and fencing token that the tree's root stands for.
        first_node: number of the first of these nodes; 1 starts a new tree.
        nodes: the nodes, parents before their children.
        complete: whether the draft sends no more nodes until it receives more tokens.
        known_len: the draft's session length, in tokens, when it sent these nodes.
        step_time_s: seconds of a draft's step for each token of a path that it drafts; 0 if unknown, or if these nodes
            took none.
    """

    base: Base
    first_node: int
    nodes: tuple[ProposalNode, ...]
    complete: bool
    known_len: int
    step_time_s: float = 0.0


@dataclass(slots=True)
class ProposalTree:
    """A growing tree of proposed tokens under one base.

    Invariants: nodes are numbered 1, 2, ... in order of arrival; a parent's number is lower than its child's; siblings
    differ in token id; at most one child of a node is drafted. A chain is the one-branch case.
    """

    nodes: list[ProposalNode] = field(default_factory=list)
    _children: dict[int, dict[int, int]] = field(default_factory=dict, repr=False)
    _depths: list[int] = field(default_factory=lambda: [0], repr=False)

    def __len__(self) -> int:
        return len(self.nodes)

    def append(self, node: ProposalNode) -> int:
        """Add a node and return its number.

        Raises:
            ValueError: the parent does not exist, a sibling has the same token id, or both are drafted.
        """
        number = len(self.nodes) + 1
        if not 0 <= node.parent < number:
            raise ValueError(f"node {number} has parent {node.parent}, which does not exist")
        siblings = self._children.setdefault(node.parent, {})
        if node.token_id in siblings:
            raise ValueError(f"node {number} repeats token id {node.token_id} among the children of node {node.parent}")
        if node.kind is NodeKind.DRAFTED and self.drafted_child(node.parent) is not None:
            raise ValueError(f"node {number} is a second drafted child of node {node.parent}")
        siblings[node.token_id] = number
        self.nodes.append(node)
        self._depths.append(self._depths[node.parent] + 1)
        return number

    def node(self, number: int) -> ProposalNode:
        """Return the node with this number, from 1."""
        return self.nodes[number - 1]

    def depth(self, number: int) -> int:
        """Return the number of steps from the root; 0 for `ROOT`."""
        return self._depths[number]

    def child(self, number: int, token_id: int) -> int | None:
        """Return the number of the child with this token id; None if there is none."""
        return self._children.get(number, {}).get(token_id)

    def children(self, number: int) -> tuple[int, ...]:
        """Return the numbers of the children, in order of arrival."""
        return tuple(self._children.get(number, {}).values())

    def drafted_child(self, number: int) -> int | None:
        """Return the number of the drafted child; None if there is none."""
        drafted = (child for child in self.children(number) if self.node(child).kind is NodeKind.DRAFTED)
        return next(drafted, None)

    def path(self, number: int) -> tuple[int, ...]:
        """Return the numbers from a child of the root down to `number`, both included; empty for `ROOT`."""
        steps: list[int] = []
        while number != ROOT:
            steps.append(number)
            number = self.node(number).parent
        return tuple(reversed(steps))

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; 0 for an empty tree."""
        return max(self._depths)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one output position, of the target's raw logits.

    Attributes:
        logprob: of the output token.
        rank: of the output token, from 1 (the most likely).
        top_token_ids: the most likely token ids, most likely first.
        top_logprobs: their log-probabilities.
    """

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
