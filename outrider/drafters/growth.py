"""How a proposal grows from a draft's logits, under either acceptance rule.

Under `coupled` any tree is exact: the likeliest tokens under the session's own noise, by `TreeSearch`. Under
`rejection` the main line is sampled, token by token, whatever it turns out to be, and only then come guesses beside it,
which are followed where the target's own token equals one of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.drafters.choice import keep_top, sparse
from outrider.drafters.drafter import OpenProposal
from outrider.drafters.largest import largest
from outrider.drafters.search import MAX_BRANCHING, TreeSearch
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.parameters import AcceptanceRule
from outrider.randomness import Counter, KeyedSource, Purpose
from outrider.sampling import LawTerms, TokenHistory, changed_logits, target_distribution, target_weights, tempered
from outrider.tokens import ROOT, NodeKind, ProposalNode
from outrider.truncation import Support
from outrider.verification import draft_rejection


@dataclass(frozen=True, slots=True)
class GrowthOptions:
    """How proposals grow.

    Attributes:
        max_nodes: nodes of a proposal that does not say how many it may have; 0 for a chain.
        top_k: as in `ChoiceOptions`.
        p_min: under `coupled`, tokens less likely than this, by the draft's law and the session's noise, are left out.
    """

    max_nodes: int = 0
    top_k: int = 64
    p_min: float = 0.0


class Growth(Protocol):
    """A proposal while it grows; its nodes are numbered by the growth, `ROOT` is the base."""

    @property
    def frontier(self) -> Sequence[int]:
        """Nodes whose logits are wanted next; none once all is found."""

    def token_id(self, number: int) -> int:
        """Returns a node's token."""

    def parent(self, number: int) -> int:
        """Returns the number of a node's parent."""

    def grow(self, logits: Tensor) -> None:
        """Takes the logits behind each node of the frontier, [F, D] over the draft's vocabulary, and goes on."""

    def nodes(self) -> list[ProposalNode]:
        """Returns the proposal's nodes, once the frontier is empty."""


def new_growth(proposal: OpenProposal, options: GrowthOptions, vocabulary: DraftVocabulary) -> Growth:
    """Returns what grows a proposal by the rule that will judge it."""
    if proposal.terms.acceptance_rule is AcceptanceRule.REJECTION:
        return SampledGrowth(proposal, options, vocabulary)
    return RankedGrowth(proposal, options, vocabulary)


def num_nodes(proposal: OpenProposal, options: GrowthOptions) -> int:
    """Returns the most nodes that a proposal may have."""
    return proposal.max_nodes or max(options.max_nodes, proposal.num_speculative_tokens)


class RankedGrowth:
    """A tree of the tokens that most probably win under the session's noise; see `Growth`."""

    def __init__(self, proposal: OpenProposal, options: GrowthOptions, vocabulary: DraftVocabulary) -> None:
        terms = proposal.terms
        self._search = TreeSearch(proposal.num_speculative_tokens, num_nodes(proposal, options), terms.stop_token_ids)
        self._ranking = NoisyRanking(proposal, vocabulary, options.p_min)

    @property
    def frontier(self) -> Sequence[int]:
        """Nodes whose logits are wanted next."""
        return self._search.frontier

    def token_id(self, number: int) -> int:
        """Returns a node's token."""
        return self._search.token_id(number)

    def parent(self, number: int) -> int:
        """Returns the number of a node's parent."""
        return self._search.parent(number)

    def grow(self, logits: Tensor) -> None:
        """Expands the frontier by the likeliest tokens behind each node."""
        paths = [self._search.path(number) for number in self._search.frontier]
        self._search.expand(self._ranking.rank(logits, paths, self._search.branching))

    def nodes(self) -> list[ProposalNode]:
        """Returns the tree."""
        return self._search.nodes()


