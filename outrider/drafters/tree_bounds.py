"""What bounds a proposal's tree: the request, its drafter, and where the text ends."""

from dataclasses import dataclass

from outrider.drafters.drafter import OpenProposal


@dataclass(frozen=True, slots=True)
class TreeBounds:
    """The bounds of one proposal's tree, which follow the proposal as it goes on.

    Attributes:
        proposal: the proposal.
        max_nodes: nodes of a proposal whose request does not bound them; 0 for no bound of the drafter's own.
    """

    proposal: OpenProposal
    max_nodes: int

    @property
    def waits(self) -> bool:
        """Whether the tree waits for verdicts."""
        return not self.proposal.lookahead

    @property
    def is_chain(self) -> bool:
        """Whether nodes have one child at most."""
        # Where neither request nor drafter bounds a proposal, one that waits is as large as one path of a round.
        return self._given <= self.proposal.num_speculative_tokens and (self.waits or self._given > 0)

    @property
    def num_nodes(self) -> int:
        """Most nodes that are live at a time."""
        item, given = self.proposal, self._given
        if self.waits:
            return given or item.num_speculative_tokens
        return min(given, item.lookahead) if given else item.lookahead

    @property
    def end_len(self) -> int:
        """Tokens of the session where its text ends."""
        terms = self.proposal.terms
        return min(self.proposal.max_len, terms.prompt_len + terms.parameters.max_tokens)

    def end_depth(self, root_depth: int) -> int:
        """Return the depth of nodes after which no choice may become one, given the depth of the root."""
        end = self.end_len - self.proposal.root_len
        return min(end, root_depth + self.proposal.num_speculative_tokens) if self.waits else end

    @property
    def _given(self) -> int:
        """Bound on the nodes by the request or the drafter; 0 where neither has one."""
        item = self.proposal
        return item.max_nodes or (max(self.max_nodes, item.num_speculative_tokens) if self.max_nodes else 0)
