"""The constraints of open requests: compiled beside the engine's thread, and as the masks of passes.

A request with a constraint runs once its grammar is compiled. Before a pass the masks of all nodes of all proposals are
computed together, and nodes that are not allowed are left out.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from outrider.errors import ConstraintFailed, InvalidArgument
from outrider.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.grammar.masks import NodeMasks, node_masks, token_words
from outrider.parameters import SamplingParameters
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree
from target_service.engine.request_constraint import ConstrainedRequest, RequestConstraint, RoundMasks


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
        self._tokens: Tensor | None = None

    def begin(self, parameters: SamplingParameters) -> CompiledGrammar | None:
        """Begin to compile the constraint of a request that is about to be opened; None without one.

        Raises:
            InvalidArgument: the model has no tokenizer, or no end-of-text token.
            Overloaded: too many constraints wait to be compiled.
        """
        return None if parameters.constraint is None else self._require().begin(parameters.constraint)

    def attach(self, request: MaskedRequest, grammar: CompiledGrammar | None, on_ready: Callable[[], object]) -> None:
        """Give a request its grammar, if it has one; `on_ready` is called, in any thread, once it is compiled."""
        if grammar is None:
            return
        request.constraint = RequestConstraint(grammar, request, self._eos_token_ids, on_ready)

    def check(self, parameters: SamplingParameters) -> None:
        """Raise `InvalidArgument` where a request has a constraint that the model cannot follow."""
        if parameters.constraint is not None:
            self._require()

    def masked(self, rounds: Sequence[Offered]) -> list[tuple[ProposalTree, RoundMasks | None] | None]:
        """Return the allowed part of each proposal, with its masks; None for masks of requests without a constraint.

        Instead of both None where a proposal has led the matchers beyond a bound: the grammar is compiled anew, and the
        round waits for that.

        Raises:
            ConstraintFailed: a matcher exceeds a bound after the output itself. Ask for each round alone then.
        """
        constrained = [item for item in rounds if item.request.constraint is not None]
        if not constrained:
            return [(item.tree, None) for item in rounds]
        known = iter(self._masked_together(constrained))
        return [(item.tree, None) if item.request.constraint is None else next(known) for item in rounds]

    def _masked_together(self, rounds: Sequence[Offered]) -> Iterator[tuple[ProposalTree, RoundMasks] | None]:
        pairs = [(own, own.taken(item.tree)) for item in rounds if (own := item.request.constraint) is not None]
        known = [own.known_masks(tree) for own, tree in pairs]
        fresh = [pair for pair, masks in zip(pairs, known, strict=True) if masks is None]
        found: Iterator[NodeMasks | None]
        try:
            found = iter(self._node_masks(fresh))
        except ConstraintFailed:
            found = iter([self._masked_alone(own, tree) for own, tree in fresh])
        for (own, tree), masks in zip(pairs, known, strict=True):
            if masks is None and (masks := next(found)) is None:
                yield None
            else:
                own.keep_base(masks)
                yield own.round(tree, masks)

    def _masked_alone(self, own: RequestConstraint, tree: ProposalTree) -> NodeMasks | None:
        """Return the masks of one proposal; None where its grammar is compiled anew."""
        try:
            return self._node_masks([(own, tree)])[0]
        except ConstraintFailed:
            if own.begin_anew(tree, self._tokens):
                return None
            raise

    def _node_masks(self, pairs: Sequence[tuple[RequestConstraint, ProposalTree]]) -> list[NodeMasks]:
        if self._tokens is None and self._compiler is not None:
            self._tokens = token_words(self._compiler.token_ids, self._vocabulary_size)
        return node_masks([own.matched(tree) for own, tree in pairs], self._vocabulary_size, self._tokens)

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
