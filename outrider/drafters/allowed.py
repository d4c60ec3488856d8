"""The tokens that a session's constraint allows after nodes of its tree: no others are worth drafting."""

from collections.abc import Sequence

from torch import Tensor

from outrider.drafters.drafter import OpenProposal
from outrider.errors import OutriderError
from outrider.grammar.masks import MatchedTree, node_masks
from outrider.grammar.matcher import OutputMatcher
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree


class AllowedTokens:
    """Follows the text of a proposal's session. Where the constraint is not compiled yet, or fails, it allows all.

    Args:
        proposal: whose session it is.
        vocabulary_size: V, of the target.
    """

    def __init__(self, proposal: OpenProposal, vocabulary_size: int) -> None:
        self._proposal = proposal
        self._vocabulary_size = vocabulary_size
        self._matcher: OutputMatcher | None = None
        self._has_failed = False

    def after(self, paths: Sequence[tuple[int, ...]]) -> Sequence[Tensor | None]:
        """Return the masks after the text and each of these tokens below it: int32 [V / 32, rounded up]; None for all.

        A path that is not allowed itself has a mask without any token.
        """
        grammar = self._proposal.terms.grammar
        if grammar is None or not grammar.is_ready or self._has_failed:
            return [None] * len(paths)
        try:
            if self._matcher is None:
                self._matcher = OutputMatcher(grammar.matcher)
            self._matcher.follow(self._proposal.token_ids[self._proposal.terms.prompt_len :])
            tree, numbers = _joined(paths)
            [masks] = node_masks([MatchedTree(self._matcher, tree)], self._vocabulary_size)
        except OutriderError:
            # The target says so itself, and the proposal is exact without a mask.
            self._has_failed = True
            return [None] * len(paths)
        return [masks[number] for number in numbers]


def _joined(paths: Sequence[tuple[int, ...]]) -> tuple[ProposalTree, list[int]]:
    """Return the tree of some paths, and the number at which each ends."""
    tree, numbers = ProposalTree(), []
    for path in paths:
        number = ROOT
        for token_id in path:
            child = tree.child(number, token_id)
            number = tree.append(ProposalNode(number, token_id, NodeKind.GUESSED)) if child is None else child
        numbers.append(number)
    return tree, numbers
