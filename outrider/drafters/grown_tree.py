"""Trees of a block head that one native operator grows to their ends, as `tree` would, but without its steps in Python.

That is possible where the choices after a node follow from logits and noise alone: under `coupled`, without penalties,
grammar, or probabilities that leave tokens out. Beside a pass of a small target the steps would take longer than the
head itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafters.choices import TreeOptions, keeps_logits
from outrider.drafters.drafter import OpenProposal
from outrider.drafters.node_values import NodeValues
from outrider.drafters.tree_bounds import TreeBounds
from outrider.lm.heads.block_passes import BlockPasses
from outrider.lm.heads.passes import variant_of
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.parameters import AcceptanceRule
from outrider.speculation.acceptance import MAX_RANK
from outrider.speculation.randomness import Counter, KeyedSource, Purpose, Word
from outrider.tokens import ROOT, NodeKind, ProposalNode


@dataclass(frozen=True, slots=True, eq=False)
class GrownTree:
    """A tree that is whole: its choices, by places from 1 on, those after one node in order.

    Attributes:
        proposal: the proposal.
        parents: the place of each choice's parent; 0 for the root.
        token_ids: the choices' tokens.
        numbers: under which they are sent; 0 for those that are not.
        likelihoods: the draft's probabilities of them.
        values: of nodes; they learn the outcome.
    """

    proposal: OpenProposal
    parents: Sequence[int]
    token_ids: Sequence[int]
    numbers: Sequence[int]
    likelihoods: Sequence[float]
    values: NodeValues

    def nodes(self) -> list[ProposalNode]:
        """Return the nodes that are sent, parents before their children."""
        sent = sorted((number, place) for place, number in enumerate(self.numbers, 1) if number)
        return [
            ProposalNode(
                self.numbers[parent - 1] if (parent := self.parents[place - 1]) else ROOT,
                self.token_ids[place - 1],
                NodeKind.GUESSED,
                likelihood=self.likelihoods[place - 1],
            )
            for _, place in sent
        ]

    def follow(self, token_ids: Sequence[int]) -> None:
        """Learn from the tokens with which the text goes on, as far as the tree has them."""
        parent = 0
        for depth, token_id in enumerate(token_ids, 1):
            num = self.parents.count(parent)
            first = self.parents.index(parent) if num else 0
            ranks = [rank for rank in range(1, num + 1) if self.token_ids[first + rank - 1] == token_id]
            self.values.observe(depth, self.likelihoods[first : first + num], ranks[0] if ranks else None)
            if not ranks:
                return
            parent = first + ranks[0]


class TreeGrower:
    """Grows trees natively; see the module.

    Args:
        passes: of the block head.
        vocabulary: the tokens that it can predict.
        options: of its trees.
        width: nodes of a session that are expanded at a time, at most.
    """

    def __init__(self, passes: BlockPasses, vocabulary: DraftVocabulary, options: TreeOptions, width: int) -> None:
        transition, embedding = passes.transition, passes.embedding
        self._passes = passes
        self._transition = transition
        self._embedding = embedding
        self._vocabulary = vocabulary
        self._options = options
        self._width = width
        products = (passes.output, transition.state, transition.token, transition.output)
        self._variant = variant_of(products) if embedding.is_contiguous() else None

    def can_grow(self, proposal: OpenProposal) -> bool:
        """Return whether a proposal's tree can be grown here."""
        terms, bounds = proposal.terms, TreeBounds(proposal, self._options.max_nodes)
        is_whole_at_once = terms.acceptance_rule is AcceptanceRule.COUPLED and bounds.waits and bounds.end_depth(0) > 0
        return self._variant is not None and is_whole_at_once and keeps_logits(terms, len(self._vocabulary))

    def grow(self, proposals: Sequence[OpenProposal], blocks: Sequence[Tensor], values: NodeValues) -> list[GrownTree]:
        """Return the trees of proposals, given the head's outputs for their blocks.

        Args:
            proposals: the proposals.
            blocks: of each the outputs of its last column and of the mask rows behind it: [K, H], one for each token of
                a path.
            values: of nodes.
        """
        assert self._variant is not None
        bounds = [TreeBounds(item, self._options.max_nodes) for item in proposals]
        terms = [item.terms for item in proposals]
        end_depths = [item.end_depth(0) for item in bounds]
        counters, first_counters = _counters(proposals, end_depths)
        choices, likelihoods, counts = torch.ops.outrider.head_trees.default(
            blocks[0] if len(blocks) == 1 else torch.cat(list(blocks)),
            [len(block) for block in blocks],
            [item.token_ids[-1] for item in proposals],
            self._passes.norm.weight,
            self._passes.norm.eps,
            self._passes.output.tensors,
            self._transition.state.tensors,
            self._transition.token.tensors,
            self._transition.output.tensors,
            self._transition.rank,
            self._embedding,
            self._vocabulary.token_ids,
            [item.num_nodes for item in bounds],
            end_depths,
            [1 if item.is_chain else MAX_RANK for item in bounds],
            [self._options.p_min if item.p_min is None else item.p_min for item in terms],
            [1.0 if item.parameters.is_greedy else 1 / item.parameters.temperature for item in terms],
            first_counters,
            counters,
            [token_id for item in terms for token_id in item.stop_token_ids],
            [len(item.stop_token_ids) for item in terms],
            values.numbers(max(end_depths)),
            MAX_RANK,
            self._width,
            self._variant,
        )
        parents, token_ids, numbers = choices.tolist()
        shares, trees, first = likelihoods.tolist(), [], 0
        for item, num in zip(proposals, counts.tolist(), strict=True):
            own = slice(first, first + num)
            trees.append(GrownTree(item, parents[own], token_ids[own], numbers[own], shares[own], values))
            first += num
        return trees


def _counters(proposals: Sequence[OpenProposal], end_depths: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return the counters of the positions of blocks, int64 [C, 5], and each one's first; -1 where it is greedy."""
    rows: list[tuple[Word, ...]] = []
    firsts = []
    for item, num in zip(proposals, end_depths, strict=True):
        parameters, start = item.terms.parameters, len(item.token_ids)
        firsts.append(-1 if parameters.is_greedy else len(rows))
        if not parameters.is_greedy:
            key = KeyedSource(parameters.seed or 0).key
            _, base_len, purpose = Counter(Purpose.TARGET, 0).words
            rows += [(start + depth, base_len, purpose, *key) for depth in range(num)]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 5), firsts
