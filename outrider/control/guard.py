"""Never slower than plain decoding: the time per output token with speculation and without it, compared by turns.

A session's controller (`policy`) weighs what it can predict: passes, waits, the values of nodes. What it cannot is what
drafts take from the target itself, where they share its cores, its memory or its device. So the whole is measured. Now
and then all sessions of a target decode without drafts for a few passes, or, where speculation is off, with them; the
time per output token decides which of both goes on. It is the mean of the sessions, not the time of all their tokens:
one text that repeats itself yields many tokens a pass, and makes the passes of all others longer.

On cores that others use too, one comparison is by a tenth too high or too low. So what comparisons show is added up,
within bounds, and decides by its sign. At a bound it is certain, and asked again the less often the longer it is.

The times depend on how many sessions there are: each power of two has its own, and begins as the one below has ended
up. Those whose prompts are still read count too, so that drafts which will not pay do not hold up these prompts.
From four sessions on it also begins without speculation where more sessions were found to be slower with it: a target
that has just started finds out once under a full load, not again and again as that load ends.
They depend on where drafts are: one within the target's process is compared by a guard of its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

_WORTH: Final = 1.05
"""Speculation goes on where plain decoding takes so many times as long per token. What is measured as equal costs:
drafts have texts to read first, and sessions that end at different times leave passes less full (0.97 in full passes
was 0.93 of a wave of 8)."""
_SETTLE: Final = 2
"""Passes after a change that do not count: proposals are on their way, or the first ones are."""
_TURNS: Final = {True: 12, False: 8}
"""Passes of a trial with speculation, and without: the tokens of passes with it vary."""
_FIRST: Final = {True: 48, False: 128}
_MOST: Final = {True: 1024, False: 4096}
"""Passes with speculation, and without, from one trial of the other to the next: at first, and at most. With more
sessions fewer passes of the first kind show as much, down to a quarter."""
_INHERITED: Final = 1024
"""Passes without speculation until the first trial, where that is known from fewer sessions: more of them share the
same cores and drafts, and all drafts have their texts to read for a trial."""
_SEVERAL: Final = 3
"""The level, of four to seven sessions, from which on what more sessions were found to gain holds for fewer too."""
_TRIAL_SHARE: Final = 0.005
"""Share of the time that trials may take from then on: one that was found to cost much is long not repeated."""
_MOST_OF_ONE: Final = 0.2
_CERTAIN: Final = 0.3
"""What one trial can show, and all together, as logarithms of ratios: one may have met a busy machine, and what was
found a hundred times can change."""
_MOST_FASTER: Final = 4
_LEAST_SHARE: Final = 0.5
"""Of a pass's time, what prompts do not take: where they take more, what is left of it is known too badly to count."""
_DECAY: Final = 0.985
_LEAST_PART: Final = 0.01
"""Of the time of all passes, what a session that has ended is kept for."""
_LEAST_TOKENS: Final = 0.5
"""A session without any token counts as if it had so many."""
_MAX_RATIO: Final = 4.0
"""A pass counts as at most so many times as long as the mean: a stall of the machine shows nothing."""


class _TokenTimes:
    """The time per output token of each session, over passes of which old ones decay.

    Args:
        decay: what each pass leaves of those before.

    Attributes:
        seconds: of all passes.
    """

    def __init__(self, decay: float = _DECAY) -> None:
        self.seconds = self._num = 0.0
        self._decay = decay
        self._sessions: dict[int, tuple[float, float]] = {}

    def add(self, num_tokens: Mapping[int, int], seconds: float) -> None:
        """Add a pass; `num_tokens` has each session that decoded, or waited for a proposal meanwhile."""
        if self._num:
            seconds = min(seconds, _MAX_RATIO * self.pass_s)
        decay = self._decay
        self.seconds = decay * self.seconds + seconds
        self._num = decay * self._num + 1
        sessions = {number: (decay * tokens, decay * spent) for number, (tokens, spent) in self._sessions.items()}
        for number, num in num_tokens.items():
            tokens, spent = sessions.get(number, (0.0, 0.0))
            sessions[number] = tokens + num, spent + seconds
        self._sessions = {key: item for key, item in sessions.items() if item[1] > _LEAST_PART * self.seconds}

    @property
    def per_token_s(self) -> float:
        """Seconds per output token: the mean of the sessions, by how long each was there; 0 before any."""
        times = self._sessions.values()
        whole_s = sum(spent for _, spent in times)
        return sum(spent**2 / max(_LEAST_TOKENS, tokens) for tokens, spent in times) / whole_s if whole_s else 0.0

    @property
    def pass_s(self) -> float:
        """Seconds of a pass; 0 before any."""
        return self.seconds / self._num if self._num else 0.0


