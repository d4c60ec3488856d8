"""The draft's predictions after nodes of its tree: choices in order, given its logits, by either acceptance rule.

Under `coupled` any tree is exact: the choices are the tokens that most probably win under the session's own noise.
Under `rejection` the first choice is sampled, whatever its token, and has the distribution it was sampled from; the
others are guesses, which are followed where the target's own token equals one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider import native
from outrider.drafters.allowed import AllowedTokens
from outrider.drafters.drafter import DraftTerms, OpenProposal
from outrider.drafters.largest import largest_shares
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.parameters import AcceptanceRule
from outrider.speculation.randomness import Counter, KeyedSource, Purpose
from outrider.speculation.sampling import (
    SamplingMetadata,
    TokenHistory,
    Truncation,
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
    """Options of a drafter's trees.

    Attributes:
        max_nodes: nodes of a proposal whose request does not bound them; 0 for no bound of its own: a chain where it
            waits for verdicts.
        top_k: most likely tokens that are sampled from under `rejection`, after the request's own truncation; at least
            1. Under `coupled` no distribution crosses the wire, and an unlikely token that wins by noise is worth a row
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
        likelihood: about its probability; 0 for a sampled token, on whose value no decision may depend.
        distribution: that it was sampled from, where it was.
    """

    token_id: int
    likelihood: float = 0.0
    distribution: SparseDistribution | None = None


class Place(NamedTuple):
    """A node that was run.

    Attributes:
        path: the tokens below the session's, the node's own included.
        segment: number of the guessed node below which the drafted chain began that may go on here; `ROOT` for none.
    """

    path: tuple[int, ...]
    segment: int


class Choices(Protocol):
    """Makes the choices after nodes."""

    def after(self, places: Sequence[Place], logits: Tensor, num: int) -> list[list[Choice]]:
        """Return up to `num` choices after each place, the best first; `logits` are [F, D], over the draft's tokens.

        Where one has a distribution, it is the first, and becomes a node whatever its token.
        """


def new_choices(proposal: OpenProposal, options: TreeOptions, vocabulary: DraftVocabulary) -> Choices:
    """Return the choices for the rule by which the proposal is verified."""
    if proposal.terms.acceptance_rule is AcceptanceRule.REJECTION:
        return SampledChoices(proposal, options, vocabulary, KeyedSource(proposal.terms.parameters.seed or 0))
    return RankedChoices(proposal, options, vocabulary)


class RankedChoices:
    """The tokens that most probably win under the session's noise.

    The difference between the draft's and the target's logits is modelled as noise of the same kind as the draw's.

    Args:
        proposal: whose tokens precede the choices.
        options: of its tree.
        vocabulary: the draft's.
    """

    def __init__(self, proposal: OpenProposal, options: TreeOptions, vocabulary: DraftVocabulary) -> None:
        self._proposal = proposal
        self._vocabulary = vocabulary
        self._history = _History(proposal)
        self._is_greedy = proposal.terms.parameters.is_greedy
        self._least = options.p_min if proposal.terms.p_min is None else proposal.terms.p_min
        self._source = KeyedSource(proposal.terms.parameters.seed or 0)
        self._allowed = AllowedTokens(proposal, vocabulary.target_size)
        self._truncates = not self._is_greedy and _truncates(proposal.terms, len(vocabulary))
        self._keeps_logits = keeps_logits(proposal.terms, len(vocabulary))

    def after(self, places: Sequence[Place], logits: Tensor, num: int) -> list[list[Choice]]:
        """Return the likeliest tokens after each place.

        The first of equals is the one with the lowest id, as it is where the target draws: logits of 16 bits are often
        equal.
        """
        scores, are_possible = self._scores(logits, [place.path for place in places])
        columns, likelihoods = largest_shares(scores, min(num, scores.shape[-1]), is_softmax=not self._truncates)
        token_ids, least = self._vocabulary.listed_ids, self._least
        return [
            [
                Choice(token_ids[column], min(1.0, likelihood))
                for column, likelihood in zip(row, shares, strict=True)
                if is_possible and likelihood >= least and likelihood > 0
            ]
            for row, shares, is_possible in zip(columns.tolist(), likelihoods.tolist(), are_possible, strict=True)
        ]

    def _scores(self, logits: Tensor, paths: Sequence[tuple[int, ...]]) -> tuple[Tensor, Sequence[bool]]:
        """Return the scores by which the tokens after each path are ranked, and whether any of them is possible.

        Returns:
            Scores [F, D]: logits under greedy, else weight / noise, as where the target draws (`KeyedSource.pick`), or
            its logarithm where nothing is truncated, float32; of a path after which no token is possible, any.
        """
        if self._keeps_logits:
            return self._drawn(logits, paths), [True] * len(paths)
        terms, history = self._proposal.terms, self._history.tokens
        metadata = [
            SamplingMetadata(terms.parameters, history.extended(path), terms.stop_token_ids, allowed)
            for path, allowed in zip(paths, self._allowed.after(paths), strict=True)
        ]
        scores = self._changed(logits, metadata)
        are_possible: Sequence[bool] = [True] * len(paths)
        if any(item.allowed is not None for item in metadata):
            # The draft may predict none of the tokens that are allowed.
            finite = scores.amax(-1).isfinite()
            scores = scores.masked_fill(~finite.unsqueeze(1), 0.0)
            are_possible = finite.tolist()
        if not self._truncates:
            return self._drawn(scores, paths), are_possible
        weights = target_weights(tempered(scores, metadata), metadata)
        dense = weights.dense(scores.shape[-1]) if isinstance(weights, Support) else weights
        return dense.div_(self._noise(paths, dense.device)).float(), are_possible

    def _drawn(self, logits: Tensor, paths: Sequence[tuple[int, ...]]) -> Tensor:
        """Return logits as they are under greedy, else the logarithms of weight / noise, if nothing is truncated."""
        if self._is_greedy:
            return logits
        variant = (
            native.loaded_variant() if logits.device.type == "cpu" and logits.dtype in native.SCORE_TYPES else None
        )
        if variant is not None:
            positions = self._positions(paths)
            # Rows at one position share its noise.
            rows = {at: row for row, at in enumerate(dict.fromkeys(positions))}
            drawn: Tensor = torch.ops.outrider.drawn_scores.default(
                logits.contiguous(),
                self._vocabulary.token_ids,
                torch.tensor([(*Counter(Purpose.TARGET, at).words, *self._source.key) for at in rows]),
                [rows[at] for at in positions],
                1 / self._proposal.terms.parameters.temperature,
                int(variant),
            )
            return drawn
        # The largest is subtracted first, because a small temperature would make it infinite.
        scores = logits.float()
        scores = (scores - scores.amax(-1, keepdim=True)).div_(self._proposal.terms.parameters.temperature)
        return scores.sub_(self._noise(paths, scores.device).float().log_())

    def _positions(self, paths: Sequence[tuple[int, ...]]) -> list[int]:
        """Return the position of the token after each path."""
        return [len(self._proposal.token_ids) + len(path) for path in paths]

    def _noise(self, paths: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
        """Return the noise of the draft's tokens after each path, float64 [F, D], or [1, D] where all have the same."""
        token_ids = self._vocabulary.token_ids.to(device)
        positions = self._positions(paths)
        noise = {at: self._source.exponential(token_ids, Counter(Purpose.TARGET, at)) for at in set(positions)}
        return torch.stack([noise[at] for at in positions]) if len(noise) > 1 else noise[positions[0]][None]

    def _changed(self, logits: Tensor, terms: Sequence[SamplingMetadata]) -> Tensor:
        """Return the logits of the draft's tokens after penalties and the like, which use the target's token ids."""
        if not any(item.changes_logits or item.allowed is not None for item in terms):
            return logits
        changed = changed_logits(_spread(logits, self._vocabulary), terms)
        return changed[:, self._vocabulary.token_ids.to(changed.device)]


