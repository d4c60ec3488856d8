"""Never slower than plain decoding: a target's rate with speculation and without it, compared by turns.

A session's controller (`policy`) weighs what it can predict: passes, waits, the values of nodes. What it cannot is what
drafts take from the target itself, where they share its cores, its memory or its device. So the whole is measured. Now
and then all sessions of a target decode without drafts for a few passes, or, where speculation is off, with them; the
output tokens a second decide which of both goes on. It is asked again the less often the more often it was confirmed.

The rates depend on how many sessions there are: each power of two has its own, and begins as the one below has ended
up. Those whose prompts are still read count too, so that drafts which will not pay do not hold up these prompts.
From four sessions on it also begins without speculation where more sessions were found to be slower with it: a target
that has just started finds out once under a full load, not again and again as that load ends.
They depend on where drafts are: one within the target's process is compared by a guard of its own.
"""

import math
from dataclasses import dataclass, field
from typing import Final

_WORTH: Final = 1.05
"""Speculation goes on above this ratio of the rates. What is measured as equal costs: drafts have texts to read first,
and sessions that end at different times leave passes less full (0.97 in full passes was 0.93 of a wave of 8)."""
_SETTLE: Final = 2
"""Passes after a change that do not count: proposals are on their way, or the first ones are."""
_TURNS: Final = 8
_TURNS_OF_ONE: Final = 16
"""Passes of a trial; of one session with speculation more, since the tokens of its passes vary most."""
_FIRST: Final = {True: 48, False: 128}
_MOST: Final = {True: 1024, False: 2048}
"""Passes with speculation, and without, from one trial of the other to the next: at first, and at most. With more
sessions fewer passes of the first kind show as much, down to a quarter."""
_INHERITED: Final = 1024
"""Passes without speculation until the first trial, where that is known from fewer sessions: more of them share the
same cores and drafts, and all drafts have their texts to read for a trial."""
_SEVERAL: Final = 3
"""The level, of four to seven sessions, from which on what more sessions were found to gain holds for fewer too."""
_TRIAL_SHARE: Final = 0.01
"""Share of the time that trials may take from then on: one that was found to cost much is long not repeated."""
_FINDINGS: Final = 2
"""Trials in a row that find speculation faster before they become rarer: one may have met a busy machine."""
_MOST_FASTER: Final = 4
_LEAST_SHARE: Final = 0.5
"""Of a pass's time, what prompts do not take: where they take more, what is left of it is known too badly to count."""
_DECAY: Final = 0.985
_MAX_RATIO: Final = 4.0
"""A pass counts as at most so many times as long as the mean: a stall of the machine shows nothing."""


@dataclass(slots=True)
class _Rate:
    """Tokens and seconds of passes, in which old ones decay."""

    tokens: float = 0.0
    seconds: float = 0.0
    num: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        if self.num > 0:
            seconds = min(seconds, _MAX_RATIO * self.seconds / self.num)
        self.tokens = _DECAY * self.tokens + tokens
        self.seconds = _DECAY * self.seconds + seconds
        self.num = _DECAY * self.num + 1

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def pass_s(self) -> float:
        return self.seconds / self.num if self.num > 0 else 0.0


