"""Acceptance rules: which tokens of a proposal the target keeps, and which token of its own it adds.

Every rule is lossless: the output follows the target's law whatever was proposed. A rule decides only through a
`DecisionSource`, so that tests can run this very code on every outcome of every decision, with its exact weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.speculation.randomness import Counter, Purpose
from outrider.tokens import ROOT, ProposalTree, SparseDistribution, TokenOrigin

TargetLaw: TypeAlias = Callable[[int], Tensor]
"""The target's law after a node of the proposal (after the base itself for `ROOT`): float64 [V], at least 0, sum 1."""


class DecisionSource(Protocol):
    """Decides what is left to chance; each counter at most once in the life of a session."""

    def pick(self, weights: Tensor, counter: Counter) -> int:
        """Returns a token id drawn with probabilities proportional to `weights`, float64 [V]."""

    def accept(self, probability: float, counter: Counter) -> bool:
        """Returns whether an event of that probability, in [0, 1], happens."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a verification gives: the accepted tokens of a proposal, then one token of the target's own.

    Invariant: there is one token, and one origin, more than nodes in the path.

    Attributes:
        token_ids: the output tokens, at positions base.len, base.len + 1, ...
        origins: of each token; ACCEPTED but for the last, which is RECOVERED where something else was proposed in its
            place, and else BONUS.
        path: numbers of the accepted nodes, from a child of the root downwards.
    """

    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    path: tuple[int, ...]


def follow_draws(tree: ProposalTree, draw: Callable[[int], int]) -> Outcome:
    """Verifies a proposal by the `coupled` rule: a proposed token is accepted iff it is the target's own draw.

    The output is what plain decoding with the same draws gives, whatever the tree (Daliri et al. 2024, "Coupling
    without Communication and Drafter-Invariant Speculative Decoding"). Nodes' kinds and distributions are not looked
    at.

    Args:
        tree: the proposal.
        draw: returns the target's token after a node, at position base.len + the node's depth; called once for each
            accepted node, and for `ROOT`.
    """
    path: list[int] = []
    while True:
        number = path[-1] if path else ROOT
        token_id = draw(number)
        child = tree.child(number, token_id)
        if child is None:
            return _outcome(tree, path, token_id)
        path.append(child)


def verify_rejection(tree: ProposalTree, law: TargetLaw, base_len: int, source: DecisionSource) -> Outcome:
    """Verifies a proposal by speculative sampling with block verification.

    The drafted chain below the root is verified as one block (Sun et al. 2024, "Block Verification Accelerates
    Speculative Decoding", Alg. 2): a prefix of it is kept, and the target adds a token of its own, from the residual
    or as the bonus. If that token is a guessed node, it is accepted, and the chain below it is verified as a new
    block, and so on.

    A drafted node counts as guessed unless it brings a distribution in which its token has a probability; a guessed
    node never changes the law. The output law is the target's iff drafted tokens were sampled from the distributions
    they bring, independently of all else (`draft_rejection`), and a node's presence does not depend on its own token.

    Args:
        tree: the proposal.
        law: called at most once for each node; not for nodes beyond one that the target cannot output.
        base_len: length of the session that the proposal continues.
        source: decides; each counter here is met under this base only.
    """
    path: list[int] = []
    start = ROOT
    while True:
        block = _Block(tree, law, base_len, start)
        kept = block.num_kept(source)
        path += block.chain[:kept]
        token_id = block.own_token(kept, source)
        child = tree.child(path[-1] if path else ROOT, token_id)
        # The block's own rejected node has residual probability 0, but for rounding: its chain is spent, not followed.
        if child is None or child in block.chain:
            return _outcome(tree, path, token_id)
        path.append(child)
        start = child


def residual_distribution(target: Tensor, draft: Tensor, scale: float = 1.0) -> Tensor:
    """Returns the law of the token that replaces a rejected draft token.

    It is norm(max(scale * target - draft, 0)), so that accepted and recovered tokens together follow `target`
    exactly (with scale 1 Leviathan et al. 2023, Alg. 1, where `target` is p and `draft` is q; else Sun et al. 2024,
    Alg. 2).

    Where that has no mass, `target` nowhere exceeds `draft`: the two are equal, and nothing is rejected, but for the
    rounding of their sums. Then it is `target` itself, the only law that needs no constant to be chosen.

    Args:
        target: float64 [V], sum 1.
        draft: float64 [V], sum 1.
        scale: probability, in (0, 1], with which the drafted tokens before this one are kept in some prefix.

    Returns:
        float64 [V], sum 1.
    """
    residual = (scale * target).sub_(draft).clamp_(min=0)
    mass = float(residual.sum())
    return residual.div_(mass) if mass > 0 else target


