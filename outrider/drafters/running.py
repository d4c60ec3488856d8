"""A tree that grows ahead of the text: while a verification runs, its likely outcomes are drafted.

Of every node that the draft has run, it knows its choices for the next token, in order. Which of them become nodes is a
matter of their value alone: the product of the measured values along the path (`outrider.acceptance`), less the deeper
they are. All are made that are worth more than the least of the best `lookahead_nodes` of an endless tree. So the main
line comes first, and beside it, for each number of its tokens that the target may accept, the likeliest tokens that are
not the drafted one, fewer the deeper it is. When the text goes on along the tree, what is below gains in value, and the
tree grows on.

Under `coupled` the choices are the draft's tokens under the session's own noise. Under `rejection` the first one is
sampled and brings its law; it becomes a node as soon as its parent is run, whatever it is. The others are guesses.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from torch import Tensor

from outrider.acceptance import MAX_RANK, AcceptanceRates
from outrider.drafters.choice import keep_top, sparse
from outrider.drafters.drafter import OpenProposal
from outrider.drafters.growth import GrowthOptions, NoisyRanking, history_of, spread
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.lookahead import Candidate, Lookahead
from outrider.parameters import AcceptanceRule
from outrider.randomness import KeyedSource
from outrider.sampling import TokenHistory, target_distribution
from outrider.tokens import ROOT, NodeKind, ProposalNode, SparseDistribution
from outrider.verification import draft_rejection

MAX_WIDTH: Final = 16
"""Nodes of one session that are run in a step, at most; how many are depends on what rows cost."""
URGENCY: Final = 0.9
"""What a node is worth less for each step that it is deeper: it is needed that much later."""
_MAX_NODES_SINCE_PLANTED: Final = 16384


class RunningTree:
    """The tree of one proposal, while it lives; see the module.

    Args:
        proposal: gets the nodes.
        options: how it grows.
        vocabulary: the draft's.
        rates: measured values of this session's nodes; the tree adds to them.
    """

    def __init__(
        self, proposal: OpenProposal, options: GrowthOptions, vocabulary: DraftVocabulary, rates: AcceptanceRates
    ) -> None:
        self.proposal = self._proposal = proposal
        self._rates = rates
        self._tree = Lookahead(proposal.planted_len, rates)
        self._choices = _choices(proposal, options, vocabulary)
        self._spare: dict[int, list[_Choice]] = {}
        self._given_up: set[int] = set()
        self._least = 0.0
        self._weigh()

    @property
    def root(self) -> int:
        """Number of the node that the text has come to."""
        return self._tree.root

    @property
    def has_run_root(self) -> bool:
        """Whether it is known what the draft says behind the root."""
        return self._tree.root in self._spare or len(self._proposal.token_ids) >= self._end_len

    def is_live(self, number: int) -> bool:
        """Whether a node can still happen, or is the root."""
        return self._tree.is_live(number)

    def token_id(self, number: int) -> int:
        """Returns a live node's token."""
        return self._tree.node(number).token_id

    def parent(self, number: int) -> int:
        """Returns the number of a live node's parent."""
        return self._tree.node(number).parent

    def position(self, number: int) -> int:
        """Returns the session position of a live node's token."""
        return self._proposal.planted_len + self._tree.depth(number) - 1

    def frontier(self) -> list[Candidate]:
        """Returns the nodes that could be run next, those worth most first; none where none is worth it for now."""
        # Whatever the draft says behind a node, there is room for its first choice.
        room = self._proposal.lookahead_nodes - len(self._tree)
        return list(islice(self._unexpanded(), max(0, min(MAX_WIDTH, room))))

    @property
    def is_awaited(self) -> bool:
        """Whether the main line is shorter than the target has use of."""
        return self._tree.max_depth < self._proposal.num_speculative_tokens

    def give_up(self, number: int) -> None:
        """Learns that there is no memory to run a node; it is not wanted again before the text has gone on."""
        self._given_up.add(number)

    def expand(self, numbers: Sequence[int], logits: Tensor) -> None:
        """Takes what the draft says behind nodes that were run.

        Args:
            numbers: of the nodes.
            logits: [F, D], over the draft's vocabulary.
        """
        paths = [self._path_tokens(number) for number in numbers]
        for number, choices in zip(numbers, self._choices.rank(numbers, paths, logits), strict=True):
            self._spare[number] = choices
        self._make()

    def follow(self, token_ids: Sequence[int]) -> bool:
        """Moves the root along the text; returns whether the tree has all of it, and goes on."""
        if len(self._proposal.nodes) > _MAX_NODES_SINCE_PLANTED or not self._tree.has_path(token_ids):
            # The rates learn from it all the same.
            self._tree.follow(token_ids)
            return False
        self._tree.follow(token_ids)
        self._given_up.clear()
        self._spare = {number: spare for number, spare in self._spare.items() if self._tree.is_live(number)}
        self._weigh()
        self._make()
        return True

    def _weigh(self) -> None:
        self._least = least_value(self._rates, self._tree.root_depth, self._proposal.lookahead_nodes)

    def _make(self) -> None:
        """Makes nodes of the choices that are worth it, those worth most first."""
        values = {self._tree.root: 1.0}
        values |= {item.number: item.value for item in self._tree.candidates(1 << 30, URGENCY)}
        heap = [item for number in self._spare if (item := self._next_choice(number, values[number])) is not None]
        heapq.heapify(heap)
        room = self._proposal.lookahead_nodes - len(self._tree) - sum(self._is_must(number) for _, number in heap)
        while heap:
            value, number = heapq.heappop(heap)
            if not self._is_must(number):
                if -value < self._least or room <= 0:
                    continue
                room -= 1
            choice = self._spare[number].pop(0)
            node = ProposalNode(number, choice.token_id, choice.kind, choice.law)
            made = self._tree.add(node)
            self._choices.note(made, node)
            self._proposal.nodes.append(node)
            if (item := self._next_choice(number, values[number])) is not None:
                heapq.heappush(heap, item)

    def _is_must(self, number: int) -> bool:
        """Whether the next choice behind a node is a sampled one, which becomes a node whatever it is worth."""
        return self._spare[number][0].law is not None

    def _next_choice(self, number: int, value: float) -> tuple[float, int] | None:
        """Returns the value, negated, of the first choice behind a node that is no node yet, and the node."""
        if not self._spare[number] or self._tree.depth(number) + self._proposal.planted_len >= self._end_len:
            return None
        rank = self._tree.num_children(number) + 1
        return -value * URGENCY * self._rates.value(self._tree.depth(number) + 1, rank), number

    @property
    def _end_len(self) -> int:
        terms = self._proposal.terms
        return min(self._proposal.max_len, terms.prompt_len + terms.parameters.max_tokens)

    def _unexpanded(self) -> Iterator[Candidate]:
        for item in self._tree.candidates(1 << 30, URGENCY):
            if item.value * URGENCY * self._rates.value(self._tree.depth(item.number) + 1, 1) < self._least:
                return
            is_end = self._tree.node(item.number).token_id in self._proposal.terms.stop_token_ids
            is_last = self.position(item.number) + 1 >= self._end_len
            is_new = item.number not in self._spare and item.number not in self._given_up
            if is_new and not is_end and not is_last:
                yield item

    def _path_tokens(self, number: int) -> tuple[int, ...]:
        return tuple(self._tree.node(step).token_id for step in self._tree.path(number))


