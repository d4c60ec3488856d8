"""The acceptance rules: which proposed tokens are kept, and what the target says in place of the first that is not.

`coupled` (Daliri et al. 2024, drafter-invariant speculative decoding): the target draws its own token with the noise of the
session position; a proposed token is accepted iff it is that token. Exact for any tree, however it was made.

`rejection` (Leviathan et al. 2023, Chen et al. 2023), as block verification (Sun et al. 2024): drafted chains are accepted so
that accepted and recovered tokens together follow the target's law; the draft must report the law it sampled from.

Both decide only through a `DecisionSource`, so that the proof of exactness runs this very code with a source that
follows every outcome with its weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.randomness import Counter, KeyedSource, Purpose
from outrider.tokens import ROOT, NodeKind, ProposalTree, SparseDistribution, TokenOrigin

TargetLaw = Callable[[int], torch.Tensor]
"""Gives the target's law, float64 [V] with sum 1, of the token that follows a node; `ROOT` is the committed text."""


class DecisionSource(Protocol):
    """The two ways in which a rule may be random."""

    def pick(self, weights: torch.Tensor, counter: Counter) -> int:
        """Returns a token with probability proportional to its weight, float64 [V]."""

    def accept(self, probability: float, counter: Counter) -> bool:
        """Returns True with that probability."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round gave: accepted tokens, then one of the target's own.

    Attributes:
        token_ids: at positions base_len, base_len + 1, ...; one more than `path` has nodes.
        origins: how each came to be.
        path: the accepted nodes, from a child of the root downwards.
    """

    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    path: tuple[int, ...]


def verify_coupled(tree: ProposalTree, law: TargetLaw, base_len: int, source: DecisionSource) -> Outcome:
    """Follows the target's own draws down the tree; `base_len` is the session position of the first one."""
    path: list[int] = []
    token_ids: list[int] = []
    number = ROOT
    while True:
        position = base_len + len(token_ids)
        token_ids.append(source.pick(law(number), Counter(Purpose.TARGET, position)))
        child = tree.child(number, token_ids[-1])
        if child is None:
            return _outcome(tree, path, token_ids)
        path.append(child)
        number = child


def verify_rejection(tree: ProposalTree, law: TargetLaw, base_len: int, source: DecisionSource) -> Outcome:
    """Verifies the drafted chain below the root as a block, and goes on below a guessed child that the target confirms.

    A guessed child (or a drafted one without its law) is followed only when the target's own recovered or bonus token
    equals it, so it cannot change the law. The chain below it is verified anew, under counters of its own.
    """
    path: list[int] = []
    token_ids: list[int] = []
    number = ROOT
    for segment in range(len(tree) + 1):
        nodes = _drafted_chain(tree, number)
        accepted, weights = _verify_block(tree, [number, *nodes], law, (base_len, len(token_ids), segment), source)
        path += nodes[:accepted]
        token_ids += [tree.node(node).token_id for node in nodes[:accepted]]
        number = path[-1] if path else ROOT
        position = base_len + len(token_ids)
        token_ids.append(source.pick(weights, Counter(Purpose.RESIDUAL, position, base_len, segment)))
        child = tree.child(number, token_ids[-1])
        if child is None or _is_drafted(tree, child):
            break
        path.append(child)
        number = child
    return _outcome(tree, path, token_ids)


