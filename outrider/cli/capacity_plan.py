"""How many targets, drafts and orchestrators a load needs, computed from measured times.

The model, for S sessions on a target that verify k drafted tokens in each round, and M sessions on a draft:

    pass       P(S) = pass_s + S (1 + k) row_s + S rest_s
    draft step D(M) = draft_step_s + M draft_row_s
    wait       W    = (1 - hit_rate) (rtt_s + k D(M))
    round      R    = min over g of max(g P(S/g), W + P(S/g))
    tokens     E    = 1 + a + a^2 + ... + a^k            (Leviathan et al. 2023, eq. 1, with the bonus token)

`g` groups of sessions take turns: while one waits for its drafts, the others are in passes. A session gets E / R tokens
a second. A draft is busy for k D(M) of each round's R seconds. Where the target drafts for itself there is no wait, and
P(S) has k D(S) beside it; without any draft k is 0.

Left out: acceptance that differs from token to token, prompts, and what the controller does about load
beyond the longest line. Held against `outrider bench capacity` in tests.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from outrider.errors import InvalidArgument

_MAX_SESSIONS: Final = 4096
_MAX_GROUPS: Final = 8


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measured times of the models and the network between them.

    Attributes:
        pass_s: seconds of a target's pass, rows aside.
        row_s: seconds that a row adds to it.
        draft_step_s: seconds of a draft's step, rows aside.
        draft_row_s: seconds that a session adds to it.
        acceptance: probability that a drafted token is accepted, given those before it; in [0, 1).
        rtt_s: seconds from the target to the draft and back.
        hit_rate: share of rounds whose proposal is there at once, because the draft runs ahead; in [0, 1]. 0 has it
            wait for each verdict.
        rest_s: seconds of all else that a round takes, for each session of the target.
    """

    pass_s: float
    row_s: float
    draft_step_s: float
    draft_row_s: float
    acceptance: float
    rtt_s: float = 0.001
    hit_rate: float = 0.0
    rest_s: float = 0.001

    def __post_init__(self) -> None:
        for name in ("pass_s", "draft_step_s"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"{name} is {getattr(self, name):g}, must be positive", name)
        for name in ("row_s", "draft_row_s", "rtt_s", "rest_s"):
            if getattr(self, name) < 0:
                raise InvalidArgument(f"{name} is {getattr(self, name):g}, must not be negative", name)
        if not 0 <= self.acceptance < 1:
            raise InvalidArgument(f"acceptance is {self.acceptance:g}, must be in [0, 1)", "acceptance")
        if not 0 <= self.hit_rate <= 1:
            raise InvalidArgument(f"hit_rate is {self.hit_rate:g}, must be in [0, 1]", "hit_rate")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Requirements on a fleet.

    Attributes:
        num_sessions: that generate at once.
        rate: tokens a second that each of them gets, at least.
        max_sessions: sessions of a target, at most; what its KV cache holds.
        num_speculative_tokens: longest main line, at most.
        draft_busy: share of the time that drafts may be busy with what targets wait for.
        sessions_per_orchestrator: as one process carries them.
        draft_cost: of a draft, where a target costs 1.
    """

    num_sessions: int
    rate: float
    max_sessions: int = 256
    num_speculative_tokens: int = 7
    draft_busy: float = 0.9
    sessions_per_orchestrator: int = 160
    draft_cost: float = 0.25

    def __post_init__(self) -> None:
        for name in ("num_sessions", "rate", "max_sessions", "sessions_per_orchestrator", "draft_busy"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"{name} is {getattr(self, name):g}, must be positive", name)
        if not 0 <= self.num_speculative_tokens <= 64:
            problem = f"num_speculative_tokens is {self.num_speculative_tokens}, must be in [0, 64]"
            raise InvalidArgument(problem, "num_speculative_tokens")
        if self.draft_cost < 0:
            raise InvalidArgument(f"draft_cost is {self.draft_cost:g}, must not be negative", "draft_cost")


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet that meets the requirements.

    Attributes:
        kind: "plain", "colocated" or "separate" (drafts in services of their own).
        num_targets: replicas of the target.
        num_drafts: replicas of the draft.
        num_orchestrators: replicas of the orchestrator.
        num_speculative_tokens: length of main line in the computation.
        sessions_per_target: sessions on each target.
        rate: tokens a second of each session.
        cost: of targets and drafts together, where a target costs 1.
    """

    kind: str
    num_targets: int
    num_drafts: int
    num_orchestrators: int
    num_speculative_tokens: int
    sessions_per_target: int
    rate: float
    cost: float


