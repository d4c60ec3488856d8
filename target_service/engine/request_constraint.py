"""The constraint of an open request: its matcher follows the output, and says what may come next.

Whatever changes the output (a round, a span after a failover, a rollback) moves the matcher.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from torch import Tensor

from outrider.errors import ConstraintFailed
from outrider.grammar.compiler import CompiledGrammar
from outrider.grammar.masks import MatchedTree, NodeMasks, allowed_tree, token_words
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.tokens import ROOT, ProposalTree

_MAX_COMPILE_S: Final = 10.0
_MAX_FORCED: Final = 32
_FORCED_WORK: Final = 2000
"""Bounds of the forced tokens that a round verifies: their number, and its product with the number of all that are
known to be forced, since the mask at each place takes as long as what is forced behind it."""
_MAX_REPLAYED: Final = 64
"""Tokens that a matcher follows at once; more, as after a failover, it follows beside the engine's thread."""
_NO_TREE: Final = ProposalTree()


@dataclass(frozen=True, slots=True)
class RoundMasks:
    """The masks of a round's nodes.

    Attributes:
        masks: after the base and each node of the round's tree.
        free: nodes after which the request has ended, so that nothing need be known.
        must_end: nodes after which only the end is allowed.
        dead: nodes after which nothing is allowed.
    """

    masks: NodeMasks
    free: frozenset[int] = frozenset()
    must_end: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()

    def after(self, number: int) -> tuple[Tensor | None, bool]:
        """Return the mask after a node, None where it restricts nothing, and whether only the end is allowed."""
        if number in self.free or number in self.dead:
            return None, False
        return self.masks[number], number in self.must_end


class ConstrainedRequest(Protocol):
    """A request as its constraint needs it."""

    parameters: SamplingParameters
    stop_token_ids: frozenset[int]
    rule: AcceptanceRule

    @property
    def output(self) -> Sequence[int]:
        """Its output so far."""


