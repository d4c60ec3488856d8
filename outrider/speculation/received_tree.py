"""The nodes that a draft has sent ahead of a request's text, and the part of them that a round may verify."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from outrider.errors import InvalidArgument
from outrider.parameters import AcceptanceRule
from outrider.speculation.acceptance import AcceptanceRates
from outrider.speculation.proposal_tree import Candidate, Lookahead
from outrider.tokens import MAX_PROPOSAL_NODES, NodeKind, ProposalPart, ProposalTree


class ReceivedTree:
    """A proposal as far as it has arrived. All lengths are the session's, in tokens.

    Args:
        rule: judges proposals.
        rates: learn which choices of the draft are accepted.

    Attributes:
        complete_len: length of the session for which the draft will send no more nodes; -1 where there is none.
    """

    def __init__(self, rule: AcceptanceRule, rates: AcceptanceRates) -> None:
        self._rule = rule
        self._rates = rates
        self._lookahead = Lookahead(0, rates)
        self.complete_len = -1

    @property
    def is_caught_up(self) -> bool:
        """Whether the last token of the text is among the nodes that have arrived, or is their root."""
        return self._lookahead.is_caught_up and self._lookahead.num_numbered > 0

    @property
    def depth(self) -> int:
        """Length of the longest path that continues the text."""
        return self._lookahead.max_depth if self._lookahead.is_caught_up else 0

    @property
    def root_depth(self) -> int:
        """Tokens of the text that follow the length under which the tree was rooted, along its nodes."""
        return self._lookahead.root_depth

    @property
    def root_len(self) -> int:
        """Length under which the tree was rooted."""
        return self._lookahead.base_len

    def restart(self, length: int) -> None:
        """Drop all nodes; new ones continue a text of this length, or follow from an earlier one."""
        self._lookahead = Lookahead(length, self._rates)
        self.complete_len = -1

    def fits(self, part: ProposalPart, length: int) -> bool:
        """Return whether a part continues the tree or replaces it: it is not of an older tree, and leaves no gap.

        Args:
            part: of the proposal.
            length: of the session, in tokens.
        """
        rooted_len = part.base.len
        if rooted_len > length or part.known_len > length:
            return False
        if part.first_node == 1:
            return rooted_len >= self._lookahead.base_len
        return rooted_len == self._lookahead.base_len and part.first_node == self._lookahead.num_numbered + 1

    def replace(self, rooted_len: int, token_ids: Sequence[int], num_unobserved: int = 0) -> None:
        """Begin a new tree under a committed length, and follow the tokens after it.

        Args:
            rooted_len: that length.
            token_ids: after it.
            num_unobserved: of these, the first, from which the rates do not learn.
        """
        self._lookahead = Lookahead(rooted_len, self._rates)
        self._lookahead.follow(token_ids[:num_unobserved], observes=False)
        self._lookahead.follow(token_ids[num_unobserved:])

    def add(self, part: ProposalPart) -> None:
        """Add the nodes of a part that fits.

        Raises:
            InvalidArgument: more nodes than are allowed.
            ValueError: the nodes are no tree.
        """
        for node in part.nodes:
            if len(self._lookahead) >= MAX_PROPOSAL_NODES:
                raise InvalidArgument(f"more than {MAX_PROPOSAL_NODES} nodes", "proposal")
            # Under `rejection` whether a node is verified depends on no token, nor on how probable the draft finds it.
            is_plain = not node.likelihood or self._rule is not AcceptanceRule.REJECTION
            self._lookahead.add(node if is_plain else replace(node, likelihood=0.0))
        if part.complete:
            self.complete_len = part.known_len

    def follow(self, token_ids: Sequence[int], *, observes: bool = True) -> None:
        """Move the root along the tokens that a round output; `observes` where the rates learn from them."""
        self._lookahead.follow(token_ids, observes=observes)

    def candidates(self, max_depth: int) -> Iterator[Candidate]:
        """Yield the nodes that may be verified, up to a depth, with their values, best first."""
        return self._lookahead.candidates(max_depth)

    def best_line(self, max_depth: int) -> tuple[list[float], list[int]]:
        """Return the likeliest path after the text: of each node its value, and its token id.

        A value is the estimated probability that the node and all before it are accepted. The path is empty while the
        text is ahead of the nodes that have arrived.
        """
        values: list[float] = []
        token_ids: list[int] = []
        if not self._lookahead.is_caught_up:
            return values, token_ids
        number, reached = self._lookahead.root, 1.0
        while len(values) < max_depth and (children := self._lookahead.children(number)):
            number = max(children, key=self._lookahead.value)
            reached *= self._lookahead.value(number)
            values.append(reached)
            token_ids.append(self._lookahead.node(number).token_id)
        return values, token_ids

    def drafters(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return the drafters of the nodes that continue the text along these tokens, as far as there are any."""
        return self._lookahead.drafters(token_ids)

    def offer(self, max_depth: int, *, wants_draft: bool) -> tuple[list[int], Iterator[Candidate]]:
        """Return the nodes that a round must verify, and those that it may, with their values.

        Under `rejection` whether a drafted node is verified must not depend on its token, and so not on nodes that
        could only be proposed because of it. So the drafted line is verified as far as it has come, whatever it is
        worth; beside it only guesses are.

        Args:
            max_depth: longest path.
            wants_draft: whether the round uses a proposal; under `rejection` nothing is verified otherwise.
        """
        if self._rule is not AcceptanceRule.REJECTION:
            return [], self._lookahead.candidates(max_depth)
        if not wants_draft:
            return [], self._lookahead.candidates(0)
        line = self._lookahead.drafted_line(max_depth)
        return line, self._guesses_beside(line, max_depth)

    def tree(self, numbers: Sequence[int]) -> ProposalTree:
        """Return the tree of these nodes, to be verified."""
        return self._lookahead.tree(numbers)

    def _guesses_beside(self, line: Sequence[int], max_depth: int) -> Iterator[Candidate]:
        parents = {self._lookahead.root, *line}
        for item in self._lookahead.candidates(max_depth):
            node = self._lookahead.node(item.number)
            if node.kind is NodeKind.GUESSED and node.parent in parents:
                # Below it are guesses too.
                parents.add(item.number)
                yield item
