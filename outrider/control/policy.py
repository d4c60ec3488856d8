"""What to speculate on, how long to wait for it, and when to leave it: the controller of a target. Arithmetic only.

**What a choice is worth.** A round of a session that waits `w` seconds, verifies nodes of which E are expected to be
accepted, and takes part in a pass of n such sessions, gives 1 + E tokens in w + T(n (1 + nodes)) seconds, T being the
measured time of a pass over so many rows, and of what such a round takes beside it. Before each round, and again as
nodes arrive (`SpeculationPolicy.begin`), this rate is compared for going on at once with what is here, and for
waiting until the main line is 1, 2, ... tokens long. E is the sum over nodes of the products of their measured values
(`outrider.speculation.acceptance`); for what is yet to come, that of its main line, times what was lately accepted
for each token that a main line promised. When it comes is measured too: a draft's answer to a verdict, and the time
of its steps. Waiting pays, against going on with E' expected in a pass of T', iff

    (E - E') T' / (1 + E') > w + T - T'

and where drafts wait for verdicts a choice is kept until the other looks better by a margin. For a draft that runs
ahead `w` counts more than it is: what such a draft makes meanwhile would be there for the next round without a wait. As
passes fill, n grows, and with it what a row costs everyone: speculation ends by itself, first where proposals are poor
or late.

**Rows.** All sessions of a pass share its time, so nodes compete (`allocate`): the ones worth most are taken, of
whichever session, for as long as the tokens that a second is expected to give grow.

**Late proposals** cost nothing and tell as much: nodes that come after the target went on are compared with what it
said meanwhile. So a session whose draft becomes useful, as when a text begins to copy its prompt, takes up speculation
again, and one whose draft is slow, wrong or dead decodes at the speed of plain decoding.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.control.draft_times import DraftTimes
from outrider.control.experience import Experience
from outrider.control.pass_times import DecayingMean, PassTimes
from outrider.speculation.acceptance import AcceptanceRates
from outrider.speculation.proposal_tree import Candidate

_RETRY_ROUNDS: Final = 64
"""Plain rounds after which one proposal is waited for again, since waits are only measured by waiting."""
_MAX_RETRY_ROUNDS: Final = 1024
"""As many once that has been in vain several times; each time doubles them."""
_MARGIN: Final = 1.1
"""How much better the other choice must look: passes in which some sessions wait and some do not serve neither well."""
_RUNNING_WAIT: Final = 1.75
"""What a wait for a draft that runs ahead counts: it works on while the target verifies, so what is not waited for now
is there for the next round (simulated passes, 20 ms: 20.8 tokens/s in place of 19.9)."""
_PATIENCE: Final = 3.0
_PATIENCE_S: Final = 0.01
"""A wait ends after so many times what was expected, and so many seconds: what has not come by then is late."""
_TRIAL_STRIDE: Final = 16
_FIRST_TRIALS: Final = (1, 3, 7)
"""Of so many rounds that have no use of a proposal, one asks for one all the same; of the first ones more, since what
ended speculation may have been a hiccup of the machine."""
_RUN_ROUNDS: Final = 16
_RUN_CYCLE: Final = 256
"""Of so many rounds that wait for nothing, so many have a draft that was of no use run ahead, to see whether it is."""
_LEAST_YIELD: Final = 0.05
"""Accepted tokens a round, of proposals that nothing waits for, below which they are not worth a draft's time."""
_LEAST_PART: Final = 0.5
_NEARLY: Final = 0.99
_USUAL_ROUNDS: Final = 6


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a round is expected to take and to give; all 0 while nothing has been measured.

    Attributes:
        wait_s: seconds that it waits for a proposal.
        round_s: seconds of its pass, together with all sessions that decode now, and of what is done around it.
        num_tokens: that it outputs.
        num_rows: that it takes of the pass.
    """

    wait_s: float = 0.0
    round_s: float = 0.0
    num_tokens: float = 0.0
    num_rows: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything is expected."""
        return self.num_tokens > 0


