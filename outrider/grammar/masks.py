"""The tokens that constraints allow after the nodes of many proposals, computed in native calls on all cores."""

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple

import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from outrider.errors import ConstraintFailed
from outrider.grammar.matcher import OutputMatcher
from outrider.grammar.source import one_line
from outrider.tokens import ROOT, ProposalTree

_MAX_THREADS: Final = 8
_WORD_BITS: Final = 32


class MatchedTree(NamedTuple):
    """A proposal below the output that a matcher has followed."""

    matcher: OutputMatcher
    tree: ProposalTree


@dataclass(frozen=True, slots=True)
class NodeMasks:
    """The tokens allowed after the base of a tree, and after each of its nodes.

    Attributes:
        words: int32 [1 + len(tree), W]: bit b of word w is token 32 * w + b; row n follows node n. All bits of a row
            are 0 after a node that is not allowed itself.
    """

    words: Tensor

    def __getitem__(self, number: int) -> Tensor:
        """Return the mask after a node, int32 [W]."""
        return self.words[number]

    def __len__(self) -> int:
        return len(self.words)

    @property
    def base(self) -> "NodeMasks":
        """The mask after the base alone."""
        return NodeMasks(self.words[:1])

    def allow_any(self) -> list[bool]:
        """Return for the base and each node whether any token is allowed after it."""
        return self.words.any(dim=1).tolist()

    def allows(self, numbers: Sequence[int], token_ids: Sequence[int]) -> list[bool]:
        """Return whether each token is allowed after the node of the same place."""
        places = torch.tensor(token_ids)
        words = self.words[torch.tensor(numbers), places // _WORD_BITS]
        return ((words >> (places % _WORD_BITS)) & 1).bool().tolist()

    def allow_besides(self, words: Tensor) -> list[bool]:
        """Return for the base and each node whether any token but those of a mask, int32 [W], is allowed after it."""
        return (self.words & ~words).any(dim=1).tolist()

    def only(self, numbers: Sequence[int]) -> "NodeMasks":
        """Return the masks after the base and these nodes, which become nodes 1, 2, ..."""
        return NodeMasks(self.words[[ROOT, *numbers]])


def token_words(token_ids: Iterable[int], vocabulary_size: int) -> Tensor:
    """Return the mask of some tokens, int32 [V / 32, rounded up]; ids of V and beyond are left out."""
    words = [0] * -(-vocabulary_size // _WORD_BITS)
    for token_id in token_ids:
        if token_id < vocabulary_size:
            words[token_id // _WORD_BITS] |= _bit(token_id)
    return torch.tensor(words, dtype=torch.int32)


def node_masks(items: Sequence[MatchedTree], vocabulary_size: int, tokens: Tensor | None = None) -> list[NodeMasks]:
    """Return the masks of each tree; the matchers stay where they are.

    Args:
        items: of different requests.
        vocabulary_size: V; the masks have V / 32 words, rounded up.
        tokens: mask of the tokens that there are; None for all. A grammar that allows all but some tokens allows ids
            that the tokenizer does not have.

    Raises:
        ConstraintFailed: a matcher exceeds a bound. It is raised for any of them: ask for each alone then.
    """
    if not items:
        return []
    jobs: list[tuple[LLMatcher, int, list[int]]] = []
    rows: list[list[int]] = []
    num_rows = 0
    for item in items:
        found, num_rows = _jobs(item, num_rows, jobs)
        rows.append(found)
    words = torch.zeros(num_rows, -(-vocabulary_size // _WORD_BITS), dtype=torch.int32)
    row_bytes = words.shape[1] * words.element_size()
    # The library has a call for outputs alone, and one for outputs with proposals.
    if alone := [(matcher, row) for matcher, row, path in jobs if not path]:
        _executor().unsafe_compute_mask_ptr(alone, words.data_ptr(), row_bytes, num_rows)
    if below := [job for job in jobs if job[2]]:
        _executor().unsafe_compute_mask_ptr_with_draft_token(below, words.data_ptr(), row_bytes, num_rows)
    for matcher, _, _ in jobs:
        if matcher.is_error():
            raise ConstraintFailed(f"the constraint fails: {one_line(matcher.get_error())}")
    if tokens is not None:
        words &= tokens
    return [NodeMasks(_rows(words, found)) for found in rows]


def masks_apart(
    begin: Callable[[], OutputMatcher],
    output: Sequence[int],
    tree: ProposalTree,
    vocabulary_size: int,
    tokens: Tensor | None = None,
) -> NodeMasks:
    """Return the masks of a tree as they are where the output itself comes to its nodes, one after the other.

    Each path has a matcher of its own, so that what the library computes for one counts towards no bound of another.
    Nothing is allowed after a node where the grammar exceeds a bound: an output that comes there fails.

    Args:
        begin: returns a new matcher that shares nothing with others, at the beginning of an output.
        output: so far.
        tree: proposal below it.
        vocabulary_size: V.
        tokens: see `node_masks`.
    """
    words = torch.zeros(1 + len(tree), -(-vocabulary_size // _WORD_BITS), dtype=torch.int32)
    for leaf in _leaves(tree):
        matcher, followed = begin(), list(output)
        for number in (ROOT, *tree.path(leaf)):
            try:
                if number != ROOT:
                    node = tree.node(number)
                    if not NodeMasks(words).allows([node.parent], [node.token_id])[0]:
                        break
                    followed.append(node.token_id)
                matcher.follow(followed)
                [masks] = node_masks([MatchedTree(matcher, ProposalTree())], vocabulary_size, tokens)
            except ConstraintFailed:
                break
            words[number] = masks[ROOT]
    return NodeMasks(words)


def allowed_tree(
    tree: ProposalTree, masks: NodeMasks, ends: Collection[int] = (), *, keeps_drafted: bool
) -> tuple[ProposalTree, list[int]]:
    """Return a tree without the nodes that are not allowed, nor what follows them, and the numbers of those kept.

    Nothing is kept below a node that nothing may follow, or that ends the output: whether such a node is accepted must
    not depend on what was drafted below it.

    Args:
        tree: the proposal.
        masks: after its nodes.
        ends: tokens that end an output.
        keeps_drafted: whether drafted nodes are kept, without what follows them. Under `rejection` a drafted token that
            the target never outputs is rejected, and its distribution counts: it must not be left out for its value.
    """
    nodes = tree.nodes
    if not nodes:
        return tree, []
    allowed = masks.allows([node.parent for node in nodes], [node.token_id for node in nodes])
    goes_on = masks.allow_any()
    for number, node in enumerate(nodes, start=1):
        goes_on[number] = goes_on[number] and allowed[number - 1] and node.token_id not in ends
    if all(is_allowed and goes_on[node.parent] for is_allowed, node in zip(allowed, nodes, strict=True)):
        return tree, list(range(1, 1 + len(nodes)))
    kept, numbers = ProposalTree(), {ROOT: ROOT}
    for number, (node, is_allowed) in enumerate(zip(nodes, allowed, strict=True), start=1):
        stays = is_allowed or (keeps_drafted and node.draft_distribution is not None)
        if stays and node.parent in numbers and goes_on[node.parent]:
            numbers[number] = kept.append(replace(node, parent=numbers[node.parent]))
    return kept, [number for number in numbers if number != ROOT]


def _jobs(item: MatchedTree, first: int, jobs: list[tuple[LLMatcher, int, list[int]]]) -> tuple[list[int], int]:
    """Add a job for each path of a tree, from row `first` on; return the row of each node, and the next free row."""
    nodes = item.tree.nodes
    rows = [first] * (1 + len(nodes))
    for leaf in _leaves(item.tree):
        path = item.tree.path(leaf)
        for depth, number in enumerate(path, start=1):
            rows[number] = first + depth
        # Each path has a copy, which is dropped behind it: see `OutputMatcher` about going back.
        matcher = item.matcher.native.deep_copy() if path else item.matcher.native
        jobs.append((matcher, first, [nodes[number - 1].token_id for number in path]))
        first += 1 + len(path)
    return rows, first


def _rows(words: Tensor, numbers: Sequence[int]) -> Tensor:
    """Return some rows: where they follow each other, as those of a chain do, without a copy."""
    first = numbers[0]
    end = first + len(numbers)
    return words[first:end] if list(numbers) == list(range(first, end)) else words[list(numbers)]


def _leaves(tree: ProposalTree) -> list[int]:
    """Return the nodes without children; the root alone where there are none."""
    parents = {node.parent for node in tree.nodes}
    return [number for number in range(1 + len(tree)) if number not in parents]


def _bit(token_id: int) -> int:
    """Return the bit of a token within its word, as a signed number."""
    place = token_id % _WORD_BITS
    return 1 << place if place < _WORD_BITS - 1 else -(1 << place)


@cache
def _executor() -> LLExecutor:
    return LLExecutor(max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)))))
