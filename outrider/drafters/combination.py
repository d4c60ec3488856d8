"""A proposal of two drafters and its parts; see `combined`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from outrider.drafters.combined_tree import CombinedNode, CombinedTree
from outrider.drafters.combined_worth import Found
from outrider.drafters.drafter import OpenProposal
from outrider.parameters import AcceptanceRule

_NOTHING: Final = Found()


@dataclass(slots=True, eq=False)
class Combination:
    """A proposal and its parts.

    Attributes:
        proposal: that is made of them.
        main: that of the model.
        found: that of `suffix`, for the present round.
        tree: the nodes of both.
        numbered: nodes of the model's proposal, by their numbers there.
        uses_main: whether the model drafts in this round; None until that is decided.
        has_guesses: whether anything that was found was added to the tree.
        is_timed: whether the model's steps in this round were those of nodes alone, without a wait for features.
        worth: of what was found in this round.
        begun_at: monotonic time at which the model began to draft in this round; 0 before.
        completed_at: monotonic time at which the proposal of this round was whole; 0 before.
    """

    proposal: OpenProposal
    main: OpenProposal
    found: OpenProposal
    tree: CombinedTree
    numbered: list[CombinedNode]
    uses_main: bool | None = None
    has_guesses: bool = False
    is_timed: bool = True
    worth: Found = _NOTHING
    begun_at: float = 0.0
    completed_at: float = 0.0

    @property
    def is_coupled(self) -> bool:
        """Whether any tree is exact."""
        return self.proposal.terms.acceptance_rule is AcceptanceRule.COUPLED

    @property
    def runs_ahead(self) -> bool:
        """Whether the model drafts ahead of the target's verdicts."""
        return self.proposal.lookahead > 0

    @property
    def main_goes_on(self) -> bool:
        """Whether a step may advance the model's proposal."""
        return self.uses_main is not False and not self.main.complete

    @property
    def is_chain(self) -> bool:
        """Whether the request has a node followed by one at most."""
        return 0 < self.proposal.max_nodes <= self.proposal.num_speculative_tokens

    def set_sizes(self) -> None:
        """Give the parts the sizes of the proposal; of the nodes ahead of the text some are left to what is found."""
        whole, main = self.proposal, self.main
        num = main.num_speculative_tokens = whole.num_speculative_tokens
        main.max_nodes, main.lookahead = whole.max_nodes, whole.lookahead
        if self.is_coupled and self.runs_ahead:
            main.lookahead -= min(num, whole.lookahead // 2)


def num_proposed(name: str, drafters: Sequence[tuple[str, ...]]) -> int:
    """Return how many tokens a drafter has proposed before the first that it has not."""
    return sum(1 for _ in takewhile(lambda names: name in names, drafters))


def part_of(proposal: OpenProposal) -> OpenProposal:
    """Return a proposal for the same text, which waits for verdicts."""
    return OpenProposal(
        proposal.session_id,
        proposal.token_ids,
        proposal.terms,
        proposal.num_speculative_tokens,
        proposal.max_nodes,
        max_len=proposal.max_len,
    )
