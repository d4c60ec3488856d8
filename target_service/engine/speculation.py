"""Speculation of one request at its target: how long each round waits for a proposal, and what it verifies."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from outrider.control.batching_delay import BatchCandidate
from outrider.control.decaying_mean import DecayingMean
from outrider.control.policy import RoundPlan, SpeculationPolicy, WorkerStatistics
from outrider.errors import InvalidArgument
from outrider.parameters import AcceptanceRule
from outrider.speculation.proposal_tree import Candidate
from outrider.speculation.received_tree import ReceivedTree
from outrider.tokens import MAX_PROPOSAL_NODES, ProposalPart, ProposalTree
from target_service.engine.commands import SpeculationTerms

_MAX_STOCK: Final = 32
"""Nodes by whose values a wait is decided; a pass verifies fewer of one session."""
_FADING: Final = 0.1
_AT_ONCE_S: Final = 0.001
_IDLE_ROUNDS: Final = 8
_READ_ROUNDS: Final = 4
"""Rounds without its draft after which the draft's next answer shows how long it reads, not how long it drafts."""
_LEAST_LEFT: Final = 16
"""Tokens that a request must have left after so many rounds without its draft, for the draft to be asked again: it has
all text since then to read first."""


class Speculation:
    """See the module. All lengths are the session's, in tokens.

    Args:
        terms: as the caller set them.
        rule: judges proposals.
        statistics: of speculation, over all requests.
        adapts: whether to stop waiting where that does not pay.

    Attributes:
        terms: as the caller set them last.
        num_proposed: nodes that have arrived since the last verdict.
        num_forced: tokens that the request's constraint forces now: a round that has any waits for no draft, and
            nothing is learnt from it about one.
    """

    def __init__(
        self, terms: SpeculationTerms, rule: AcceptanceRule, statistics: WorkerStatistics, *, adapts: bool
    ) -> None:
        self.terms = terms
        self.num_proposed = self.num_forced = self._forced_len = 0
        self._times = statistics.times
        self._policy = SpeculationPolicy(terms.max_wait_s, statistics, adapts=adapts, drafts_here=terms.own_draft)
        self._received = ReceivedTree(rule, self._policy.rates)
        self._is_late = False
        self._plan = RoundPlan()
        self._has_news = self._waits = self._is_answering = self._wanted_draft = self._has_answer = False
        self._num_left = self._num_idle = 0
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
        """Whether the round that begins uses a proposal."""
        return self._plan.wants_draft

    @property
    def does_without(self) -> bool:
        """Whether the round that begins uses no proposal though there is a draft."""
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

    def change(self, terms: SpeculationTerms) -> None:
        """Speculate on other terms from now on; without a draft no round waits."""
        self.terms = terms
        self._policy.max_wait_s = terms.max_wait_s
        self._policy.move(drafts_here=terms.own_draft)
        if terms.num_speculative_tokens == 0:
            self._wait_until, self._waits = 0.0, False

    def restart(self, length: int) -> None:
        """Drop the proposal: a span has set the session's tokens."""
        self._received.restart(length)

    def receive(self, part: ProposalPart, token_ids: Sequence[int], now: float) -> bool:
        """Add a part of a proposal.

        Args:
            part: checked against the vocabulary.
            token_ids: the session's.
            now: monotonic time at which it came.

        Returns:
            Whether it was added; not where its tree has been replaced, or nodes before it are missing.

        Raises:
            InvalidArgument: more nodes than are allowed.
            ValueError: the nodes are no tree.
        """
        if len(part.nodes) > MAX_PROPOSAL_NODES:
            raise InvalidArgument(
                f"{len(part.nodes)} nodes at once, at most {MAX_PROPOSAL_NODES} are allowed", "proposal"
            )
        if not self._received.fits(part, len(token_ids)):
            return False
        if part.first_node == 1:
            self._replace(part.base.len, token_ids)
        if part.step_time_s or not self._policy.draft.step_s:
            # Nodes that took no step are here long before a model's: they say nothing about when those come.
            had_text = self._num_idle > _READ_ROUNDS or not self._has_answer
            self._policy.draft.record_answer(part.known_len, now, _depth_of(part), had_text=had_text)
            self._has_answer = True
        self._policy.draft.step_s = part.step_time_s or self._policy.draft.step_s
        self._received.add(part)
        self.num_proposed += len(part.nodes)
        self._has_news, self._news_at = True, now
        if self._reached_at is None and (part.complete or self._received.depth >= self._plan.depth):
            self._reached_at = now
        self._is_answering = self._is_answering or part.known_len == len(token_ids)
        return True

    def refuse(self, length: int) -> None:
        """Drop the proposal, and wait for no more of it."""
        self.restart(length)
        self._received.complete_len = length

    def begin(self, num_left: int, now: float) -> None:
        """Begin a round.

        Args:
            num_left: tokens that the request may still output.
            now: monotonic time.
        """
        self._started, self._num_left = now, num_left
        self._num_idle = 0 if self._wanted_draft else self._num_idle + 1
        self._wanted_draft = False
        self._reached_at = self._ready_at = self._news_at = None
        self._is_answering = False
        self._decide(now)
        if self.num_forced:
            self._wait_until = now
        self._waits = self._plan.wait_s > 0 and not self.num_forced
        self._begun_depth = self._received.depth
        if self._begun_depth >= self._plan.depth:
            self._reached_at = now
        self._expected_waits_s = self._arrivals_s() if self._waits else ()

    def _decide(self, now: float) -> None:
        """Decide what the round waits for; again where nodes have arrived."""
        terms, depth = self.terms, self._received.depth
        is_too_late = self._num_idle > _IDLE_ROUNDS and self._num_left < _LEAST_LEFT
        max_depth = 0 if is_too_late else self._max_depth(self._num_left)
        is_enough = depth >= min(terms.draft_min, max_depth)
        stock = [item.value for item in islice(self._received.candidates(max_depth), _MAX_STOCK)] if is_enough else []
        self._plan = self._policy.begin(
            stock,
            depth,
            max_depth,
            min_depth=terms.draft_min,
            runs_ahead=terms.lookahead > 0,
            is_answering=self._is_answering,
        )
        # Once its nodes are here, the plan of the rest of a round wants no more.
        self._wanted_draft = self._wanted_draft or self._plan.wants_draft
        if depth < self._plan.depth:
            self._reached_at = None
        self._wait_until = min(now + self._plan.wait_s, self._started + terms.max_wait_s)
        # An answer is under way since the verdict, a step since the last one.
        expected_s = self._plan.expects.wait_s if self._plan.expects.is_known else self._plan.wait_s
        self._ready_from = (now if depth else self._started) + expected_s
        self._has_news = False

    def record_verdict(self, length: int, now: float) -> None:
        """Record that the verdict which made the session so long leaves now."""
        self._policy.draft.record_verdict(length, now)

    def is_ready(self, length: int, now: float) -> bool:
        """Return whether the round waits no longer: its proposal is here, none will come, or its time is over."""
        if self._has_news and now < self._wait_until:
            self._decide(now)
        is_here = self._received.complete_len == length or self._received.depth >= self._plan.depth
        if not is_here and now < self._wait_until:
            self._ready_at = None
        elif self._ready_at is None:
            self._ready_at = min(now, self._came_at(now) if is_here else now, max(self._started, self._wait_until))
        return self._ready_at is not None

    def _came_at(self, now: float) -> float:
        """Return when the proposal that the round waits for was here."""
        if self._reached_at is not None:
            return self._reached_at
        # Fewer nodes were enough once the last had come, perhaps while the round before was being concluded.
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
        """Return the nodes that the round must verify, and those that it may, with their values.

        Args:
            room: tokens that the round may output.
        """
        max_depth = self._max_depth(room)
        if self._received.depth < min(self.terms.draft_min, max_depth):
            return [], iter(())
        return self._received.offer(max_depth, wants_draft=self._plan.wants_draft)

    def line(self, room: int) -> tuple[list[float], list[int]]:
        """Return the likeliest line that a round may verify: the value of each token on it, and the tokens.

        Args:
            room: tokens that the round may output.
        """
        max_depth = self._max_depth(room)
        if self._received.depth < min(self.terms.draft_min, max_depth):
            return [], []
        return self._received.best_line(max_depth)

    def drafters(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return the drafters of these tokens, which were accepted and of which `advance` knows nothing yet."""
        return self._received.drafters(token_ids)

    def tree(self, numbers: Sequence[int]) -> ProposalTree:
        """Return the tree of these nodes, to be verified."""
        return self._received.tree(numbers)

    def advance(self, token_ids: Sequence[int], length: int) -> bool:
        """Follow the output of a round; return whether all of it was among the nodes that had arrived.

        Args:
            token_ids: the output.
            length: of the session, with it.
        """
        # What is forced shows nothing about the draft.
        self._forced_len = length if self.num_forced else self._forced_len
        self._received.follow(token_ids, observes=not self.num_forced)
        return self._received.is_caught_up

    def observe(self, num_accepted: int, depth: int, num_nodes: int, wait_s: float, rest_s: float) -> None:
        """Learn from a round.

        Args:
            num_accepted: its nodes that were accepted.
            depth: of the nodes that it verified; 0 where there were none.
            num_nodes: nodes that it verified.
            wait_s: seconds that it waited for them.
            rest_s: seconds that it took beside that wait, its pass, and other sessions' passes.
        """
        self._times.observe_rest(rest_s, speculates=self.waits or depth > 0)
        self._ready_again.observe(wait_s <= _AT_ONCE_S)
        if wait_s > _AT_ONCE_S:
            self._answer_s.observe(wait_s)
        if not self.terms.num_speculative_tokens or self.num_forced:
            return
        if self.waits or depth:
            self._policy.observe_round(num_accepted, depth, num_nodes, wait_s, waited=self.waits)
        else:
            self._policy.observe_plain()

    def lasted_s(self, now: float) -> float:
        """Return the seconds since the round began."""
        return now - self._started

    @property
    def expected_wait_s(self) -> float:
        """Seconds that the round was expected, when it began, to wait for the nodes that it has waited for."""
        num_steps = min(self._plan.depth - self._begun_depth, len(self._expected_waits_s))
        return self._expected_waits_s[num_steps - 1] if num_steps > 0 else 0.0

    def waited_s(self, now: float) -> float:
        """Return how long a round that begins its pass now has waited for its proposal."""
        # Delays after the wait was over (a closed window, another session's pass) are not the draft's.
        until = now if self._ready_at is None else self._ready_at
        return max(0.0, min(now, until, self._wait_until) - self._started) if self._waits else 0.0

    def _replace(self, rooted_len: int, token_ids: Sequence[int]) -> None:
        """Begin a new tree; a tree that came too late to be waited for shows how many tokens it would have given."""
        if self._is_late and self._received.root_len >= self._forced_len:
            self._policy.observe_late(self._received.root_depth, self.terms.num_speculative_tokens)
        self._is_late = self._plan.is_trial or not self._plan.wants_draft
        self._received.replace(rooted_len, token_ids[rooted_len:], max(0, self._forced_len - rooted_len))

    def _max_depth(self, room: int) -> int:
        """Return the longest main line that can be accepted: a round outputs one token more."""
        return max(0, min(self.terms.num_speculative_tokens, room - 1))

    def _arrivals_s(self) -> list[float]:
        """Return when the nodes of the main line that the round waits for are expected, in seconds from its start."""
        draft, is_running = self._policy.draft, self.terms.lookahead > 0 and self._begun_depth > 0
        if not draft.known:
            return []
        num_awaited = self._plan.depth - self._begun_depth
        return [draft.arrival_s(num, is_running=is_running) for num in range(1, num_awaited + 1)]


def _depth_of(part: ProposalPart) -> int:
    """Return the depth of a part that begins a tree; 0 for others."""
    depths = [0]
    for node in part.nodes if part.first_node == 1 else ():
        depths.append(depths[node.parent] + 1 if node.parent < len(depths) else 0)
    return max(depths)