def residual_distribution(target: torch.Tensor, draft: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Returns the law of the token that replaces a rejected one: norm(max(scale * target - draft, 0)).

    With scale 1 it is Leviathan et al. 2023, Alg. 1, so that accepted and recovered tokens together follow the target; with
    the block's running acceptance as scale, Sun et al. 2024, Alg. 2. Where rounding leaves it no mass, target and
    draft agree to the last bits and it is asked for with a probability of that order: the target's own law stands in.

    Args:
        target: float64 [V], sums to 1.
        draft: float64 [V], sums to 1.
        scale: in [0, 1].
    """
    excess = (scale * target - draft).clamp_(min=0)
    mass = excess.sum()
    return excess / mass if mass > 0 else target


def draft_coupled(law: torch.Tensor, position: int, source: DecisionSource) -> int:
    """Returns the draft's guess at the target's token: its own draw, law float64 [V], under the same noise."""
    return source.pick(law, Counter(Purpose.TARGET, position))


def rank_coupled(law: torch.Tensor, position: int, source: KeyedSource, num: int) -> list[int]:
    """Returns the draft's best guesses at the target's token under the same noise, best first; at most `num`."""
    return source.rank(law, Counter(Purpose.TARGET, position), num)


def draft_rejection(law: torch.Tensor, base_len: int, position: int, source: DecisionSource) -> int:
    """Returns a token sampled from the draft's law, float64 [V], with noise that decides nothing else."""
    return source.pick(law, Counter(Purpose.DRAFT, position, base_len))


def _verify_block(
    tree: ProposalTree, nodes: list[int], law: TargetLaw, place: tuple[int, int, int], source: DecisionSource
) -> tuple[int, torch.Tensor]:
    """Returns how many of a chain's drafted nodes are accepted, and the law of the token after them.

    Sun et al. 2024, Alg. 2. There M_b is the target, M_s the draft, and p_i the running acceptance; a later node that is
    accepted takes all before it along, which is what makes blocks better than judging token by token.

    Args:
        tree: has the chain.
        nodes: the node the chain hangs from, then its drafted nodes.
        law: the target's.
        place: base_len, tokens output before this chain, segment.
        source: decides.
    """
    base_len, num_before, segment = place
    targets = [law(node) for node in nodes]
    drafts = [_dense(tree.node(node).draft_distribution, targets[0]) for node in nodes[1:]]
    accepted, kept_scale, scale = 0, 1.0, 1.0
    for i, node in enumerate(nodes[1:], start=1):
        token_id = tree.node(node).token_id
        scale = min(1.0, scale * float(targets[i - 1][token_id]) / float(drafts[i - 1][token_id]))
        probability = scale if i == len(drafts) else _block_acceptance(targets[i], drafts[i], scale)
        if source.accept(probability, Counter(Purpose.ACCEPT, base_len + num_before + i - 1, base_len, segment)):
            accepted, kept_scale = i, scale
    if accepted == len(drafts):
        return accepted, targets[accepted]
    return accepted, residual_distribution(targets[accepted], drafts[accepted], kept_scale)


def _block_acceptance(target: torch.Tensor, draft: torch.Tensor, scale: float) -> float:
    """Returns h_i of Sun et al. 2024, Eq. 4; 1 where target and draft agree, as stopping there has no probability."""
    mass = float((scale * target - draft).clamp_(min=0).sum())
    return 1.0 if mass + 1 - scale == 0 else mass / (mass + 1 - scale)


def _drafted_chain(tree: ProposalTree, number: int) -> list[int]:
    nodes: list[int] = []
    child = tree.drafted_child(number)
    while child is not None and _is_drafted(tree, child):
        nodes.append(child)
        child = tree.drafted_child(child)
    return nodes


def _is_drafted(tree: ProposalTree, number: int) -> bool:
    node = tree.node(number)
    return node.kind is NodeKind.DRAFTED and node.draft_distribution is not None


def _dense(sparse: SparseDistribution | None, like: torch.Tensor) -> torch.Tensor:
    if sparse is None:
        raise ValueError("a drafted node has no draft_distribution")
    dense = torch.zeros_like(like)
    dense[list(sparse.token_ids)] = like.new_tensor(sparse.probabilities)
    return dense


def _outcome(tree: ProposalTree, path: list[int], token_ids: list[int]) -> Outcome:
    last = path[-1] if path else ROOT
    own = TokenOrigin.RECOVERED if tree.children(last) else TokenOrigin.BONUS
    return Outcome(tuple(token_ids), (*[TokenOrigin.ACCEPTED] * len(path), own), tuple(path))