_NOTHING_KNOWN: Final = Expectation()


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What a session's next round does.

    Attributes:
        wait_s: longest wait for a proposal, in seconds; 0 to go on at once.
        depth: length of the main line that is enough to end the wait.
        num_speculative_tokens: length of the main line that the draft should propose before all else; 0 where it should
            propose nothing.
        is_trial: whether it should, but only to show how good it is now: what comes late is compared with the text.
        expects: what it is expected to take and to give.
    """

    wait_s: float = 0.0
    depth: int = 0
    num_speculative_tokens: int = 0
    is_trial: bool = False
    expects: Expectation = _NOTHING_KNOWN

    @property
    def wants_draft(self) -> bool:
        """Whether the draft should propose anything."""
        return self.num_speculative_tokens > 0


class SpeculationPolicy:
    """Decides for one session, before each round and again as nodes arrive; see the module.

    Args:
        max_wait_s: longest wait; 0 when nothing will come.
        experience: what the target has measured so far; the session adds to it.
        adapts: whether to stop waiting where that does not pay; without it every round waits.
    """

    def __init__(self, max_wait_s: float, experience: Experience, *, adapts: bool = True) -> None:
        self.max_wait_s = max_wait_s
        self.draft = DraftTimes(experience.answers)
        self.rates = AcceptanceRates(experience.rates)
        self._experience = experience
        self._times = experience.times
        self._adapts = adapts
        # One bad round at the beginning says little.
        self._came_true = DecayingMean(0.08, experience.came_true.value, _USUAL_ROUNDS)
        self._yield = DecayingMean(0.1)
        self._width = DecayingMean(0.1, 1.0, _USUAL_ROUNDS)
        self._plain_rounds = 0
        self._retry_rounds = _RETRY_ROUNDS
        self._waited = True
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
        drafts_here: bool = False,
    ) -> RoundPlan:
        """Returns what the next round does; asked again within a round, what it still does.

        Args:
            stock: values of the nodes that are here for it, those worth most first.
            depth: length of the main line among them.
            max_depth: longest main line that may be verified; 0 where there is no draft.
            min_depth: shortest main line that it is of use to wait for.
            runs_ahead: whether the draft goes on without waiting for verdicts.
            is_answering: whether its answer to the last verdict has begun to arrive.
            drafts_here: whether the target drafts itself, which it does for rounds that wait.
        """
        if self.max_wait_s <= 0 or max_depth <= 0:
            return RoundPlan(expects=self._now([]))
        is_running = (runs_ahead or is_answering) and depth > 0
        if not self._adapts:
            waits = depth < max_depth
            expects = self._waiting(max_depth, depth, is_running=is_running) if waits else self._now(stock)
            return RoundPlan(self.max_wait_s if waits else 0.0, max_depth, max_depth, expects=expects)
        shortest = min(max(depth + 1, min_depth), max_depth)
        # While the draft works on whether or not the round waits, changing one's mind costs nothing.
        margin = 1.0 if runs_ahead else _MARGIN if self._plain_rounds == 0 else 1 / _MARGIN
        weight = _RUNNING_WAIT if runs_ahead else 1.0
        goals = range(shortest, max_depth + 1)
        now = self._now(stock)
        goal, pays = self._best(now, depth, goals, margin, weight, is_running=is_running)
        self._expected_accepted = self.rates.expected_accepted(goal)
        if pays:
            self._retry_rounds = _RETRY_ROUNDS
        elif self._plain_rounds >= self._retry_rounds:
            self._retry_rounds = min(2 * self._retry_rounds, _MAX_RETRY_ROUNDS)
            goal = max_depth
        elif drafts_here and self._is_trial:
            goal = shortest
        else:
            is_wanted, is_trial = runs_ahead and self._is_worth_drafting, self._is_trial
            num_wanted = shortest if is_wanted else max_depth if is_trial else 0
            return RoundPlan(0.0, depth, num_wanted, is_trial=is_trial and not is_wanted, expects=now)
        expects = self._waiting(goal, depth, is_running=is_running)
        self._expected_wait_s = expects.wait_s if expects.is_known else None
        return RoundPlan(self._patience_s(), goal, goal, expects=expects)

    def whole(self, max_depth: int) -> Expectation:
        """Returns what a round is worth once a main line of the greatest length is here."""
        return self._waiting(max_depth, 0, is_running=False)

    def observe_round(self, num_accepted: int, depth: int, num_nodes: int, wait_s: float, *, waited: bool) -> None:
        """Takes a round into account that waited, or that verified something.

        Args:
            num_accepted: nodes that were kept.
            depth: of those that were verified; 0 where nothing had come, as from a draft that often has nothing to
                propose.
            num_nodes: that were verified, at least `depth`.
            wait_s: seconds that it waited.
            waited: whether it waited for them.
        """
        self._yield.observe(num_accepted)
        if not waited:
            self._plain_rounds += 1
            return
        self._plain_rounds = 0
        if depth:
            self._width.observe(num_nodes / depth)
        self._observe_outcome(num_accepted, self.rates.expected_accepted(depth) if depth else self._expected_accepted)
        if depth == 0 and wait_s >= _NEARLY * self._patience_s():
            self.draft.note_silence(wait_s)

    def observe_plain(self) -> None:
        """Takes a round into account that neither waited nor verified anything."""
        self._yield.observe(0)
        self._plain_rounds += 1

    def observe_late(self, num_matching: int, num_asked: int) -> None:
        """Takes a proposal into account that came too late.

        Args:
            num_matching: how many of its tokens the target gave by itself.
            num_asked: length of the main line that was asked for.
        """
        self._observe_outcome(min(num_matching, num_asked), self.rates.expected_accepted(num_asked))

    def _observe_outcome(self, num_accepted: int, expected: float) -> None:
        if expected > 0:
            self._came_true.observe(num_accepted / expected)
            self._experience.came_true.observe(num_accepted / expected)

    def _patience_s(self) -> float:
        if self._expected_wait_s is None:
            return self.max_wait_s
        return min(self.max_wait_s, _PATIENCE * self._expected_wait_s + _PATIENCE_S)

    @property
    def _is_trial(self) -> bool:
        return self._plain_rounds % _TRIAL_STRIDE == 1 or self._plain_rounds in _FIRST_TRIALS

    @property
    def _is_worth_drafting(self) -> bool:
        """Whether what nothing waits for is of use all the same; tried out now and then."""
        return self._plain_rounds % _RUN_CYCLE < _RUN_ROUNDS or self._yield.value >= _LEAST_YIELD

    def _best(
        self, now: Expectation, depth: int, goals: range, margin: float, weight: float, *, is_running: bool
    ) -> tuple[int, bool]:
        """Returns the length of the main line to wait for, and whether waiting pays; at first it does."""
        if depth >= goals[-1]:
            return depth, False
        if not (self.draft.known and self._times.known):
            return goals[-1], True
        best_goal, best, best_rate = goals[0], now, 0.0
        for goal in goals:
            found = self._waiting(goal, depth, is_running=is_running)
            if found.wait_s > self.max_wait_s and goal > goals[0]:
                break
            rate = found.num_tokens / (weight * found.wait_s + found.round_s)
            if rate > best_rate:
                best_goal, best, best_rate = goal, found, rate
        gained_s = (best.num_tokens - now.num_tokens) * now.round_s / now.num_tokens
        lost_s = weight * best.wait_s + best.round_s - now.round_s
        return best_goal, gained_s * margin > lost_s

    def _waiting(self, goal: int, depth: int, *, is_running: bool) -> Expectation:
        """Returns what a round is worth that waits for a main line of a length, of which so much is here."""
        if not (self.draft.known and self._times.known):
            return _NOTHING_KNOWN
        wait_s = self.draft.arrival_s(goal - depth, is_running=is_running)
        num_nodes = goal * self._width.value
        accepted = self.rates.expected_accepted(goal) * self._came_true.value
        return Expectation(wait_s, self._round_s(num_nodes), 1 + accepted, 1 + num_nodes)

    def _now(self, stock: Sequence[float]) -> Expectation:
        """Returns what a round is worth that goes on at once, with those nodes of the stock that are worth it."""
        if not self._times.known:
            return _NOTHING_KNOWN
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


def allocate(
    candidates: Sequence[Iterable[Candidate]],
    num_tokens: float,
    num_rows: int,
    max_rows: int,
    times: PassTimes,
    wait_s: float = 0.0,
) -> list[list[int]]:
    """Returns the nodes of each session that a pass takes, parents before children; see the module.

    Args:
        candidates: of each session that takes part in this pass, those worth most first.
        num_tokens: that the pass is expected to give without them.
        num_rows: rows of the pass without them.
        max_rows: rows of the pass, at most.
        times: what passes take; where nothing is known, all nodes are taken for which there is room.
        wait_s: seconds that these rounds have waited, on average; a round that has cost so much should bring more.
    """
    chosen: list[tuple[int, int]] = []
    best_len, best_rate = 0, num_tokens / (wait_s + times.round_s(num_rows)) if times.known else 0.0
    for value, place, number in heapq.merge(*(_ordered(place, found) for place, found in enumerate(candidates))):
        if num_rows + len(chosen) >= max_rows:
            break
        chosen.append((place, number))
        if not times.known:
            best_len = len(chosen)
            continue
        num_tokens -= value
        rate = num_tokens / (wait_s + times.round_s(num_rows + len(chosen), speculates=True))
        if rate > best_rate:
            best_len, best_rate = len(chosen), rate
        elif times.sizes.is_full(num_rows + len(chosen)) and -value < _LEAST_PART * best_rate * times.row_s:
            break
    parts: list[list[int]] = [[] for _ in candidates]
    for place, number in chosen[:best_len]:
        parts[place].append(number)
    return parts


def _ordered(place: int, candidates: Iterable[Candidate]) -> Iterator[tuple[float, int, int]]:
    for item in candidates:
        yield -item.value, place, item.number
