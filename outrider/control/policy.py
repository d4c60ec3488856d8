"""The controller of a target: what a round verifies, how long it waits, when speculation ends. Arithmetic only.

**The value of a choice.** A round of a session that waits `w` seconds, verifies nodes of which E are expected to be
accepted, and takes part in a pass of n such sessions, yields 1 + E tokens in w + T(n (1 + nodes)) seconds, T being the
measured time of a pass over so many rows, and of what such a round takes besides it. Before each round, and again as
nodes arrive (`SpeculationPolicy.begin`), this rate is compared for going on at once with the nodes that have arrived,
and for waiting until the main line is 1, 2, ... tokens long. E is the sum over nodes of the products of their measured
values (`outrider.speculation.acceptance`); for nodes that have yet to arrive, that of their main line, times the
prediction ratio: the tokens accepted lately for each that a main line was expected to yield. Arrival times are measured
too: a draft's answer to a verdict, and the time of its steps. Waiting pays, against going on with E' expected in a pass
of T', iff

    (E - E') T' / (1 + E') > w + T - T'

and where drafts wait for verdicts a choice is kept until the other is better by a margin. For a draft that runs ahead
`w` is weighted by more than 1: the nodes that such a draft makes meanwhile would be there for the next round without a
wait. As passes fill, n grows, and with it the cost of a row to all: speculation ends by itself, first where proposals
are poor or late. How the nodes of all sessions share a pass is `allocation`.

**Late proposals** cost nothing and are as good a measurement: nodes that arrive after the target went on are compared
with the text that it has output meanwhile. So a session whose draft becomes useful, as when a text begins to copy its
prompt, returns to speculation, and one whose draft is slow, wrong or dead decodes at the speed of plain decoding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from outrider.control.decaying_mean import DecayingMean
from outrider.control.draft_times import AnswerTimes, DraftTimes
from outrider.control.guard import SpeculationGuard
from outrider.control.pass_times import PassTimes
from outrider.speculation.acceptance import AcceptanceRates

_RETRY_ROUNDS: Final = 64
"""Plain rounds of a session, after which a proposal is waited for again, since waits are only measured by waiting; or
so many for each session of the target since any has waited, since requests may be shorter than that."""
_MAX_RETRY_ROUNDS: Final = 1024
"""The limit of these rounds, which double each time that waiting did not pay."""
_MARGIN: Final = 1.1
"""How much better the other choice must be: passes in which some sessions wait and some do not serve neither well."""
_RUNNING_WAIT: Final = 1.75
"""The weight of a wait for a draft that runs ahead: it drafts on while the target verifies, so nodes that are not
waited for are there for the next round (simulated passes, 20 ms: 20.8 tokens/s in place of 19.9)."""
_PATIENCE: Final = 3.0
_PATIENCE_S: Final = 0.01
"""A wait times out after so many times its expected seconds, and so many seconds more."""
_TRIAL_STRIDE: Final = 16
_FIRST_TRIALS: Final = (1, 3, 7)
"""One of so many rounds that need no proposal requests one all the same; of the first ones more, since a stall of the
machine may have ended speculation."""
_RUN_ROUNDS: Final = 16
_RUN_CYCLE: Final = 256
"""Of so many rounds that wait for nothing, so many let a draft whose nodes were not accepted run ahead, as a trial."""
_LEAST_YIELD: Final = 0.05
"""Accepted tokens a round, of proposals that no round waits for, below which they are not worth a draft's time."""
_NEARLY: Final = 0.99
_USUAL_ROUNDS: Final = 6


