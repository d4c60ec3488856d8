"""Tokenwise rejection sampling (Leviathan et al. 2023, Alg. 1), for comparison and for known wrong rules."""

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.speculation.randomness import Counter, Purpose
from outrider.speculation.verification import DecisionSource, Outcome, TargetDistributions, residual_distribution
from outrider.tokens import ROOT, ProposalTree, TokenOrigin

Acceptance = Callable[[Tensor, Tensor, int], float]
"""Maps the target's distribution, the draft's, and the drafted token to the acceptance probability."""

Replacement = Callable[[Tensor, Tensor], Tensor]
"""Maps the target's and the draft's distribution to the distribution of the recovered token."""


def ratio(target: Tensor, draft: Tensor, token_id: int) -> float:
    return min(1.0, float(target[token_id]) / float(draft[token_id]))


def verify_tokenwise(
    tree: ProposalTree,
    distribution_after: TargetDistributions,
    base_len: int,
    source: DecisionSource,
    acceptance: Acceptance = ratio,
    replacement: Replacement = residual_distribution,
) -> Outcome:
    """Verify the drafted chain below the root; guessed nodes are ignored."""
    path: list[int] = []
    while True:
        number = path[-1] if path else ROOT
        position = base_len + len(path)
        weights = distribution_after(number)
        child = tree.drafted_child(number)
        sparse = tree.node(child).draft_distribution if child is not None else None
        if child is None or sparse is None:
            return _outcome(tree, path, source.pick(weights, Counter(Purpose.RESIDUAL, position, base_len)))
        draft = torch.zeros_like(weights)
        draft[list(sparse.token_ids)] = torch.tensor(sparse.probabilities, dtype=torch.float64)
        probability = acceptance(weights, draft, tree.node(child).token_id)
        if not source.accept(probability, Counter(Purpose.ACCEPT, position, base_len)):
            own = source.pick(replacement(weights, draft), Counter(Purpose.RESIDUAL, position, base_len))
            return _outcome(tree, path, own)
        path.append(child)


def _outcome(tree: ProposalTree, path: list[int], own: int) -> Outcome:
    token_ids = (*(tree.node(number).token_id for number in path), own)
    return Outcome(token_ids, (*[TokenOrigin.ACCEPTED] * len(path), TokenOrigin.RECOVERED), tuple(path))
