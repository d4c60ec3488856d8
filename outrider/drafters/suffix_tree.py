"""Trees of the tokens that followed a text's end where it occurred before, best node first.

A node is worth the product, along its path, of two things: the share of the occurrences that go on with its token, and
how often the token after a match as long as theirs is right. So a long match gives a long line and a short one a few
tokens, and where occurrences differ the tree branches. Oliaro et al. (2024, SuffixDecoding, section 3) count the
occurrences of the longest match alone, and bound a tree by a multiple of its length; here each occurrence counts by the
odds of its own length, which says more where the longest match has occurred once.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from outrider.drafters.suffix_corpus import Occurrence
from outrider.tokens import ROOT

_CONFIDENCE: Final = (0.0, 0.0, 0.3, 0.65, 0.88, 0.92, 0.95, 0.97)
"""How often the token after a match of so many tokens is right; the last one for all that are longer. Means over the
kinds of `bench.traces`."""


@dataclass(frozen=True, slots=True)
class TreeSizes:
    """The bounds of a tree.

    Attributes:
        num_nodes: nodes.
        depth: nodes of a path.
        width: children of a node; 1 makes a chain.
        least_value: value of the least node.
        least_probability: the least probability of a token after the one before it.
        stop_token_ids: after which a path does not go on.
    """

    num_nodes: int
    depth: int
    width: int
    least_value: float
    least_probability: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()


class SuffixNode(NamedTuple):
    """A node: the number of its parent, its token, about its probability after its parent, and its value."""

    parent: int
    token_id: int
    probability: float
    value: float


@dataclass(order=True, slots=True)
class _Branch:
    """A node that may be added, ordered by its value.

    Attributes:
        cost: its value, negated.
        number: of the branches that were found, for order among equals.
        parent: number of the node before it.
        path: tokens to it, its own included.
        probability: about that of its token after the node before it.
        occurrences: which go on with them.
    """

    cost: float
    number: int
    parent: int = field(compare=False)
    path: tuple[int, ...] = field(compare=False)
    probability: float = field(compare=False)
    occurrences: list[Occurrence] = field(compare=False)


class SuffixTree:
    """Grows a tree from occurrences.

    Args:
        text: whose end occurred before; an occurrence in it goes on into the tree's own path, as a repetition does.
        sizes: of the tree.
    """

    def __init__(self, text: Sequence[int], sizes: TreeSizes) -> None:
        self._text = text
        self._sizes = sizes
        self._branches: list[_Branch] = []
        self._num_branches = 0

    def grow(self, occurrences: list[Occurrence]) -> list[SuffixNode]:
        """Return the nodes, parents before children, numbered from 1."""
        nodes: list[SuffixNode] = []
        if self._sizes.depth > 0:
            self._branch(ROOT, (), 1.0, occurrences)
        while self._branches and len(nodes) < self._sizes.num_nodes:
            best = heapq.heappop(self._branches)
            nodes.append(SuffixNode(best.parent, best.path[-1], best.probability, -best.cost))
            if len(best.path) < self._sizes.depth and best.path[-1] not in self._sizes.stop_token_ids:
                self._branch(len(nodes), best.path, -best.cost, best.occurrences)
        return nodes

    def _branch(self, parent: int, path: tuple[int, ...], value: float, occurrences: list[Occurrence]) -> None:
        """Add the branches below a node."""
        groups: dict[int, list[Occurrence]] = {}
        for item in occurrences:
            if (token_id := self._token_id(item, path)) is not None:
                groups.setdefault(token_id, []).append(item)
        total = sum(_odds(item.length) for item in occurrences)
        found: list[tuple[float, int, list[Occurrence]]] = []
        for token_id, items in groups.items():
            share = sum(_odds(item.length) for item in items) / total
            confidence = _confidence(max(item.length for item in items) + len(path))
            found.append((share * confidence, token_id, items))
        found.sort(key=lambda item: -item[0])
        for probability, token_id, items in found[: self._sizes.width]:
            if value * probability >= self._sizes.least_value and probability >= self._sizes.least_probability:
                self._num_branches += 1
                cost, longer = -value * probability, (*path, token_id)
                branch = _Branch(cost, self._num_branches, parent, longer, probability, items)
                heapq.heappush(self._branches, branch)

    def _token_id(self, item: Occurrence, path: tuple[int, ...]) -> int | None:
        """Return the token with which an occurrence goes on below a path that it has followed; None at its end."""
        position = item.position + len(path)
        if position < len(item.token_ids):
            return item.token_ids[position]
        beyond = position - len(item.token_ids)
        return path[beyond] if item.token_ids is self._text and beyond < len(path) else None


def _confidence(length: int) -> float:
    return _CONFIDENCE[min(length, len(_CONFIDENCE) - 1)]


def _odds(length: int) -> float:
    return _confidence(length) / (1 - _confidence(length))
