"""Which token a draft model proposes next, given its logits."""

from dataclasses import dataclass

import torch

from outrider.drafters.drafter import OpenProposal
from outrider.parameters import AcceptanceRule
from outrider.randomness import KeyedSource
from outrider.sampling import TokenHistory, target_distribution
from outrider.tokens import SparseDistribution
from outrider.verification import draft_coupled, draft_rejection


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """How nodes are chosen.

    Attributes:
        top_k: most likely tokens that are sampled from under `rejection`, after the request's own truncation; at least
            1. Under `coupled` nothing of the law crosses the wire, and an unlikely token that wins by noise is worth
            a try (at temperature 1 a model that drafts for itself would lose a fifth of its acceptance to 64 tokens).
        p_min: the proposal ends before a token to which the model's raw logits give less; 0 for never.
    """

    top_k: int
    p_min: float


def choose(
    logits: torch.Tensor, proposal: OpenProposal, history: TokenHistory, options: ChoiceOptions
) -> tuple[int, SparseDistribution | None] | None:
    """Returns the proposal's next token, under `rejection` with the law it was drawn from; None where it better ends.

    Args:
        logits: [V], which follow the proposal's last token.
        proposal: incomplete.
        history: the tokens of session and proposal.
        options: see there.
    """
    terms = proposal.terms
    source = KeyedSource(terms.parameters.seed or 0)
    law = target_distribution(logits, terms.parameters, history, terms.stop_token_ids)
    if terms.acceptance_rule is AcceptanceRule.REJECTION:
        law = keep_top(law, options.top_k)
        # No threshold here: a node withheld for its value would change the output's law.
        return draft_rejection(law, len(proposal.token_ids), proposal.len, source), sparse(law)
    token_id = draft_coupled(law, proposal.len, source)
    p_min = options.p_min if terms.p_min is None else terms.p_min
    if p_min > 0 and float(logits.double().softmax(-1)[token_id]) < p_min:
        return None
    return token_id, None


def keep_top(law: torch.Tensor, num: int) -> torch.Tensor:
    """Returns the law given that its token is one of the `num` most likely: float64 [V], sums to 1."""
    if num >= law.numel():
        return law
    weights, token_ids = law.topk(num)
    return torch.zeros_like(law).scatter_(0, token_ids, weights / weights.sum())


def sparse(law: torch.Tensor) -> SparseDistribution:
    """Returns a law [V] by its support, with the very probabilities it has."""
    token_ids = law.nonzero().squeeze(1)
    return SparseDistribution(tuple(token_ids.tolist()), tuple(law[token_ids].tolist()))