class _Choice:
    """A token that may become a node."""

    __slots__ = ("kind", "law", "token_id")

    def __init__(self, token_id: int, kind: NodeKind, law: SparseDistribution | None = None) -> None:
        self.token_id = token_id
        self.kind = kind
        self.law = law


class _Ranked:
    """Choices under `coupled`: the tokens that most probably win under the session's noise."""

    def __init__(self, proposal: OpenProposal, options: GrowthOptions, vocabulary: DraftVocabulary) -> None:
        self._ranking = NoisyRanking(proposal, vocabulary, options.p_min)

    def rank(self, numbers: Sequence[int], paths: Sequence[tuple[int, ...]], logits: Tensor) -> list[list[_Choice]]:
        """Returns the choices behind each node; `paths` are its tokens below the session's."""
        return [
            [_Choice(token_id, NodeKind.GUESSED) for token_id in row]
            for row in self._ranking.rank_tokens(logits, paths, MAX_RANK)
        ]

    def note(self, number: int, node: ProposalNode) -> None:
        """Learns that a choice has become a node."""


class _Sampled:
    """Choices under `rejection`: a sampled token with its law, and guesses."""

    def __init__(self, proposal: OpenProposal, options: GrowthOptions, vocabulary: DraftVocabulary) -> None:
        self._proposal = proposal
        self._top_k = options.top_k
        self._vocabulary = vocabulary
        self._source = KeyedSource(proposal.terms.parameters.seed or 0)
        self._segments = {ROOT: ROOT}

    def rank(self, numbers: Sequence[int], paths: Sequence[tuple[int, ...]], logits: Tensor) -> list[list[_Choice]]:
        """Returns the choices behind each node; `paths` are its tokens below the session's."""
        history = history_of(self._proposal)
        rows = spread(logits, self._vocabulary)
        return [
            self._choices(row, history.extended(path), len(self._proposal.token_ids) + len(path), number)
            for number, path, row in zip(numbers, paths, rows, strict=True)
        ]

    def note(self, number: int, node: ProposalNode) -> None:
        """Learns that a choice has become a node: a drafted one belongs to the chain of its parent."""
        self._segments[number] = self._segments[node.parent] if node.kind is NodeKind.DRAFTED else number

    def _choices(self, row: Tensor, history: TokenHistory, position: int, number: int) -> list[_Choice]:
        terms = self._proposal.terms
        law = keep_top(target_distribution(row, terms.parameters, history, terms.stop_token_ids), self._top_k)
        base_len = self._proposal.planted_len
        token_id = draft_rejection(law, base_len, position, self._source, self._segments[number])
        weights, others = law.topk(min(MAX_RANK, law.numel()))
        guesses = [
            _Choice(other, NodeKind.GUESSED)
            for weight, other in zip(weights.tolist(), others.tolist(), strict=True)
            if weight > 0 and other != token_id
        ]
        return [_Choice(token_id, NodeKind.DRAFTED, sparse(law)), *guesses]


def _choices(proposal: OpenProposal, options: GrowthOptions, vocabulary: DraftVocabulary) -> _Ranked | _Sampled:
    kind = _Sampled if proposal.terms.acceptance_rule is AcceptanceRule.REJECTION else _Ranked
    return kind(proposal, options, vocabulary)


def least_value(rates: AcceptanceRates, depth: int, num_nodes: int) -> float:
    """Returns the value of the least of the best `num_nodes` nodes of an endless tree below a depth."""
    heap = [(-URGENCY * value, 1) for value in rates.values(depth + 1)]
    heapq.heapify(heap)
    least = 1.0
    for _ in range(num_nodes):
        value, level = heapq.heappop(heap)
        least = -value
        for rate in rates.values(depth + level + 1):
            heapq.heappush(heap, (URGENCY * value * rate, level + 1))
    return least