@dataclass(slots=True)
class _PlainRounds:
    """Rounds since the last one that waited, and after how many of them one waits again."""

    num: int = 0
    limit: int = _RETRY_ROUNDS

    def is_due(self, num_sessions: int = 1) -> bool:
        return self.num >= self.limit * num_sessions

    def double(self) -> None:
        self.limit = min(2 * self.limit, _MAX_RETRY_ROUNDS)


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """Statistics of speculation over all sessions of a target; each session starts from them and adds to them.

    Attributes:
        times: the times of passes and rounds.
        rates: the values of nodes.
        answers: the times of drafts' answers.
        own_answers: those of the draft within the target's process.
        prediction_ratio: accepted tokens for each that a main line was expected to yield.
        plain_rounds: since any session has waited.
        guard: whether sessions speculate at all by drafts elsewhere.
        own_guard: whether they do by the draft within the target's process.
    """

    times: PassTimes = field(default_factory=PassTimes)
    rates: AcceptanceRates = field(default_factory=AcceptanceRates.of_all_sessions)
    answers: AnswerTimes = field(default_factory=AnswerTimes)
    own_answers: AnswerTimes = field(default_factory=AnswerTimes)
    prediction_ratio: DecayingMean = field(default_factory=lambda: DecayingMean(0.02, 1.0, 20))
    plain_rounds: _PlainRounds = field(default_factory=_PlainRounds)
    guard: SpeculationGuard = field(default_factory=SpeculationGuard)
    own_guard: SpeculationGuard = field(default_factory=SpeculationGuard)

    def answers_of(self, *, own_draft: bool) -> AnswerTimes:
        """Return the times of answers: of the draft within the target's process, or of others."""
        return self.own_answers if own_draft else self.answers

    def guard_of(self, *, own_draft: bool) -> SpeculationGuard:
        """Return the guard of sessions that the draft within the target's process, or others, draft for."""
        return self.own_guard if own_draft else self.guard


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected seconds, tokens and rows of a round; all 0 while nothing has been measured.

    Attributes:
        wait_s: seconds that it waits for a proposal.
        round_s: seconds of its pass, together with all sessions that decode now, and of the work around it.
        num_tokens: that it outputs.
        num_rows: of the pass that it takes.
    """

    wait_s: float = 0.0
    round_s: float = 0.0
    num_tokens: float = 0.0
    num_rows: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there is an expectation."""
        return self.num_tokens > 0


