"""One request's speculation at its target: what has arrived ahead of its text, and what its rounds do about it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from outrider.control.batching_delay import BatchCandidate
from outrider.control.decaying_mean import DecayingMean
from outrider.control.policy import RoundPlan, SpeculationPolicy, WorkerStatistics
from outrider.errors import InvalidArgument
from outrider.parameters import AcceptanceRule
from outrider.speculation.proposal_tree import Candidate, Lookahead
from outrider.tokens import MAX_PROPOSAL_NODES, NodeKind, ProposalPart, ProposalTree

_MAX_STOCK: Final = 32
"""Nodes that are looked at to decide about a wait; a pass verifies fewer of one session."""
_FADING: Final = 0.1
_AT_ONCE_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class SpeculationTerms:
    """How a request speculates, as its caller says; see SpeculationSettings.

    Attributes:
        num_speculative_tokens: longest main line that a round verifies; 0 for plain decoding.
        max_wait_s: longest wait for a proposal, in seconds.
        lookahead: most nodes that its draft may hold ahead of the text; 0 where it waits for verdicts.
        draft_min: shortest main line that is verified.
        own_draft: whether this process drafts.
    """

    num_speculative_tokens: int = 0
    max_wait_s: float = 0.0
    lookahead: int = 0
    draft_min: int = 0
    own_draft: bool = False


class Speculation:
    """See the module. All lengths are the session's, in tokens.

    Args:
        terms: as the caller says.
        rule: that judges proposals.
        statistics: of all sessions of the target.
        adapts: whether to stop waiting where that does not pay.

    Attributes:
        terms: as the caller said last.
        num_proposed: nodes that have arrived since the last verdict.
    """

    def __init__(
        self, terms: SpeculationTerms, rule: AcceptanceRule, statistics: WorkerStatistics, *, adapts: bool
    ) -> None:
        self.terms = terms
        self.num_proposed = 0
        self._rule = rule
        self._times = statistics.times
        self._policy = SpeculationPolicy(terms.max_wait_s, statistics, adapts=adapts)
        self._lookahead = Lookahead(0, self._policy.rates)
        self._whole_len = -1
        self._is_late = False
        self._plan = RoundPlan()
        self._has_news = self._waits = self._is_answering = False
        self._num_left = 0
        self._started = 0.0
        self._begun_depth = 0
        self._expected_waits_s: Sequence[float] = ()
        self._wait_until = 0.0
        self._ready_from = 0.0
        self._news_at: float | None = None
        self._reached_at: float | None = None
        self._ready_at: float | None = None
        self._ready_again = DecayingMean(_FADING, 0.5, 1)
        self._answer_s = DecayingMean(_FADING)

    @property
    def wants_draft(self) -> bool:
        """Whether the round that begins has use of a proposal."""
        return self._plan.wants_draft

    @property
    def does_without(self) -> bool:
        """Whether there is a draft that the round that begins has no use of."""
        return self.terms.num_speculative_tokens > 0 and not self._plan.wants_draft

    @property
    def num_wanted(self) -> int:
        """Length of the main line that the draft should propose; 0 where it should not."""
        return self._plan.num_speculative_tokens

    @property
    def waits(self) -> bool:
        """Whether the round waits, or has waited, for a proposal."""
        return self._waits

    @property
    def wait_until(self) -> float:
        """Monotonic time at which the wait is over."""
        return self._wait_until

    @property
    def is_caught_up(self) -> bool:
        """Whether the last token of the text is among the nodes that have arrived, or what they were planted under."""
        return self._lookahead.is_caught_up and self._lookahead.num_numbered > 0

    def change(self, terms: SpeculationTerms) -> None:
        """Speculates on other terms from now on; without a draft no round waits."""
        self.terms = terms
        self._policy.max_wait_s = terms.max_wait_s
        if terms.num_speculative_tokens == 0:
            self._wait_until, self._waits = 0.0, False

    def restart(self, length: int) -> None:
        """Forgets everything that has arrived: the session's tokens are what a span says."""
        self._lookahead = Lookahead(length, self._policy.rates)
        self._whole_len = -1

    def receive(self, part: ProposalPart, token_ids: Sequence[int], now: float) -> bool:
        """Takes in what a draft sent.

        Args:
            part: checked against the vocabulary.
            token_ids: the session's.
            now: monotonic time at which it came.

        Returns:
            Whether it was of any use: not of a tree that another has replaced, or with a gap before it.

        Raises:
            InvalidArgument: more nodes than are allowed.
            ValueError: the nodes are no tree.
        """
        if len(part.nodes) > MAX_PROPOSAL_NODES:
            raise InvalidArgument(
                f"{len(part.nodes)} nodes at once, at most {MAX_PROPOSAL_NODES} are allowed", "proposal"
            )
        planted_len = part.base.len
        if planted_len > len(token_ids) or part.known_len > len(token_ids):
            return False
        if part.first_node == 1:
            if planted_len < self._lookahead.base_len:
                return False
            self._plant(planted_len, token_ids)
        if planted_len != self._lookahead.base_len or part.first_node != self._lookahead.num_numbered + 1:
            return False
        self._policy.draft.record_answer(part.known_len, now, _depth_of(part))
        self._policy.draft.step_s = part.step_time_s or self._policy.draft.step_s
        for node in part.nodes:
            if len(self._lookahead) >= MAX_PROPOSAL_NODES:
                raise InvalidArgument(f"more than {MAX_PROPOSAL_NODES} nodes", "proposal")
            self._lookahead.add(node)
        self.num_proposed += len(part.nodes)
        if part.complete:
            self._whole_len = part.known_len
        self._has_news, self._news_at = True, now
        if self._reached_at is None and (part.complete or self._depth() >= self._plan.depth):
            self._reached_at = now
        self._is_answering = self._is_answering or part.known_len == len(token_ids)
        return True

    def refuse(self, length: int) -> None:
        """Goes on without what has arrived, and waits for nothing more."""
        self.restart(length)
        self._whole_len = length

    def begin(self, num_left: int, now: float) -> None:
        """Begins a round.

        Args:
            num_left: tokens that the request may still output.
            now: monotonic time.
        """
        self._started, self._num_left = now, num_left
        self._reached_at = self._ready_at = self._news_at = None
        self._is_answering = False
        self._decide(now)
        self._waits = self._plan.wait_s > 0
        self._begun_depth = self._depth()
        if self._begun_depth >= self._plan.depth:
            self._reached_at = now
        self._expected_waits_s = self._arrivals_s() if self._waits else ()

    def _decide(self, now: float) -> None:
        """Decides, or once more where nodes have arrived, what the round waits for."""
        terms, max_depth, depth = self.terms, self._max_depth(self._num_left), self._depth()
        is_enough = depth >= min(terms.draft_min, max_depth)
        stock = [item.value for item in islice(self._lookahead.candidates(max_depth), _MAX_STOCK)] if is_enough else []
        self._plan = self._policy.begin(
            stock,
            depth,
            max_depth,
            min_depth=terms.draft_min,
            runs_ahead=terms.lookahead > 0,
            is_answering=self._is_answering,
            drafts_here=terms.own_draft,
        )
        if depth < self._plan.depth:
            self._reached_at = None
        self._wait_until = min(now + self._plan.wait_s, self._started + terms.max_wait_s)
        # An answer is under way since the verdict, a step since the last one.
        expected_s = self._plan.expects.wait_s if self._plan.expects.is_known else self._plan.wait_s
        self._ready_from = (now if depth else self._started) + expected_s
        self._has_news = False

    def note_verdict(self, length: int, now: float) -> None:
        """Learns that the verdict which made the session so long leaves now."""
        self._policy.draft.record_verdict(length, now)

    def is_ready(self, length: int, now: float) -> bool:
        """Whether waiting longer would be in vain, or is over."""
        if self._has_news and now < self._wait_until:
            self._decide(now)
        is_here = self._whole_len == length or self._depth() >= self._plan.depth
        if not is_here and now < self._wait_until:
            self._ready_at = None
        elif self._ready_at is None:
            self._ready_at = min(now, self._came_at(now) if is_here else now, max(self._started, self._wait_until))
        return self._ready_at is not None

    def _came_at(self, now: float) -> float:
        """Returns when what the round waits for was here."""
        if self._reached_at is not None:
            return self._reached_at
        # Less was enough once the last nodes had come, perhaps while the round before was being concluded.
        return now if self._news_at is None else max(self._started, self._news_at)

    def batch_candidate(self, now: float) -> BatchCandidate:
        """Return the round as a candidate for the next pass."""
        expects, later = self._plan.expects, self._policy.expect_whole(self._max_depth(self._num_left))
        return BatchCandidate(
            max(1.0, expects.num_tokens),
            max(1.0, expects.num_rows),
            0.0 if self._ready_at is not None else max(0.0, self._ready_from - now),
            self._answer_s.value if self._answer_s.known else later.wait_s,
            self._ready_again.value,
            max(1.0, later.num_tokens),
            max(1.0, later.num_rows),
        )

    def offer(self, room: int) -> tuple[list[int], Iterator[Candidate]]:
        """Returns what the round may verify: nodes that it must, and those that are worth it, with their values.

        Under `rejection` whether a drafted node is verified must not depend on its token, and so not on what could only
        be proposed because of it. So the drafted line is verified as far as it has come, whatever it is worth; of all
        else only guesses beside it.

        Args:
            room: tokens that the round may output.
        """
        max_depth = self._max_depth(room)
        if self._depth() < min(self.terms.draft_min, max_depth):
            return [], iter(())
        if self._rule is AcceptanceRule.COUPLED or not self._plan.wants_draft:
            return [], self._lookahead.candidates(max_depth if self._rule is AcceptanceRule.COUPLED else 0)
        line = self._lookahead.drafted_line(max_depth)
        return line, self._guesses_beside(line, max_depth)

    def tree(self, numbers: Sequence[int]) -> ProposalTree:
        """Returns the tree of these nodes, to be verified."""
        return self._lookahead.tree(numbers)

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Learns what a round output; returns whether all of it was among the nodes that had arrived."""
        self._lookahead.follow(token_ids)
        return self.is_caught_up

    def observe(self, num_accepted: int, depth: int, num_nodes: int, wait_s: float, rest_s: float) -> None:
        """Learns what became of a round.

        Args:
            num_accepted: of its nodes.
            depth: of those that it verified; 0 where there were none.
            num_nodes: that it verified.
            wait_s: seconds that it waited for them.
            rest_s: seconds that it took beside that, its pass, and other sessions' passes.
        """
        self._times.observe_rest(rest_s, speculates=self.waits or depth > 0)
        self._ready_again.observe(wait_s <= _AT_ONCE_S)
        if wait_s > _AT_ONCE_S:
            self._answer_s.observe(wait_s)
        if not self.terms.num_speculative_tokens:
            return
        if self.waits or depth:
            self._policy.observe_round(num_accepted, depth, num_nodes, wait_s, waited=self.waits)
        else:
            self._policy.observe_plain()

    def lasted_s(self, now: float) -> float:
        """Returns the seconds since the round began."""
        return now - self._started

    @property
    def expected_wait_s(self) -> float:
        """Seconds that the round's wait, for as much as it has waited for, was expected to take when it began."""
        num_steps = min(self._plan.depth - self._begun_depth, len(self._expected_waits_s))
        return self._expected_waits_s[num_steps - 1] if num_steps > 0 else 0.0

    def waited_s(self, now: float) -> float:
        """Returns how long a round that begins its pass now has waited for its proposal."""
        # What came after the wait was over (a closed window, another session's pass) is not the draft's doing.
        until = now if self._ready_at is None else self._ready_at
        return max(0.0, min(now, until, self._wait_until) - self._started) if self._waits else 0.0

    def _plant(self, planted_len: int, token_ids: Sequence[int]) -> None:
        if self._is_late:
            self._policy.observe_late(self._lookahead.root_depth, self.terms.num_speculative_tokens)
        self._is_late = self._plan.is_trial or not self._plan.wants_draft
        self._lookahead = Lookahead(planted_len, self._policy.rates)
        self._lookahead.follow(token_ids[planted_len:])

    def _max_depth(self, room: int) -> int:
        """Returns the longest main line of use: a round outputs one token more."""
        return max(0, min(self.terms.num_speculative_tokens, room - 1))

    def _arrivals_s(self) -> list[float]:
        """Returns when each node of the main line is expected that the round, which begins, waits for."""
        draft, is_running = self._policy.draft, self.terms.lookahead > 0 and self._begun_depth > 0
        if not draft.known:
            return []
        num_awaited = self._plan.depth - self._begun_depth
        return [draft.arrival_s(num, is_running=is_running) for num in range(1, num_awaited + 1)]

    def _depth(self) -> int:
        return self._lookahead.max_depth if self._lookahead.is_caught_up else 0

    def _guesses_beside(self, line: Sequence[int], max_depth: int) -> Iterator[Candidate]:
        parents = {self._lookahead.root, *line}
        for item in self._lookahead.candidates(max_depth):
            node = self._lookahead.node(item.number)
            if node.kind is NodeKind.GUESSED and node.parent in parents:
                yield item


def _depth_of(part: ProposalPart) -> int:
    """Returns the depth of a part that plants a tree; 0 for others."""
    depths = [0]
    for node in part.nodes if part.first_node == 1 else ():
        depths.append(depths[node.parent] + 1 if node.parent < len(depths) else 0)
    return max(depths)
