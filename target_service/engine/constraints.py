"""The constraints of open requests: compiled beside the engine's thread, followed along the output, and as masks.

A request with a constraint runs once its grammar is compiled. Its matcher follows the output; whatever changes the
output (a round, a span after a failover, a rollback) moves it. Before a pass the masks of all nodes of all proposals
are computed together, and nodes that are not allowed are left out.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from torch import Tensor

from outrider.errors import ConstraintFailed, InvalidArgument
from outrider.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.grammar.masks import MatchedTree, NodeMasks, allowed_tree, node_masks
from outrider.grammar.matcher import OutputMatcher
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree

_MAX_COMPILE_S: Final = 10.0
_MAX_FORCED: Final = 32
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

    Args:
        grammar: of the constraint.
        request: whose it is.
        eos_token_ids: end an output.

    Attributes:
        forced: tokens that follow the output whatever the logits are.
    """

    def __init__(self, grammar: CompiledGrammar, request: ConstrainedRequest, eos_token_ids: Collection[int]) -> None:
        self.grammar = grammar
        self._request = request
        self._eos_token_ids = eos_token_ids
        self._started = time.monotonic()
        self._matcher: OutputMatcher | None = None
        self._base: NodeMasks | None = None
        self.forced: list[int] = []

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled."""
        return self.grammar.is_ready

    @property
    def has_followed(self) -> bool:
        """Whether it has come to the request's output."""
        return self._matcher is not None

    @property
    def compile_until(self) -> float:
        """Monotonic time until which the request waits for its grammar."""
        return self._started + _MAX_COMPILE_S

    def follow(self) -> None:
        """Come to the request's output; before the grammar is compiled, do nothing.

        Raises:
            OutriderError: it cannot be compiled, does not allow the output, or exceeds a bound.
        """
        if not self.is_ready:
            return
        if self._matcher is None:
            self._matcher = OutputMatcher(self.grammar.matcher)
        self._matcher.follow(self._request.output)
        self._base = None
        self.forced = self._matcher.forced(_MAX_FORCED)

    def matched(self, tree: ProposalTree) -> MatchedTree:
        """Return a proposal of the request below its output."""
        assert self._matcher is not None
        return MatchedTree(self._matcher, tree)

    def round(self, tree: ProposalTree, masks: NodeMasks) -> tuple[ProposalTree, RoundMasks]:
        """Return the allowed part of a proposal, and its masks."""
        keeps_drafted = self._request.rule is AcceptanceRule.REJECTION
        kept, numbers = allowed_tree(tree, masks, keeps_drafted=keeps_drafted)
        masks = masks if len(kept) == len(tree) else masks.only(numbers)
        return kept, self._classified(kept, masks)

    @property
    def base_masks(self) -> RoundMasks | None:
        """The mask after the output, where it is known already."""
        return None if self._base is None else self._classified(_NO_TREE, self._base)

    def keep_base(self, masks: NodeMasks) -> None:
        """Keep the mask after the output, for a round without a proposal."""
        self._base = masks

    def _classified(self, tree: ProposalTree, masks: NodeMasks) -> RoundMasks:
        stops = self._request.stop_token_ids
        numbers = range(1 + len(tree))
        free = frozenset(number for number in numbers if number and tree.node(number).token_id in stops)
        allow_any = masks.allow_any()
        dead = {number for number in numbers if not allow_any[number] and number not in free}
        early_len = self._request.parameters.min_tokens - len(self._request.output)
        must_end: set[int] = set()
        for number in numbers if early_len > 0 else ():
            is_decided = number in free or number in dead or tree.depth(number) >= early_len
            if not is_decided and not masks.allows_besides(number, stops):
                ends = any(masks.allows([number] * len(self._eos_token_ids), list(self._eos_token_ids)))
                (must_end if ends else dead).add(number)
        return RoundMasks(masks, free, frozenset(must_end), frozenset(dead))


class Offered(NamedTuple):
    """A round of a request, and what was proposed for it."""

    request: "MaskedRequest"
    tree: ProposalTree