class RequestConstraint:
    """The constraint of one open request. Called in the engine's thread.

    Proposals decide about nothing: what the library computes for one counts towards the bounds of the grammar that it
    was compiled to. Where such a bound is reached, the grammar is compiled anew, and takes no proposals any more; but
    for the drafted tokens of that very round under `rejection`, which must not be left out for their values: their
    masks are computed apart.

    Args:
        grammar: of the constraint.
        request: whose it is.
        eos_token_ids: end an output.
        on_ready: called, in any thread, once the grammar is compiled, or has come to a long output.

    Attributes:
        forced: tokens that are expected to follow the output whatever the logits are.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        request: ConstrainedRequest,
        eos_token_ids: Collection[int],
        on_ready: Callable[[], object] = lambda: None,
    ) -> None:
        self.grammar = grammar
        self._request = request
        self._eos_token_ids = eos_token_ids
        self._on_ready = on_ready
        self._started = time.monotonic()
        self._has_followed = self._is_explored = False
        self._takes_proposals = True
        self._apart = _NO_TREE
        self._base: NodeMasks | None = None
        self._stop_words: Tensor | None = None
        self.forced: list[int] = []
        self._forced_from = self._anew_from = 0
        if not grammar.is_ready:
            grammar.on_ready(on_ready)

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled."""
        return self.grammar.is_ready

    @property
    def has_followed(self) -> bool:
        """Whether it has come to the request's output."""
        return self._has_followed

    @property
    def takes_proposals(self) -> bool:
        """Whether proposals are verified."""
        return self._takes_proposals

    def forced_line(self, most: int) -> list[int]:
        """Return the forced tokens that a round verifies, up to `most`."""
        num = min(most, _MAX_FORCED, max(1, _FORCED_WORK // max(1, len(self.forced))))
        return self.forced[: max(0, num)]

    @property
    def compile_until(self) -> float:
        """Monotonic time until which the request waits for its grammar."""
        return self._started + _MAX_COMPILE_S

    def follow(self) -> None:
        """Come to the request's output, once the grammar is compiled.

        `has_followed` says whether it is there: a long output it follows beside this thread.

        Raises:
            OutriderError: it cannot be compiled, does not allow the output, or exceeds a bound.
        """
        output = self._request.output
        if not self.is_ready:
            self.grammar.expect(output)
            return
        try:
            matcher = self.grammar.matcher
            num = matcher.num_missing(output)
            if num > _MAX_REPLAYED:
                self._hold()
                self.grammar.follow(output)
                self.grammar.on_ready(self._on_ready)
                return
            matcher.follow(output)
        except ConstraintFailed:
            if not self.begin_anew():
                raise
            return
        self._has_followed, self._base = True, None
        if len(output) != self._anew_from:
            self._apart = _NO_TREE
        is_forced = num == len(output) - self._forced_from and list(output[self._forced_from :]) == self.forced[:num]
        self.forced, self._forced_from = self.forced[num:] if is_forced else [], len(output)
        # What is forced takes long to find where it is long. It is a proposal like any other: in the middle of it the
        # library may want other tokens for the same text, and the masks say so.
        self.forced = self.forced or matcher.forced()

    def begin_anew(self, tree: ProposalTree = _NO_TREE, tokens: Tensor | None = None) -> bool:
        """Compile the grammar anew, after a failure for which a proposal may be to blame; return whether one may be.

        Args:
            tree: proposal of the round that failed.
            tokens: see `node_masks`.
        """
        if not self._is_explored:
            return False
        self._hold()
        self._is_explored = self._takes_proposals = False
        self._apart = _drafted_part(tree) if self._request.rule is AcceptanceRule.REJECTION else _NO_TREE
        self._anew_from = len(self._request.output)
        self.grammar.begin_anew(self._request.output, self._apart, tokens)
        self.grammar.on_ready(self._on_ready)
        return True

    def _hold(self) -> None:
        self._has_followed, self._base, self.forced = False, None, []
        self._started = time.monotonic()

    def matched(self, tree: ProposalTree) -> MatchedTree:
        """Return a proposal of the request below its output."""
        self._is_explored = self._is_explored or bool(tree)
        return MatchedTree(self.grammar.matcher, tree)

    def taken(self, tree: ProposalTree) -> ProposalTree:
        """Return what a round verifies of a proposal: all of it, or what must be where none is taken any more."""
        return tree if self._takes_proposals else self._apart

    def known_masks(self, tree: ProposalTree) -> NodeMasks | None:
        """Return the masks of a proposal that was taken, where they are known already."""
        if not tree:
            return self._base
        return None if self._takes_proposals else self.grammar.masks

    def round(self, tree: ProposalTree, masks: NodeMasks) -> tuple[ProposalTree, RoundMasks]:
        """Return the allowed part of a proposal, and its masks."""
        keeps_drafted = self._request.rule is AcceptanceRule.REJECTION
        kept, numbers = allowed_tree(tree, masks, self._request.stop_token_ids, keeps_drafted=keeps_drafted)
        masks = masks if len(kept) == len(tree) else masks.only(numbers)
        return kept, self._classified(kept, masks)

    @property
    def base_masks(self) -> RoundMasks | None:
        """The mask after the output, where it is known already."""
        return None if self._base is None else self._classified(_NO_TREE, self._base)

    def keep_base(self, masks: NodeMasks) -> None:
        """Keep the mask after the output, which is the first of these, for a round without a proposal."""
        self._base = masks.base

    def _classified(self, tree: ProposalTree, masks: NodeMasks) -> RoundMasks:
        stops = self._request.stop_token_ids
        numbers = range(1 + len(tree))
        free = frozenset(number for number in numbers if number and tree.node(number).token_id in stops)
        allow_any = masks.allow_any()
        dead = {number for number in numbers if not allow_any[number] and number not in free}
        early_len = self._request.parameters.min_tokens - len(self._request.output)
        must_end: set[int] = set()
        if early_len > 0 and self._stop_words is None:
            self._stop_words = token_words(stops, 32 * masks.words.shape[1])
        allow_besides = masks.allow_besides(self._stop_words) if early_len > 0 and self._stop_words is not None else []
        for number in numbers if early_len > 0 else ():
            is_decided = number in free or number in dead or tree.depth(number) >= early_len
            if not is_decided and not allow_besides[number]:
                ends = any(masks.allows([number] * len(self._eos_token_ids), list(self._eos_token_ids)))
                (must_end if ends else dead).add(number)
        return RoundMasks(masks, free, frozenset(must_end), frozenset(dead))


def _drafted_part(tree: ProposalTree) -> ProposalTree:
    """Return the drafted nodes of a tree, and those above them."""
    drafted = [number for number, node in enumerate(tree.nodes, start=1) if node.draft_distribution is not None]
    kept = sorted({number for leaf in drafted for number in tree.path(leaf)})
    part, numbers = ProposalTree(), {ROOT: ROOT}
    for number in kept:
        node = tree.node(number)
        numbers[number] = part.append(replace(node, parent=numbers[node.parent]))
    return part
