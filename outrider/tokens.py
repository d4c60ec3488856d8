"""Spans of tokens and trees of proposed tokens: the nouns every service shares."""

from dataclasses import dataclass, field
from enum import Enum
from math import isfinite

ROOT = 0
"""Number of a proposal tree's root, the base itself; nodes are numbered from 1."""
MAX_PROPOSAL_NODES = 1024
"""Nodes of one proposal that can still happen, at most: what a request may ask for, and what a worker holds.

It bounds memory and the size of a message. No pass verifies as many, so no deployment needs another value."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens of a session, at positions start, start + 1, ... up to but excluding `end`."""

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
    """What chosen layers of the target take in at positions start, start + 1, ...: bfloat16, little endian."""

    start: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Base:
    """What a proposal or a verdict continues: the session's length, and its lease's fencing token."""

    len: int
    fencing_token: int


class NodeKind(Enum):
    """How a proposal node came to be; see `verification` for what each permits."""

    DRAFTED = "drafted"
    GUESSED = "guessed"


class TokenOrigin(Enum):
    """How an output token came to be; output tokens = accepted + recovered + bonus."""

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
            raise ValueError("draft_distribution needs one probability for each token id, and at least one")
        if len(set(self.token_ids)) != len(self.token_ids):
            raise ValueError("draft_distribution names a token id twice")
        if not all(isfinite(weight) and 0 < weight <= 1 + 1e-6 for weight in self.probabilities):
            raise ValueError("draft_distribution has a probability outside (0, 1]")
        if abs(sum(self.probabilities) - 1) > 1e-6:
            raise ValueError(f"draft_distribution sums to {sum(self.probabilities)!r}, must sum to 1")


@dataclass(frozen=True, slots=True)
class ProposalNode:
    """A proposed token below `parent` (`ROOT` or the number of an earlier node).

    `draft_distribution` is the law a drafted token was sampled from; only the `rejection` rule needs it.
    """

    parent: int
    token_id: int
    kind: NodeKind = NodeKind.DRAFTED
    draft_distribution: SparseDistribution | None = None


@dataclass(frozen=True, slots=True)
class ProposalPart:
    """Nodes of a tree that were drafted together.

    Attributes:
        base: what the tree was planted under.
        first_node: number of the first of these nodes; 1 plants a new tree.
        nodes: they, parents before their children.
        complete: whether nothing more will come before the draft knows of more tokens.
        known_len: length of the session as the draft knew it then.
        step_time_s: seconds of a step of the draft; 0 where that is not known.
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
        """Adds a node and returns its number.

        Raises:
            ValueError: the parent does not exist, a sibling has the same token id, or is drafted as this one is.
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
        """Returns the node of that number, from 1."""
        return self.nodes[number - 1]

    def depth(self, number: int) -> int:
        """Returns the number of steps from the root; 0 for `ROOT`."""
        return self._depths[number]

    def child(self, number: int, token_id: int) -> int | None:
        """Returns the number of the child with that token id, if there is one."""
        return self._children.get(number, {}).get(token_id)

    def children(self, number: int) -> tuple[int, ...]:
        """Returns the numbers of the children, in order of arrival."""
        return tuple(self._children.get(number, {}).values())

    def drafted_child(self, number: int) -> int | None:
        """Returns the number of the drafted child, if there is one."""
        drafted = (child for child in self.children(number) if self.node(child).kind is NodeKind.DRAFTED)
        return next(drafted, None)

    def path(self, number: int) -> tuple[int, ...]:
        """Returns the numbers from a child of the root down to `number`, both included; empty for `ROOT`."""
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
        rank: of the output token; 1 is the most likely.
        top_token_ids: the most likely token ids, most likely first.
        top_logprobs: their log-probabilities.
    """

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