def plan(measured: Measurements, wanted: Wanted) -> list[Fleet]:
    """Return the cheapest fleet of each kind that does what is wanted: without drafts, colocated, separate.

    A kind that cannot, however many replicas it has, is left out.
    """
    makers = (_plain, _colocated, _separate)
    found = (
        min(maker(measured, wanted), key=lambda fleet: (fleet.cost, -fleet.rate), default=None) for maker in makers
    )
    return [fleet for fleet in found if fleet is not None]


def best_rate(measured: Measurements, wanted: Wanted) -> float:
    """Return the most tokens a second that any fleet gives a session: one on each target, and on each draft."""
    lines = range(wanted.num_speculative_tokens + 1)
    return max(max(_rate(measured, line, 1, 1), _colocated_rate(measured, line, 1)) for line in lines)


def tokens_per_round(acceptance: float, num_speculative_tokens: int) -> float:
    """Return E of the module's model: tokens that a round gives on average, its own one included."""
    return sum(acceptance**depth for depth in range(num_speculative_tokens + 1))


def _plain(measured: Measurements, wanted: Wanted) -> Iterator[Fleet]:
    num = _most(lambda sessions: _rate(measured, 0, sessions, 1), wanted)
    if num:
        yield _fleet("plain", wanted, 0, num, 0, _rate(measured, 0, num, 1))


def _colocated(measured: Measurements, wanted: Wanted) -> Iterator[Fleet]:
    for line in range(1, wanted.num_speculative_tokens + 1):

        def rate(sessions: int, line: int = line) -> float:
            return _colocated_rate(measured, line, sessions)

        if num := _most(rate, wanted):
            yield _fleet("colocated", wanted, line, num, 0, rate(num))


def _separate(measured: Measurements, wanted: Wanted) -> Iterator[Fleet]:
    for line in range(1, wanted.num_speculative_tokens + 1):
        for num_drafted in _steps_up_to(min(wanted.num_sessions, _MAX_SESSIONS)):

            def rate(sessions: int, line: int = line, num_drafted: int = num_drafted) -> float:
                return _rate(measured, line, sessions, num_drafted)

            num = _most(rate, wanted)
            if not num:
                break
            round_s = tokens_per_round(measured.acceptance, line) / rate(num)
            if line * _step_s(measured, num_drafted) > wanted.draft_busy * round_s:
                break
            yield _fleet("separate", wanted, line, num, math.ceil(wanted.num_sessions / num_drafted), rate(num))


def _steps_up_to(most: int) -> Iterator[int]:
    """Yield numbers of sessions a draft, each a tenth larger than the one before, or by one."""
    num = 1
    while num < most:
        yield num
        num = max(num + 1, int(num * 1.1))
    yield most


def _most(rate: Callable[[int], float], wanted: Wanted) -> int:
    """Return how many sessions a target may have so that each gets the rate; 0 where not even one does."""
    low, high = 0, min(wanted.max_sessions, wanted.num_sessions, _MAX_SESSIONS)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if rate(middle) >= wanted.rate else (low, middle - 1)
    return low


def _fleet(kind: str, wanted: Wanted, line: int, sessions: int, num_drafts: int, rate: float) -> Fleet:
    num_targets = math.ceil(wanted.num_sessions / sessions)
    return Fleet(
        kind=kind,
        num_targets=num_targets,
        num_drafts=num_drafts,
        num_orchestrators=math.ceil(wanted.num_sessions / wanted.sessions_per_orchestrator),
        num_speculative_tokens=line,
        sessions_per_target=math.ceil(wanted.num_sessions / num_targets),
        rate=rate,
        cost=num_targets + num_drafts * wanted.draft_cost,
    )


def _rate(measured: Measurements, line: int, sessions: int, num_drafted: int) -> float:
    """Return the tokens a second of each session, with drafts in services of their own."""
    wait_s = (1 - measured.hit_rate) * (measured.rtt_s + line * _step_s(measured, num_drafted)) if line else 0.0
    rounds = (
        max(groups * _pass_s(measured, line, sessions / groups), wait_s + _pass_s(measured, line, sessions / groups))
        for groups in range(1, min(sessions, _MAX_GROUPS) + 1)
    )
    return tokens_per_round(measured.acceptance, line) / min(rounds)


def _colocated_rate(measured: Measurements, line: int, sessions: int) -> float:
    """Return the tokens a second of each session, the draft within the target's process."""
    round_s = _pass_s(measured, line, sessions) + line * _step_s(measured, sessions)
    return tokens_per_round(measured.acceptance, line) / round_s


def _pass_s(measured: Measurements, line: int, sessions: float) -> float:
    return measured.pass_s + sessions * ((1 + line) * measured.row_s + measured.rest_s)


def _step_s(measured: Measurements, sessions: float) -> float:
    return measured.draft_step_s + sessions * measured.draft_row_s