class MaskedRequest(ConstrainedRequest, Protocol):
    """A request that may have a constraint."""

    constraint: RequestConstraint | None


class Constraints:
    """Compiles the constraints of requests, and computes the masks of passes. Called in the engine's thread.

    Args:
        compiler: for the model's tokenizer; None where the model has none.
        vocabulary_size: V.
        eos_token_ids: of the model.
    """

    def __init__(self, compiler: GrammarCompiler | None, vocabulary_size: int, eos_token_ids: Collection[int]) -> None:
        self._compiler = compiler
        self._vocabulary_size = vocabulary_size
        self._eos_token_ids = eos_token_ids

    def begin(self, request: MaskedRequest, on_ready: Callable[[], object]) -> None:
        """Begin to compile a request's constraint, if it has one; `on_ready` is called in any thread.

        Raises:
            InvalidArgument: the model has no tokenizer, or no end-of-text token.
            Overloaded: too many constraints wait to be compiled.
        """
        constraint = request.parameters.constraint
        if constraint is None:
            return
        grammar = self._require().begin(constraint)
        request.constraint = RequestConstraint(grammar, request, self._eos_token_ids)
        if not grammar.is_ready:
            grammar.on_ready(on_ready)

    def check(self, parameters: SamplingParameters) -> None:
        """Raise `InvalidArgument` where a request has a constraint that the model cannot follow."""
        if parameters.constraint is not None:
            self._require()

    def masked(self, rounds: Sequence[Offered]) -> list[tuple[ProposalTree, RoundMasks | None]]:
        """Return the allowed part of each proposal, with its masks; None for requests without a constraint.

        Where a proposal leads beyond a bound of the matcher, the round does without it.

        Raises:
            ConstraintFailed: a matcher exceeds a bound after the output itself. Ask for each round alone then.
        """
        constrained = [item for item in rounds if item.request.constraint is not None]
        if not constrained:
            return [(item.tree, None) for item in rounds]
        known = iter(self._masked_together(constrained))
        return [(item.tree, None) if item.request.constraint is None else next(known) for item in rounds]

    def _masked_together(self, rounds: Sequence[Offered]) -> Iterator[tuple[ProposalTree, RoundMasks]]:
        pairs = [(item.request.constraint, item.tree) for item in rounds if item.request.constraint is not None]
        fresh = [(own, tree) for own, tree in pairs if tree or own.base_masks is None]
        try:
            found = iter(node_masks([own.matched(tree) for own, tree in fresh], self._vocabulary_size))
        except ConstraintFailed:
            found = iter([self._masked_alone(own, tree) for own, tree in fresh])
        for own, tree in pairs:
            if not tree and (base := own.base_masks) is not None:
                yield tree, base
                continue
            masks = next(found)
            if len(masks) == 1:
                own.keep_base(masks)
                tree = _NO_TREE
            yield own.round(tree, masks)

    def _masked_alone(self, own: RequestConstraint, tree: ProposalTree) -> NodeMasks:
        """Return the masks of one proposal; where it leads its matchers beyond a bound, that of the base alone."""
        try:
            return node_masks([own.matched(tree)], self._vocabulary_size)[0]
        except ConstraintFailed:
            if not tree:
                raise
            return node_masks([own.matched(_NO_TREE)], self._vocabulary_size)[0]

    def _require(self) -> GrammarCompiler:
        if self._compiler is None or not self._eos_token_ids:
            missing = "tokenizer" if self._compiler is None else "end-of-text token"
            raise InvalidArgument(f"the model has no {missing}, which constraints need", "constraint")
        return self._compiler


def with_forced(tree: ProposalTree, token_ids: Sequence[int]) -> ProposalTree:
    """Return a proposal that has a line of tokens besides its own nodes.

    The nodes that are added are guesses: whatever the rule, they change no distribution.
    """
    if not token_ids:
        return tree
    longer = tree if tree else ProposalTree()
    number = ROOT
    for token_id in token_ids:
        child = longer.child(number, token_id)
        number = longer.append(ProposalNode(number, token_id, NodeKind.GUESSED)) if child is None else child
    return longer