class NoisyRanking:
    """Ranks tokens by how probably they win under the session's noise.

    What a draft does not know of the target's logits it takes for noise of the same kind as that of the draw.

    Args:
        proposal: whose tokens precede what is ranked.
        vocabulary: the draft's.
        p_min: tokens less likely than this are left out.
    """

    def __init__(self, proposal: OpenProposal, vocabulary: DraftVocabulary, p_min: float) -> None:
        self._proposal = proposal
        self._vocabulary = vocabulary
        p_min = p_min if proposal.terms.p_min is None else proposal.terms.p_min
        self._least = math.log(p_min) if p_min else -math.inf
        self._source = KeyedSource(proposal.terms.parameters.seed or 0)

    def rank(self, logits: Tensor, paths: Sequence[tuple[int, ...]], num: int) -> list[list[tuple[int, float]]]:
        """Returns the likeliest tokens behind each path, with the logarithms of about how probable they are.

        The first of equals is the one with the lowest id, as it is where the target draws: logits of 16 bits are often
        equal.

        Args:
            logits: [F, D], over the draft's vocabulary.
            paths: of each row, the tokens below the session's.
            num: tokens of each, at most.
        """
        scores = self._scores(logits, paths)
        return self._ranked(scores, scores.float().logsumexp(-1, keepdim=True), num)

    def rank_tokens(self, logits: Tensor, paths: Sequence[tuple[int, ...]], num: int) -> list[list[int]]:
        """Returns the tokens that `rank` would, in less time where no token is too unlikely."""
        scores = self._scores(logits, paths)
        norms = scores.float().logsumexp(-1, keepdim=True) if self._least > -math.inf else scores.new_zeros(())
        return [[token_id for token_id, _ in row] for row in self._ranked(scores, norms, num)]

    def _ranked(self, scores: Tensor, norms: Tensor, num: int) -> list[list[tuple[int, float]]]:
        """Returns the tokens of the largest scores [F, D], each with its score less the row's norm [F, 1]."""
        values, places = largest(scores, min(num, scores.shape[-1]))
        token_ids = self._vocabulary.token_ids.to(places.device)[places]
        return [
            [
                (token_id, log)
                for token_id, log in zip(tokens, row, strict=True)
                if log >= self._least and log > -math.inf
            ]
            for tokens, row in zip(token_ids.tolist(), (values - norms).tolist(), strict=True)
        ]

    def _scores(self, logits: Tensor, paths: Sequence[tuple[int, ...]]) -> Tensor:
        """Returns what the tokens behind each path are ranked by: [F, D], float32 or float64."""
        terms, history = self._proposal.terms, history_of(self._proposal)
        laws = [LawTerms(terms.parameters, history.extended(path), terms.stop_token_ids) for path in paths]
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

    def _changed(self, logits: Tensor, laws: Sequence[LawTerms]) -> Tensor:
        """Returns the logits of the draft's tokens after penalties and the like, which name tokens of the target's."""
        if not any(law.changes_logits for law in laws):
            return logits.float()
        changed = changed_logits(spread(logits, self._vocabulary), laws)
        return changed[:, self._vocabulary.token_ids.to(changed.device)]


class SampledGrowth:
    """A sampled main line with guesses beside it; see `Growth`."""

    def __init__(self, proposal: OpenProposal, options: GrowthOptions, vocabulary: DraftVocabulary) -> None:
        self.frontier: list[int] = [ROOT]
        self._proposal = proposal
        self._vocabulary = vocabulary
        self._top_k = options.top_k
        self._most = num_nodes(proposal, options)
        self._history = history_of(proposal)
        self._source = KeyedSource(proposal.terms.parameters.seed or 0)
        self._line: list[ProposalNode] = []
        self._guesses: list[tuple[float, int, int]] = []
        self._reached = 1.0

    def token_id(self, number: int) -> int:
        """Returns a node's token."""
        return self._line[number - 1].token_id

    def parent(self, number: int) -> int:
        """Returns the number of a node's parent."""
        return number - 1

    def grow(self, logits: Tensor) -> None:
        """Samples the next token of the main line."""
        proposal, terms, number = self._proposal, self._proposal.terms, len(self._line)
        law = target_distribution(
            spread(logits, self._vocabulary)[0], terms.parameters, self._history, terms.stop_token_ids
        )
        law = keep_top(law, self._top_k)
        base_len = len(proposal.token_ids)
        token_id = draft_rejection(law, base_len, base_len + number, self._source)
        self._line.append(ProposalNode(number, token_id, NodeKind.DRAFTED, sparse(law)))
        self._note_guesses(law, token_id, number)
        self._history = self._history.extended([token_id])
        # Whether the line goes on may depend on what it has, never on the token that would come.
        full = len(self._line) >= min(proposal.num_speculative_tokens, self._most)
        self.frontier = [] if full or token_id in terms.stop_token_ids else [len(self._line)]

    def nodes(self) -> list[ProposalNode]:
        """Returns the main line, then the likeliest guesses."""
        room = max(0, self._most - len(self._line))
        likeliest = sorted(self._guesses, key=lambda guess: -guess[0])[:room]
        return self._line + [ProposalNode(parent, token_id, NodeKind.GUESSED) for _, parent, token_id in likeliest]

    def _note_guesses(self, law: Tensor, token_id: int, number: int) -> None:
        if self._most <= self._proposal.num_speculative_tokens:
            return
        weights, token_ids = law.topk(min(MAX_BRANCHING, law.numel()))
        self._guesses += [
            (self._reached * weight, number, guess)
            for weight, guess in zip(weights.tolist(), token_ids.tolist(), strict=True)
            if weight > 0 and guess != token_id
        ]
        self._reached *= float(law[token_id])


def history_of(proposal: OpenProposal) -> TokenHistory:
    """Returns the session's tokens as penalties need them; where there are none, as many without looking at them."""
    terms, token_ids = proposal.terms, proposal.token_ids
    if terms.parameters.needs_history:
        return TokenHistory(token_ids[: terms.prompt_len], token_ids[terms.prompt_len :], terms.parameters)
    return TokenHistory((), range(len(token_ids) - terms.prompt_len), terms.parameters)


def spread(logits: Tensor, vocabulary: DraftVocabulary) -> Tensor:
    """Returns logits over the target's vocabulary, [F, V]: minus infinity for what the draft cannot say."""
    if len(vocabulary) == vocabulary.target_size:
        return logits
    whole = torch.full((len(logits), vocabulary.target_size), -torch.inf, dtype=torch.float32, device=logits.device)
    return whole.index_copy_(1, vocabulary.token_ids.to(logits.device), logits.float())