class SampledChoices:
    """A sampled token with its distribution, then guesses beside it, the likeliest first.

    Args:
        proposal: whose tokens precede them.
        options: of its tree.
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
        self._allowed = AllowedTokens(proposal, vocabulary.target_size)

    def after(self, places: Sequence[Place], logits: Tensor, num: int) -> list[list[Choice]]:
        """Return the sampled token and the guesses after each place.

        Neither order nor admission may depend on a sampled token: one that is withheld for its value changes the
        output's distribution. So it has no likelihood.
        """
        masks = self._allowed.after([place.path for place in places])
        rows = _spread(logits, self._vocabulary)
        return [self._choices(*parts, num) for parts in zip(places, rows, masks, strict=True)]

    def _choices(self, place: Place, row: Tensor, allowed: Tensor | None, num: int) -> list[Choice]:
        terms = self._proposal.terms
        history, position = self._history.tokens.extended(place.path), len(self._proposal.token_ids) + len(place.path)
        inputs = SamplingMetadata(terms.parameters, history, terms.stop_token_ids, allowed)
        if allowed is not None and not changed_logits(row.unsqueeze(0), [inputs]).isfinite().any():
            return []  # the draft cannot predict any of the tokens that are allowed
        distribution = target_distribution(row, inputs)
        kept = keep_top(distribution, self._top_k)
        token_id = draft_rejection(kept, self._proposal.root_len, position, self._source, place.segment)
        sampled = Choice(token_id, distribution=sparse(kept))
        if num == 1:
            return [sampled]
        weights, others = kept.topk(min(num, kept.numel()))
        guesses = [
            Choice(other, weight)
            for weight, other in zip(weights.tolist(), others.tolist(), strict=True)
            if weight > 0 and other != token_id
        ]
        return [sampled, *guesses[: num - 1]]


class _History:
    """The session's tokens as penalties need them; they are counted once for each length of the session.

    Args:
        proposal: whose session it is.
    """

    def __init__(self, proposal: OpenProposal) -> None:
        self._proposal = proposal
        self._known: tuple[int, TokenHistory] | None = None

    @property
    def tokens(self) -> TokenHistory:
        """The tokens; where no parameter needs them, only their number."""
        length = len(self._proposal.token_ids)
        if self._known is None or self._known[0] != length:
            self._known = length, self._made()
        return self._known[1]

    def _made(self) -> TokenHistory:
        terms, token_ids = self._proposal.terms, self._proposal.token_ids
        if terms.parameters.needs_history:
            return TokenHistory(token_ids[: terms.prompt_len], token_ids[terms.prompt_len :], terms.parameters)
        return TokenHistory((), range(len(token_ids) - terms.prompt_len), terms.parameters)


def keeps_logits(terms: DraftTerms, vocabulary_size: int) -> bool:
    """Return whether the choices under `coupled` follow from the logits as they are, the temperature and the noise."""
    truncates = not terms.parameters.is_greedy and _truncates(terms, vocabulary_size)
    return not truncates and terms.grammar is None and _changes_nothing(terms)


def _changes_nothing(terms: DraftTerms) -> bool:
    """Whether no parameter changes the logits at any position of a request."""
    parameters = terms.parameters
    return not (parameters.min_tokens or parameters.logit_bias or parameters.needs_history)


def _truncates(terms: DraftTerms, vocabulary_size: int) -> bool:
    """Whether sampling leaves out tokens for what the others' probabilities are."""
    parameters = terms.parameters
    return Truncation.of(parameters, vocabulary_size) is not Truncation.NONE or parameters.min_p > 0


def keep_top(distribution: Tensor, num: int) -> Tensor:
    """Return the distribution given that its token is one of the `num` most likely: float64 [V], sums to 1."""
    if num >= distribution.numel():
        return distribution
    weights, token_ids = distribution.topk(num)
    return torch.zeros_like(distribution).scatter_(0, token_ids, weights / weights.sum())


def sparse(distribution: Tensor) -> SparseDistribution:
    """Return a distribution [V] by its support, with exactly its probabilities."""
    token_ids = distribution.nonzero().squeeze(1)
    return SparseDistribution(tuple(token_ids.tolist()), tuple(distribution[token_ids].tolist()))


def _spread(logits: Tensor, vocabulary: DraftVocabulary) -> Tensor:
    """Return logits over the target's vocabulary, [F, V]: minus infinity for tokens that the draft cannot predict."""
    if len(vocabulary) == vocabulary.target_size:
        return logits
    whole = torch.full((len(logits), vocabulary.target_size), -torch.inf, dtype=torch.float32, device=logits.device)
    return whole.index_copy_(1, vocabulary.token_ids.to(logits.device), logits.float())