@dataclass(slots=True)
class _Case:
    """What is known for a number of sessions.

    Attributes:
        level: of the number of sessions, from 1.
        speculates: what goes on but for trials.
        is_trial: whether the other is being tried.
        num_passes: since that changed.
        interval: passes until the next trial.
        evidence: what trials have shown, as the logarithm of how many times as fast speculation is, over what it has to
            be; None before the first.
        times: with speculation (True) and without.
        trial: of the last trial, with its passes that do not count for the times.
    """

    level: int
    speculates: bool = True
    is_trial: bool = False
    num_passes: int = 0
    interval: int = 0
    evidence: float | None = None
    times: dict[bool, _TokenTimes] = field(default_factory=lambda: {True: _TokenTimes(), False: _TokenTimes()})
    trial: _TokenTimes = field(default_factory=_TokenTimes)

    def __post_init__(self) -> None:
        self.interval = self.first_interval

    @property
    def first_interval(self) -> int:
        return _FIRST[True] // min(_MOST_FASTER, self.level) if self.speculates else _FIRST[False]

    @property
    def num_turns(self) -> int:
        return _TURNS[self.allows]

    @property
    def allows(self) -> bool:
        return self.speculates is not self.is_trial

    @property
    def is_decided(self) -> bool:
        """Whether a trial has decided what goes on."""
        return self.evidence is not None

    @property
    def is_certain(self) -> bool:
        return self.evidence is not None and abs(self.evidence) >= _CERTAIN

    def begin_without(self, interval: int) -> None:
        """Go on without speculation, and try it after so many passes."""
        self.speculates, self.is_trial, self.num_passes, self.interval = False, False, 0, interval

    def observe(self, num_tokens: Mapping[int, int], seconds: float) -> None:
        """Observe a pass; decide at the end of a trial."""
        self.num_passes += 1
        if self.num_passes > _SETTLE:
            self.times[self.allows].add(num_tokens, seconds)
        if self.is_trial:
            self.trial.add(num_tokens, seconds)
        if not self.is_trial and self.num_passes >= self.interval:
            self.is_trial, self.num_passes, self.trial = True, 0, _TokenTimes(decay=1.0)
            self.times[self.allows] = _TokenTimes()
        elif self.is_trial and self.num_passes >= _SETTLE + self.num_turns:
            self._decide()

    def _decide(self) -> None:
        before = self.speculates
        gain = math.log(self.times[False].per_token_s / (_WORTH * self.times[True].per_token_s))
        evidence = (self.evidence or 0.0) + max(-_MOST_OF_ONE, min(_MOST_OF_ONE, gain))
        self.evidence = max(-_CERTAIN, min(_CERTAIN, evidence))
        self.speculates = self.evidence >= 0
        is_same = self.speculates is before
        if self.speculates and not self.is_certain:
            self.interval = self.first_interval
        else:
            interval = 2 * self.interval if is_same and self.is_certain else self.first_interval
            self.interval = min(max(interval, self._least_interval(is_same=is_same)), _MOST[self.speculates])
        self.is_trial, self.num_passes = False, 0

    def _least_interval(self, *, is_same: bool) -> int:
        """Return the passes after which a trial of what was found to be slower takes no more than its share."""
        kept, other = self.times[self.speculates], self.times[not self.speculates]
        # Texts that drafts have to read first may take most of a trial.
        trial, seconds = self.trial, self.trial.seconds
        if not is_same:
            # What is slower has gone on until now, so that no trial of it was measured.
            trial, seconds = other, (_SETTLE + self.num_turns) * other.pass_s
        # What the same tokens would not have taken.
        lost_s = seconds * max(0.0, 1 - kept.per_token_s / trial.per_token_s)
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

    def observe(self, now: float, num_tokens: Mapping[int, int], *, counts: bool, prompts_s: float = 0.0) -> None:
        """Observe a pass.

        Args:
            now: monotonic time of its end, in seconds.
            num_tokens: that each session output, by its number; 0 for those that decode and took no part in it.
            counts: whether it shows a time per token: most sessions decode, and could speculate.
            prompts_s: seconds that prompts are expected to have taken in it, which are left out.
        """
        last, self._last = self._last, (self._case, now) if counts else None
        if not counts or last is None or last[0] is not self._case:
            return
        rest_s = now - last[1] - prompts_s
        if rest_s > 0 and rest_s >= _LEAST_SHARE * (now - last[1]):
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
