"""What a draft would go on with behind nodes of its tree, in order, given its logits: by either acceptance rule.

Under `coupled` any tree is exact: the choices are the tokens that most probably win under the session's own noise.
Under `rejection` the first choice is sampled, whatever it turns out to be, and brings the distribution it was sampled
from; the others are guesses, which are followed where the target's own token equals one of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.drafters.drafter import OpenProposal
from outrider.drafters.largest import largest
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.parameters import AcceptanceRule
from outrider.speculation.randomness import Counter, KeyedSource, Purpose
from outrider.speculation.sampling import (
    SamplingMetadata,
    TokenHistory,
    changed_logits,
    target_distribution,
    target_weights,
    tempered,
)
from outrider.speculation.truncation import Support
from outrider.speculation.verification import DecisionSource, draft_rejection
from outrider.tokens import SparseDistribution


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """How proposals are drafted.

    Attributes:
        max_nodes: nodes of a proposal that does not say how many it may have; 0 for no bound of its own: a chain where
            it waits for verdicts.
        top_k: most likely tokens that are sampled from under `rejection`, after the request's own truncation; at least
            1. Under `coupled` no distribution crosses the wire, and an unlikely token that wins by noise is worth a try
            (at temperature 1 a model that drafts for itself would lose a fifth of its acceptance to 64 tokens).
        p_min: under `coupled`, tokens less likely to win than this are left out.
    """

    max_nodes: int = 0
    top_k: int = 64
    p_min: float = 0.0


class Choice(NamedTuple):
    """A token that may become a node.

    Attributes:
        token_id: the token.
        likelihood: about how probable it is; 1 for a sampled token, whose value nothing may depend on.
        distribution: what it was sampled from, where it was.
    """

    token_id: int
    likelihood: float = 1.0
    distribution: SparseDistribution | None = None


class Place(NamedTuple):
    """A node that was run.

    Attributes:
        path: the tokens below the session's, the node's own included.
        segment: number of the guessed node that the drafted chain hangs from, which may go on here; `ROOT` for none.
    """

    path: tuple[int, ...]
    segment: int


class Choices(Protocol):
    """Makes the choices behind nodes."""

    def behind(self, places: Sequence[Place], logits: Tensor, num: int) -> list[list[Choice]]:
        """Returns up to `num` choices behind each place, the best first; `logits` are [F, D], over the draft's tokens.

        Where one has a distribution, it is the first, and becomes a node whatever it is.
        """


def new_choices(proposal: OpenProposal, options: TreeOptions, vocabulary: DraftVocabulary) -> Choices:
    """Returns what makes the choices by the rule that will judge the proposal."""
    if proposal.terms.acceptance_rule is AcceptanceRule.REJECTION:
        return SampledChoices(proposal, options, vocabulary, KeyedSource(proposal.terms.parameters.seed or 0))
    return RankedChoices(proposal, options, vocabulary)


class RankedChoices:
    """The tokens that most probably win under the session's noise.

    What a draft does not know of the target's logits it takes for noise of the same kind as that of the draw.

    Args:
        proposal: whose tokens precede what is ranked.
        options: how it is drafted.
        vocabulary: the draft's.
    """

    def __init__(self, proposal: OpenProposal, options: TreeOptions, vocabulary: DraftVocabulary) -> None:
        self._proposal = proposal
        self._vocabulary = vocabulary
        self._history = _History(proposal)
        p_min = options.p_min if proposal.terms.p_min is None else proposal.terms.p_min
        self._least = math.log(p_min) if p_min else -math.inf
        self._source = KeyedSource(proposal.terms.parameters.seed or 0)

    def behind(self, places: Sequence[Place], logits: Tensor, num: int) -> list[list[Choice]]:
        """Returns the likeliest tokens behind each place.

        The first of equals is the one with the lowest id, as it is where the target draws: logits of 16 bits are often
        equal.
        """
        scores = self._scores(logits, [place.path for place in places])
        values, columns = largest(scores, min(num, scores.shape[-1]))
        token_ids = self._vocabulary.token_ids.to(columns.device)[columns]
        # An only choice is compared with nothing.
        needs_norms = num > 1 or self._least > -math.inf
        logs = values - scores.float().logsumexp(-1, keepdim=True) if needs_norms else torch.zeros_like(values)
        logs = logs.where(values > -torch.inf, -torch.inf)
        return [
            [
                Choice(token_id, math.exp(min(0.0, log)))
                for token_id, log in zip(tokens, row, strict=True)
                if log >= self._least and log > -math.inf
            ]
            for tokens, row in zip(token_ids.tolist(), logs.tolist(), strict=True)
        ]

    def _scores(self, logits: Tensor, paths: Sequence[tuple[int, ...]]) -> Tensor:
        """Returns what the tokens behind each path are ranked by: [F, D], float32 or float64."""
        terms, history = self._proposal.terms, self._history.tokens
        laws = [SamplingMetadata(terms.parameters, history.extended(path), terms.stop_token_ids) for path in paths]
        scores = self._changed(logits, laws)
        if not laws[0].parameters.is_greedy:
            weights = target_weights(tempered(scores, laws), laws)
            dense = weights.dense(scores.shape[-1]) if isinstance(weights, Support) else weights
            token_ids = self._vocabulary.token_ids.to(dense.device)
            positions = [len(self._proposal.token_ids) + len(path) for path in paths]
            # Rows at one position share its noise.
            noise = {at: self._source.gumbel(token_ids, Counter(Purpose.TARGET, at)) for at in set(positions)}
            scores = dense.log() + torch.stack([noise[at] for at in positions])
        return scores

    def _changed(self, logits: Tensor, laws: Sequence[SamplingMetadata]) -> Tensor:
        """Returns the logits of the draft's tokens after penalties and the like, which name tokens of the target's."""
        if not any(law.changes_logits for law in laws):
            return logits.float()
        changed = changed_logits(_spread(logits, self._vocabulary), laws)
        return changed[:, self._vocabulary.token_ids.to(changed.device)]


class SampledChoices:
    """A sampled token with its distribution, then guesses beside it, the likeliest first.

    Args:
        proposal: whose tokens precede them.
        options: how it is drafted.
        vocabulary: the draft's.
        source: samples.
    """

    def __init__(
        self, proposal: OpenProposal, options: TreeOptions, vocabulary: DraftVocabulary, source: DecisionSource
    ) -> None:
        self._proposal = proposal
        self._top_k = options.top_k
        self._vocabulary = vocabulary
        self._history = _History(proposal)
        self._source = source

    def behind(self, places: Sequence[Place], logits: Tensor, num: int) -> list[list[Choice]]:
        """Returns the sampled token and the guesses behind each place.

        Neither order nor admission may look at what a sampled token is: one that is withheld for its value changes the
        output's distribution. So it has no likelihood.
        """
        return [
            self._choices(place, row, num) for place, row in zip(places, _spread(logits, self._vocabulary), strict=True)
        ]

    def _choices(self, place: Place, row: Tensor, num: int) -> list[Choice]:
        terms = self._proposal.terms
        history, position = self._history.tokens.extended(place.path), len(self._proposal.token_ids) + len(place.path)
        law = keep_top(target_distribution(row, terms.parameters, history, terms.stop_token_ids), self._top_k)
        token_id = draft_rejection(law, self._proposal.planted_len, position, self._source, place.segment)
        sampled = Choice(token_id, distribution=sparse(law))
        if num == 1:
            return [sampled]
        weights, others = law.topk(min(num, law.numel()))
        guesses = [
            Choice(other, weight)
            for weight, other in zip(weights.tolist(), others.tolist(), strict=True)
            if weight > 0 and other != token_id
        ]
        return [sampled, *guesses[: num - 1]]


class _History:
    """The session's tokens as penalties need them; they are gone through once while the session is no longer.

    Args:
        proposal: whose session it is.
    """

    def __init__(self, proposal: OpenProposal) -> None:
        self._proposal = proposal
        self._known: tuple[int, TokenHistory] | None = None

    @property
    def tokens(self) -> TokenHistory:
        """They; where nothing needs them, as many without looking at them."""
        length = len(self._proposal.token_ids)
        if self._known is None or self._known[0] != length:
            self._known = length, self._made()
        return self._known[1]

    def _made(self) -> TokenHistory:
        terms, token_ids = self._proposal.terms, self._proposal.token_ids
        if terms.parameters.needs_history:
            return TokenHistory(token_ids[: terms.prompt_len], token_ids[terms.prompt_len :], terms.parameters)
        return TokenHistory((), range(len(token_ids) - terms.prompt_len), terms.parameters)


def keep_top(law: Tensor, num: int) -> Tensor:
    """Returns the distribution given that its token is one of the `num` most likely: float64 [V], sums to 1."""
    if num >= law.numel():
        return law
    weights, token_ids = law.topk(num)
    return torch.zeros_like(law).scatter_(0, token_ids, weights / weights.sum())


def sparse(law: Tensor) -> SparseDistribution:
    """Returns a distribution [V] by its support, with the very probabilities it has."""
    token_ids = law.nonzero().squeeze(1)
    return SparseDistribution(tuple(token_ids.tolist()), tuple(law[token_ids].tolist()))


def _spread(logits: Tensor, vocabulary: DraftVocabulary) -> Tensor:
    """Returns logits over the target's vocabulary, [F, V]: minus infinity for what the draft cannot say."""
    if len(vocabulary) == vocabulary.target_size:
        return logits
    whole = torch.full((len(logits), vocabulary.target_size), -torch.inf, dtype=torch.float32, device=logits.device)
    return whole.index_copy_(1, vocabulary.token_ids.to(logits.device), logits.float())
