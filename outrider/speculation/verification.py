"""Acceptance rules: they accept a prefix of a path of a proposal, and add a token of the target's own.

Every rule is lossless: the output follows the target's distribution, whatever was proposed. All random decisions go
through a `DecisionSource`, so that tests can run this code on every outcome of every decision, with its probability.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.errors import ConstraintFailed
from outrider.speculation.randomness import Counter, Purpose
from outrider.tokens import ROOT, ProposalTree, SparseDistribution, TokenOrigin

TargetDistributions: TypeAlias = Callable[[int], Tensor]
"""Returns the target's distribution after a node (after the base for `ROOT`): float64 [V], at least 0, sum 1."""


class DecisionSource(Protocol):
    """The source of the rules' random decisions; each counter is used at most once in a session."""

    def pick(self, weights: Tensor, counter: Counter) -> int:
        """Return a token id sampled with probabilities proportional to `weights`, float64 [V]."""

    def accept(self, probability: float, counter: Counter) -> bool:
        """Return True with this probability, in [0, 1]."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a verification: the accepted tokens of a proposal, then one token of the target's own.

    Invariant: `token_ids` and `origins` have one element more than `path`.

    Attributes:
        token_ids: the output tokens, at positions base.len, base.len + 1, ...
        origins: of each token: ACCEPTED, and for the last one RECOVERED if other tokens were proposed at its position,
            else BONUS. Where no token can follow what was accepted, the last accepted one is the last of the output,
            and the round after this one fails, as it would without a proposal.
        path: numbers of the accepted nodes, from a child of the root downwards.
    """

    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    path: tuple[int, ...]


def follow_draws(tree: ProposalTree, draw: Callable[[int], int]) -> Outcome:
    """Verify a proposal by the `coupled` rule: a proposed token is accepted iff it equals the target's own draw.

    The output equals that of plain decoding with the same draws, for any tree (Daliri et al. 2024, "Coupling without
    Communication and Drafter-Invariant Speculative Decoding", Gumbel coupling). Kinds and distributions of nodes are
    ignored.

    Args:
        tree: the proposal.
        draw: returns the target's token after a node, at position base.len + the node's depth; called once for `ROOT`
            and once for each accepted node.
    """
    path: list[int] = []
    while True:
        number = path[-1] if path else ROOT
        try:
            token_id = draw(number)
        except ConstraintFailed:
            if not path:
                raise
            return _ended(tree, path)
        child = tree.child(number, token_id)
        if child is None:
            return _outcome(tree, path, token_id)
        path.append(child)


def verify_rejection(
    tree: ProposalTree, distribution_after: TargetDistributions, base_len: int, source: DecisionSource
) -> Outcome:
    """Verify a proposal by speculative sampling with block verification.

    The drafted chain below the root is verified as one block (Sun et al. 2024, "Block Verification Accelerates
    Speculative Decoding", Alg. 2): a prefix of it is accepted, and the target adds a token of its own, recovered from
    the residual distribution or as the bonus. If that token is a guessed node, it is accepted, and the drafted chain
    below it is verified as the next block.

    A drafted node counts as guessed unless its `draft_distribution` has its token; guessed nodes never change the
    output distribution. The output distribution is the target's iff every drafted token was sampled from its
    `draft_distribution`, independently of everything else (`draft_rejection`), and the presence of a node does not
    depend on its own token.

    Args:
        tree: the proposal.
        distribution_after: called at most once per node, and not below a node that the target cannot output.
        base_len: session length that the proposal continues, in tokens.
        source: makes the decisions; each counter is used under this base only.
    """
    path: list[int] = []
    start = ROOT
    while True:
        try:
            block = _Block(tree, distribution_after, base_len, start)
            kept = block.num_kept(source)
            path += block.chain[:kept]
            token_id = block.own_token(kept, source)
        except ConstraintFailed:
            if not path:
                raise
            return _ended(tree, path)
        child = tree.child(path[-1] if path else ROOT, token_id)
        # The rejected node of the block has residual probability 0, up to rounding; its chain was already verified.
        if child is None or child in block.chain:
            return _outcome(tree, path, token_id)
        path.append(child)
        start = child


def residual_distribution(target: Tensor, draft: Tensor, scale: float = 1.0) -> Tensor:
    """Return the distribution of the token that replaces a rejected drafted token.

    It is norm(max(scale * target - draft, 0)), so that accepted and recovered tokens together follow `target`
    exactly (with scale 1 Leviathan et al. 2023, Alg. 1, where `target` is p and `draft` is q; else Sun et al. 2024,
    Alg. 2).

    If that has no mass, `target` nowhere exceeds `draft`: the two are equal up to rounding, and a rejection has
    probability 0 up to rounding. The result is then `target`.

    Args:
        target: float64 [V], sum 1.
        draft: float64 [V], sum 1.
        scale: probability, in (0, 1], that the drafted tokens before this one are accepted; p_i in Sun et al. 2024.

    Returns:
        float64 [V], sum 1.
    """
    residual = (scale * target).sub_(draft).clamp_(min=0)
    mass = float(residual.sum())
    return residual.div_(mass) if mass > 0 else target


def draft_coupled(distribution: Tensor, position: int, source: DecisionSource) -> int:
    """Return the draft's prediction of the target's draw under `coupled`: a draw with the target's noise.

    Args:
        distribution: of the draft: float64 [V], at least 0, not all 0.
        position: session position of the token.
        source: with the session's seed.
    """
    return source.pick(distribution, Counter(Purpose.TARGET, position))