def draft_coupled(law: Tensor, position: int, source: DecisionSource) -> int:
    """Returns the draft's best guess at the target's draw under `coupled`: its own law's winner, with the same noise.

    Args:
        law: of the draft; float64 [V], at least 0, not all 0.
        position: session position of the token.
        source: has the session's seed.
    """
    return source.pick(law, Counter(Purpose.TARGET, position))


def draft_rejection(law: Tensor, base_len: int, position: int, source: DecisionSource, segment: int = ROOT) -> int:
    """Returns a drafted token for the `rejection` rule, sampled from `law`.

    It has to be proposed whatever it is. So a node's drafted child is made before its guesses, which avoid its token:
    after them, a token that was guessed already would have no place in the tree, and be withheld for its value.

    Args:
        law: of the draft, which the node has to bring as its distribution; float64 [V], at least 0, not all 0.
        base_len: length of the session that the proposal continues.
        position: session position of the token.
        source: decides.
        segment: number of the guessed node that the drafted chain hangs from; `ROOT` for the main line.
    """
    return source.pick(law, Counter(Purpose.DRAFT, position, base_len, segment))


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A prefix of a block, and what verifies it.

    Attributes:
        scale: probability, given the drafted tokens, that this prefix or a longer one is kept; p_i in Sun et al. 2024.
        target: the target's law after the prefix; None for the whole block, which needs it only when kept.
        draft: the law that the next drafted token was sampled from; None for the whole block.
    """

    scale: float
    target: Tensor | None = None
    draft: Tensor | None = None

    @property
    def acceptance(self) -> float:
        """Probability of keeping this prefix given that no longer one is kept; h_i in Sun et al. 2024."""
        if self.target is None or self.draft is None:
            return self.scale
        mass = float((self.scale * self.target).sub_(self.draft).clamp_(min=0).sum())
        # With scale 1 it is 1: as the limit, and because then nothing has been drafted that the target would not say.
        return 1.0 if self.scale == 1 else mass / (mass + 1 - self.scale)


class _Block:
    """The drafted chain below a node, verified as one block."""

    def __init__(self, tree: ProposalTree, law: TargetLaw, base_len: int, start: int) -> None:
        self._law = law
        self._start = start
        self._position = base_len + tree.depth(start)
        self._base_len = base_len
        self.chain = _drafted_chain(tree, start)
        self._prefixes = self._weigh(tree)

    def _weigh(self, tree: ProposalTree) -> list[_Prefix]:
        """Returns the prefixes that can be kept, shortest first (Sun et al. 2024, Alg. 2)."""
        prefixes: list[_Prefix] = []
        scale, number = 1.0, self._start
        for child in self.chain:
            target = self._law(number)
            draft = _dense(tree.node(child).draft_distribution, target)
            prefixes.append(_Prefix(scale, target, draft))
            token_id = tree.node(child).token_id
            scale = min(scale * float(target[token_id]) / float(draft[token_id]), 1.0)
            if scale == 0:
                return prefixes
            number = child
        return [*prefixes, _Prefix(scale)]

    def num_kept(self, source: DecisionSource) -> int:
        """Returns the length of the prefix that is kept: the longest that its own draw keeps, none if no draw does."""
        for num in range(len(self._prefixes) - 1, 0, -1):
            if source.accept(self._prefixes[num].acceptance, self._counter(num - 1, Purpose.ACCEPT)):
                return num
        return 0

    def own_token(self, num_kept: int, source: DecisionSource) -> int:
        """Returns the target's own token after the kept prefix: from the residual, or after all the bonus."""
        prefix = self._prefixes[num_kept]
        if prefix.target is None or prefix.draft is None:
            weights = self._law(self.chain[-1] if self.chain else self._start)
        else:
            weights = residual_distribution(prefix.target, prefix.draft, prefix.scale)
        return source.pick(weights, self._counter(num_kept, Purpose.RESIDUAL))

    def _counter(self, offset: int, purpose: Purpose) -> Counter:
        return Counter(purpose, self._position + offset, self._base_len, self._start)


def _drafted_chain(tree: ProposalTree, number: int) -> list[int]:
    """Returns the drafted nodes below a node, as far as each brings the distribution it can have been sampled from."""
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
    """Returns the law that is proportional to the distribution, as what was sampled from it followed: float64 [V]."""
    if distribution is None:
        raise ValueError("a drafted node brings no draft_distribution")
    weights = torch.tensor(distribution.probabilities, dtype=torch.float64, device=like.device)
    token_ids = torch.tensor(distribution.token_ids, device=like.device)
    return torch.zeros_like(like).index_put_((token_ids,), weights / weights.sum())


def _outcome(tree: ProposalTree, path: Sequence[int], token_id: int) -> Outcome:
    origin = TokenOrigin.RECOVERED if tree.children(path[-1] if path else ROOT) else TokenOrigin.BONUS
    token_ids = (*(tree.node(number).token_id for number in path), token_id)
    return Outcome(token_ids, (*(TokenOrigin.ACCEPTED for _ in path), origin), tuple(path))