_UNKNOWN: Final = Expectation()


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The plan of a session's next round.

    Attributes:
        wait_s: longest wait for a proposal, in seconds; 0 to go on at once.
        depth: length of the main line that is enough to end the wait.
        num_speculative_tokens: length of the main line that the draft should propose before all else; 0 where it should
            propose nothing.
        is_trial: whether it should, but only to measure it: what arrives late is compared with the text.
        expects: its expected seconds, tokens and rows.
    """

    wait_s: float = 0.0
    depth: int = 0
    num_speculative_tokens: int = 0
    is_trial: bool = False
    expects: Expectation = _UNKNOWN

    @property
    def wants_draft(self) -> bool:
        """Whether the draft should propose any nodes."""
        return self.num_speculative_tokens > 0


class SpeculationPolicy:
    """Decides for one session, before each round and again as nodes arrive; see the module.

    Args:
        max_wait_s: longest wait; 0 where no proposal will arrive.
        statistics: of all sessions of the target; the session adds to them.
        adapts: whether to stop waiting where that does not pay; without it every round waits.
        drafts_here: whether the target drafts itself, which it does for rounds that wait.
    """

    def __init__(
        self, max_wait_s: float, statistics: WorkerStatistics, *, adapts: bool = True, drafts_here: bool = False
    ) -> None:
        self.max_wait_s = max_wait_s
        self._drafts_here = drafts_here
        self.draft = DraftTimes(statistics.answers_of(own_draft=drafts_here))
        self.rates = AcceptanceRates(statistics.rates)
        self._statistics = statistics
        self._times = statistics.times
        self._adapts = adapts
        # One bad round at the beginning predicts little.
        self._prediction_ratio = DecayingMean(0.08, statistics.prediction_ratio.value, _USUAL_ROUNDS)
        self._yield = DecayingMean(0.1)
        self._width = DecayingMean(0.1, 1.0, _USUAL_ROUNDS)
        self._num_nodes = DecayingMean(0.1)
        self._plain_rounds = _PlainRounds()
        self._waits_again = False
        self._expected_accepted = 0.0
        self._expected_wait_s: float | None = None

    def begin(
        self,
        stock: Sequence[float],
        depth: int,
        max_depth: int,
        *,
        min_depth: int = 0,
        runs_ahead: bool = False,
        is_answering: bool = False,
    ) -> RoundPlan:
        """Return the plan of the next round, or, called again within a round, of the rest of it.

        Args:
            stock: values of the nodes that have arrived for it, those worth most first.
            depth: length of the main line among them.
            max_depth: longest main line that may be verified; 0 where there is no draft.
            min_depth: shortest main line that may be waited for.
            runs_ahead: whether the draft goes on without waiting for verdicts.
            is_answering: whether its answer to the last verdict has begun to arrive.
        """
        if self.max_wait_s <= 0 or max_depth <= 0:
            return RoundPlan(expects=self._now([]))
        if self._adapts and not self._statistics.guard_of(own_draft=self._drafts_here).allows:
            return RoundPlan(expects=self._now(stock))
        is_running = (runs_ahead or is_answering) and depth > 0
        accepted = self.rates.expected_accepted(max(depth, max_depth))
        if not self._adapts:
            waits = depth < max_depth
            expects = self._waiting(max_depth, depth, accepted, is_running=is_running) if waits else self._now(stock)
            return RoundPlan(self.max_wait_s if waits else 0.0, max_depth, max_depth, expects=expects)
        shortest = min(max(depth + 1, min_depth), max_depth)
        # While the draft runs whether or not the round waits, a change of plan costs nothing.
        margin = 1.0 if runs_ahead else _MARGIN if self._plain_rounds.num == 0 else 1 / _MARGIN
        weight = _RUNNING_WAIT if runs_ahead else 1.0
        goals = range(shortest, max_depth + 1)
        now = self._now(stock)
        goal, pays = self._best(now, depth, goals, accepted, margin, weight, is_running=is_running)
        self._expected_accepted = accepted[goal]
        if pays:
            self._plain_rounds.limit = self._statistics.plain_rounds.limit = _RETRY_ROUNDS
        elif self._waits_again or self._is_due():
            goal = max_depth
        elif self._drafts_here and self._is_trial:
            goal = shortest
        else:
            is_wanted, is_trial = runs_ahead and self._is_worth_drafting, self._is_trial
            num_wanted = shortest if is_wanted else max_depth if is_trial else 0
            return RoundPlan(0.0, depth, num_wanted, is_trial=is_trial and not is_wanted, expects=now)
        expects = self._waiting(goal, depth, accepted, is_running=is_running)
        self._expected_wait_s = expects.wait_s if expects.is_known else None
        return RoundPlan(self._patience_s(), goal, goal, expects=expects)

    def move(self, *, drafts_here: bool) -> None:
        """Have proposals from elsewhere from now on, whose answers take other times."""
        if drafts_here is not self._drafts_here:
            self._drafts_here = drafts_here
            self.draft = DraftTimes(self._statistics.answers_of(own_draft=drafts_here))

    def expect_whole(self, max_depth: int) -> Expectation:
        """Return the expectation of a round once a main line of the greatest length has arrived."""
        return self._waiting(max_depth, 0, self.rates.expected_accepted(max_depth), is_running=False)

    def observe_round(self, num_accepted: int, depth: int, num_nodes: int, wait_s: float, *, waited: bool) -> None:
        """Record a round that waited, or that verified nodes.

        Args:
            num_accepted: nodes that were accepted.
            depth: of those that were verified; 0 where none had arrived, as from a draft that often has nothing to
                propose.
            num_nodes: that were verified, at least `depth`.
            wait_s: seconds that it waited.
            waited: whether it waited for them.
        """
        self._yield.observe(num_accepted)
        if not waited:
            self._count_plain()
            return
        self._waits_again = False
        self._plain_rounds.num = self._statistics.plain_rounds.num = 0
        if depth:
            self._width.observe(num_nodes / depth)
            self._num_nodes.observe(num_nodes)
        expected = self.rates.expected_accepted(depth)[-1] if depth else self._expected_accepted
        self._observe_outcome(num_accepted, expected)
        if depth == 0 and wait_s >= _NEARLY * self._patience_s():
            self.draft.record_timeout(wait_s)

    def observe_plain(self) -> None:
        """Record a round that neither waited nor verified nodes."""
        self._yield.observe(0)
        self._count_plain()

    def observe_late(self, num_matching: int, num_asked: int) -> None:
        """Record a proposal that arrived too late.

        Args:
            num_matching: how many of its tokens the target has output by itself.
            num_asked: length of the main line that was requested.
        """
        self._observe_outcome(min(num_matching, num_asked), self.rates.expected_accepted(num_asked)[-1])

    def _count_plain(self) -> None:
        self._waits_again = False
        self._plain_rounds.num += 1
        self._statistics.plain_rounds.num += 1

    def _is_due(self) -> bool:
        """Return whether this round waits once more, whatever is expected of it, and then does until its end."""
        own, shared = self._plain_rounds, self._statistics.plain_rounds
        if own.is_due():
            own.double()
            self._waits_again = True
        if shared.is_due(self._times.num_sessions):
            # At once, so that no other session does too.
            shared.double()
            shared.num = 0
            self._waits_again = True
        return self._waits_again

    def _observe_outcome(self, num_accepted: int, expected: float) -> None:
        if expected > 0:
            self._prediction_ratio.observe(num_accepted / expected)
            self._statistics.prediction_ratio.observe(num_accepted / expected)

    def _patience_s(self) -> float:
        if self._expected_wait_s is None:
            return self.max_wait_s
        return min(self.max_wait_s, _PATIENCE * self._expected_wait_s + _PATIENCE_S)

    @property
    def _is_trial(self) -> bool:
        return self._plain_rounds.num % _TRIAL_STRIDE == 1 or self._plain_rounds.num in _FIRST_TRIALS

    @property
    def _is_worth_drafting(self) -> bool:
        """Whether nodes that no round waits for are accepted often enough; tried out now and then."""
        return self._plain_rounds.num % _RUN_CYCLE < _RUN_ROUNDS or self._yield.value >= _LEAST_YIELD

    def _best(
        self,
        now: Expectation,
        depth: int,
        goals: range,
        accepted: Sequence[float],
        margin: float,
        weight: float,
        *,
        is_running: bool,
    ) -> tuple[int, bool]:
        """Return the length of the main line to wait for, and whether waiting pays; at first it does."""
        if depth >= goals[-1]:
            return depth, False
        if not (self.draft.known and self._times.known):
            return goals[-1], True
        best_goal, best, best_rate = goals[0], now, 0.0
        for goal in goals:
            found = self._waiting(goal, depth, accepted, is_running=is_running)
            if found.wait_s > self.max_wait_s and goal > goals[0]:
                break
            rate = found.num_tokens / (weight * found.wait_s + found.round_s)
            if rate > best_rate:
                best_goal, best, best_rate = goal, found, rate
        gained_s = (best.num_tokens - now.num_tokens) * now.round_s / now.num_tokens
        lost_s = weight * best.wait_s + best.round_s - now.round_s
        return best_goal, gained_s * margin > lost_s

    def _waiting(self, goal: int, depth: int, accepted: Sequence[float], *, is_running: bool) -> Expectation:
        """Return the expectation of a round that waits for `goal` tokens of a main line; `depth` have arrived.

        `accepted` has the tokens that are expected to be accepted of a main line of each length.
        """
        if not (self.draft.known and self._times.known):
            return _UNKNOWN
        wait_s = self.draft.arrival_s(goal - depth, is_running=is_running)
        num_nodes = self._nodes_beside(goal)
        num_tokens = 1 + accepted[goal] * self._prediction_ratio.value
        return Expectation(wait_s, self._round_s(num_nodes), num_tokens, 1 + num_nodes)

    def _nodes_beside(self, goal: int) -> float:
        """Return the nodes that a round is expected to verify with a main line of that length, at least as many.

        They grow with the main line, but not beyond what rounds verify: a draft bounds the nodes of its trees.
        """
        grown = goal * self._width.value
        return min(grown, max(goal, self._num_nodes.value)) if self._num_nodes.known else grown

    def _now(self, stock: Sequence[float]) -> Expectation:
        """Return the expectation of a round that goes on at once, with those nodes of the stock that pay."""
        if not self._times.known:
            return _UNKNOWN
        best = Expectation(0.0, self._round_s(0), 1.0, 1.0)
        best_rate, gained = 1 / best.round_s, 1.0
        for num, value in enumerate(stock, 1):
            gained += value
            round_s = self._round_s(num)
            if gained / round_s > best_rate:
                best, best_rate = Expectation(0.0, round_s, gained, 1.0 + num), gained / round_s
        return best

    def _round_s(self, num_nodes: float) -> float:
        num_rows = math.ceil(self._times.num_sessions * (1 + num_nodes))
        return self._times.round_s(num_rows, speculates=num_nodes > 0)