def draft_rejection(
    distribution: Tensor, base_len: int, position: int, source: DecisionSource, segment: int = ROOT
) -> int:
    """Return a drafted token for the `rejection` rule: a sample from `distribution`.

    The token must be proposed whatever its value is. So the drafted child of a node is sampled before the guessed
    children, which must have other tokens: otherwise a sampled token that was already guessed could not be added, and
    would be withheld because of its value.

    Args:
        distribution: of the draft, which becomes the node's `draft_distribution`: float64 [V], at least 0, not all 0.
        base_len: length of the session that the proposal continues.
        position: session position of the token.
        source: makes the decision.
        segment: number of the guessed node below which the drafted chain starts; `ROOT` for the first chain.
    """
    return source.pick(distribution, Counter(Purpose.DRAFT, position, base_len, segment))


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A prefix of a block, with the distributions that verify it.

    Attributes:
        scale: probability, given the drafted tokens, that at least this prefix is accepted; p_i in Sun et al. 2024.
        target: the target's distribution after the prefix; None for the whole block, which needs it only if accepted.
        draft: the distribution that the next drafted token was sampled from; None for the whole block.
    """

    scale: float
    target: Tensor | None = None
    draft: Tensor | None = None

    @property
    def acceptance(self) -> float:
        """Probability of accepting this prefix given that no longer one is accepted; h_i in Sun et al. 2024."""
        if self.target is None or self.draft is None:
            return self.scale
        mass = float((self.scale * self.target).sub_(self.draft).clamp_(min=0).sum())
        # With scale 1 the formula is mass / mass; its limit is 1 also where the mass is 0.
        return 1.0 if self.scale == 1 else mass / (mass + 1 - self.scale)


class _Block:
    """The drafted chain below a node, verified as one block."""

    def __init__(self, tree: ProposalTree, distribution_after: TargetDistributions, base_len: int, start: int) -> None:
        self._distribution_after = distribution_after
        self._start = start
        self._position = base_len + tree.depth(start)
        self._base_len = base_len
        self.chain = _drafted_chain(tree, start)
        self._prefixes = self._weigh(tree)

    def _weigh(self, tree: ProposalTree) -> list[_Prefix]:
        """Return the prefixes that can be accepted, shortest first (Sun et al. 2024, Alg. 2).

        A node that no token can follow ends the chain: whether it is accepted must not depend on what was drafted
        below it.
        """
        prefixes: list[_Prefix] = []
        scale, number = 1.0, self._start
        for child in self.chain:
            try:
                target = self._distribution_after(number)
            except ConstraintFailed:
                if number == self._start:
                    raise
                self.chain = self.chain[: len(prefixes)]
                break
            draft = _dense(tree.node(child).draft_distribution, target)
            prefixes.append(_Prefix(scale, target, draft))
            token_id = tree.node(child).token_id
            scale = min(scale * float(target[token_id]) / float(draft[token_id]), 1.0)
            if scale == 0:
                return prefixes
            number = child
        return [*prefixes, _Prefix(scale)]

    def num_kept(self, source: DecisionSource) -> int:
        """Return the length of the accepted prefix: the longest whose own draw accepts it, 0 if there is none."""
        for num in range(len(self._prefixes) - 1, 0, -1):
            if source.accept(self._prefixes[num].acceptance, self._counter(num - 1, Purpose.ACCEPT)):
                return num
        return 0

    def own_token(self, num_kept: int, source: DecisionSource) -> int:
        """Return the target's token after the accepted prefix: recovered, or the bonus after the whole block."""
        prefix = self._prefixes[num_kept]
        if prefix.target is None or prefix.draft is None:
            weights = self._distribution_after(self.chain[-1] if self.chain else self._start)
        else:
            weights = residual_distribution(prefix.target, prefix.draft, prefix.scale)
        return source.pick(weights, self._counter(num_kept, Purpose.RESIDUAL))

    def _counter(self, offset: int, purpose: Purpose) -> Counter:
        return Counter(purpose, self._position + offset, self._base_len, self._start)


def _drafted_chain(tree: ProposalTree, number: int) -> list[int]:
    """Return the chain of drafted nodes below a node, up to the first whose distribution does not have its token."""
    chain: list[int] = []
    child = tree.drafted_child(number)
    while child is not None:
        node = tree.node(child)
        if node.draft_distribution is None or node.token_id not in node.draft_distribution.token_ids:
            break
        chain.append(child)
        child = tree.drafted_child(child)
    return chain


def _dense(distribution: SparseDistribution | None, like: Tensor) -> Tensor:
    """Return a sparse distribution as a dense, normalised one: float64 [V]."""
    if distribution is None:
        raise ValueError("a drafted node has no draft_distribution")
    weights = torch.tensor(distribution.probabilities, dtype=torch.float64, device=like.device)
    token_ids = torch.tensor(distribution.token_ids, device=like.device)
    return torch.zeros_like(like).index_put_((token_ids,), weights / weights.sum())


def _ended(tree: ProposalTree, path: Sequence[int]) -> Outcome:
    """Return the outcome of a path that nothing can follow."""
    token_ids = tuple(tree.node(number).token_id for number in path)
    return Outcome(token_ids, tuple(TokenOrigin.ACCEPTED for _ in path), tuple(path[:-1]))


def _outcome(tree: ProposalTree, path: Sequence[int], token_id: int) -> Outcome:
    origin = TokenOrigin.RECOVERED if tree.children(path[-1] if path else ROOT) else TokenOrigin.BONUS
    token_ids = (*(tree.node(number).token_id for number in path), token_id)
    return Outcome(token_ids, (*(TokenOrigin.ACCEPTED for _ in path), origin), tuple(path))