@dataclass(slots=True)
class _Case:
    """What is known for a number of sessions.

    Attributes:
        level: of the number of sessions, from 1.
        speculates: what goes on but for trials.
        is_trial: whether the other is being tried.
        num_passes: since that changed.
        interval: passes until the next trial.
        num_findings: trials in a row that found what goes on now.
        rates: with speculation (True) and without.
        trial: tokens and seconds of the last trial, with its passes that do not count for the rate.
    """

    level: int
    speculates: bool = True
    is_trial: bool = False
    num_passes: int = 0
    interval: int = 0
    num_findings: int = 0
    rates: dict[bool, _Rate] = field(default_factory=lambda: {True: _Rate(), False: _Rate()})
    trial: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self.interval = self.first_interval

    @property
    def first_interval(self) -> int:
        return _FIRST[True] // min(_MOST_FASTER, self.level) if self.speculates else _FIRST[False]

    @property
    def num_turns(self) -> int:
        return _TURNS_OF_ONE if self.level == 1 and self.allows else _TURNS

    @property
    def allows(self) -> bool:
        return self.speculates is not self.is_trial

    @property
    def is_decided(self) -> bool:
        """Whether a trial has decided what goes on."""
        return self.num_findings > 0

    def begin_without(self, interval: int) -> None:
        """Go on without speculation, and try it after so many passes."""
        self.speculates, self.is_trial, self.num_passes, self.interval = False, False, 0, interval

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Observe a pass; decide at the end of a trial."""
        self.num_passes += 1
        if self.num_passes > _SETTLE:
            self.rates[self.allows].add(num_tokens, seconds)
        if self.is_trial:
            self.trial = self.trial[0] + num_tokens, self.trial[1] + seconds
        if not self.is_trial and self.num_passes >= self.interval:
            self.is_trial, self.num_passes, self.trial = True, 0, (0.0, 0.0)
            self.rates[self.allows] = _Rate()
        elif self.is_trial and self.num_passes >= _SETTLE + self.num_turns:
            self._decide()

    def _decide(self) -> None:
        before = self.speculates
        self.speculates = self.rates[True].value >= _WORTH * self.rates[False].value
        is_same = self.speculates is before
        self.num_findings = self.num_findings + 1 if is_same else 1
        if self.speculates and self.num_findings < _FINDINGS:
            self.interval = self.first_interval
        else:
            interval = 2 * self.interval if is_same else self.first_interval
            self.interval = min(max(interval, self._least_interval(is_same=is_same)), _MOST[self.speculates])
        self.is_trial, self.num_passes = False, 0

    def _least_interval(self, *, is_same: bool) -> int:
        """Return the passes after which a trial of what was found to be slower takes no more than its share."""
        kept, other = self.rates[self.speculates], self.rates[not self.speculates]
        if kept.value <= 0:
            return 0
        num_tokens, seconds = self.trial
        if not is_same:
            # What is slower has gone on until now, so that no trial of it was measured.
            seconds = (_SETTLE + self.num_turns) * other.pass_s
            num_tokens = seconds * other.value
        # What the same tokens would not have taken: texts that drafts have to read first may take most of a trial.
        lost_s = max(0.0, seconds - num_tokens / kept.value)
        return math.ceil(lost_s / kept.pass_s / _TRIAL_SHARE)


class SpeculationGuard:
    """Decides whether the sessions of a target speculate, all that are drafted for in one place; see the module."""

    def __init__(self) -> None:
        self._cases: dict[int, _Case] = {}
        self._case = self._cases.setdefault(1, _Case(1))
        self._last: tuple[_Case, float] | None = None

    @property
    def allows(self) -> bool:
        """Whether sessions may have drafts now."""
        return self._case.allows

    def allows_at(self, num_sessions: int) -> bool:
        """Whether sessions may have drafts while so many of them are open, as far as is known; at least 1."""
        return self._below(num_sessions.bit_length()).speculates

    def count(self, num_sessions: int) -> None:
        """Take as many sessions into account from now on.

        Args:
            num_sessions: that are open, whether they decode, wait for a proposal, or have prompts that are still read;
                at least 1.
        """
        self._case = self._found(num_sessions.bit_length())

    def observe(self, now: float, num_tokens: int, *, counts: bool, prompts_s: float = 0.0) -> None:
        """Observe a pass.

        Args:
            now: monotonic time of its end, in seconds.
            num_tokens: that it output.
            counts: whether it shows a rate: most sessions decode, and could speculate.
            prompts_s: seconds that prompts are expected to have taken in it, which are left out.
        """
        last, self._last = self._last, (self._case, now) if counts else None
        if not counts or last is None or last[0] is not self._case:
            return
        rest_s = now - last[1] - prompts_s
        if rest_s >= _LEAST_SHARE * (now - last[1]):
            self._case.observe(num_tokens, rest_s)

    def _found(self, level: int) -> _Case:
        if level not in self._cases:
            self._cases[level] = _Case(level)
        case = self._cases[level]
        # What no trial has decided begins anew: more may be known now about other numbers of sessions.
        if case is not self._case and case.speculates and not case.is_decided:
            if level > 1 and not self._below(level - 1).speculates:
                case.begin_without(_INHERITED)
            elif self._is_slow_above(level):
                case.begin_without(_FIRST[False])
        return case

    def _is_slow_above(self, level: int) -> bool:
        """Return whether the next level above that is decided was found to be slower with speculation."""
        above = [known for known, case in self._cases.items() if known > level and case.is_decided]
        return level >= _SEVERAL and bool(above) and not self._cases[min(above)].speculates

    def _below(self, level: int) -> _Case:
        """Return what is known for this level, else for the next one below."""
        return self._cases[max(known for known in self._cases if known <= level)]
