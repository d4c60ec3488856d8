"""How long a step of vLLM waits for proposals, and what of them it verifies.

All requests of a step wait together and share its time. A step that waits w seconds, after which request i has a line
of d_i tokens, yields sum_i (1 + E_i(d_i)) tokens in w + T(sum_i (1 + d_i)) seconds. T is the measured time of a step
over so many rows (`outrider.control.pass_times`); E_i is the expected number of accepted tokens of a line, by the
measured acceptance rates of its draft (Leviathan et al. 2023, equation 1, with a rate for each depth). The wait is the
one with the highest rate among those after which another token is expected; 0 where none beats going on at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outrider.control.allocation import allocate
from outrider.control.draft_times import DraftTimes
from outrider.control.pass_times import PassTimes
from outrider.speculation.acceptance import AcceptanceRates
from outrider.speculation.proposal_tree import Candidate

_RUNNING_WAIT: Final = 1.75
"""Weight of a wait: a draft that runs ahead drafts on while vLLM's step runs, so what is not waited for is there for
the next step (as in `outrider.control.policy`)."""
_PATIENCE: Final = 3.0
_PATIENCE_S: Final = 0.01
"""A token is given up after so many times its expected seconds, and so many seconds more."""
_OVERDUE: Final = 0.3
"""Share of its expected seconds after which a token that is overdue is expected."""


@dataclass(frozen=True, slots=True)
class Line:
    """The tokens that a request's draft has proposed after its text, and those that may come.

    Attributes:
        values: of the tokens that have arrived, the estimated probability that each one and all before it are accepted.
        max_depth: most tokens that may be verified.
        rates: acceptance rates of its draft.
        times: of the draft's answers; None where no draft has the request open.
        is_running: whether the draft is drafting them already.
        asked_s: seconds since the draft was told the end of the text, or since its last token where it is running.
        may_grow: whether the draft may send more tokens before the next step.
        first_depth: depth of the line's first token below the tree's base, for the rates.
    """

    values: Sequence[float]
    max_depth: int
    rates: AcceptanceRates
    times: DraftTimes | None = None
    is_running: bool = False
    asked_s: float = 0.0
    may_grow: bool = True
    first_depth: int = 1


def verified(lines: Sequence[Line], max_rows: int, times: PassTimes) -> list[int]:
    """Return the number of tokens of each line that a step verifies: those worth most, while they pay.

    Args:
        lines: of the requests that decode in the step.
        max_rows: rows of the step, at most.
        times: of steps.
    """
    found = [
        [Candidate(number, value) for number, value in enumerate(line.values[: line.max_depth], 1)] for line in lines
    ]
    return [len(chosen) for chosen in allocate(found, len(lines), len(lines), max_rows, times)]


def best_wait_s(lines: Sequence[Line], depths: Sequence[int], max_wait_s: float, times: PassTimes) -> float:
    """Return the seconds to wait before a step; 0 to begin it at once.

    Args:
        lines: of the requests that decode in the step.
        depths: tokens of each that a step at once would verify.
        max_wait_s: longest wait.
        times: of steps.
    """
    coming = sorted(
        (wait_s, value)
        for line, depth in zip(lines, depths, strict=True)
        for wait_s, value in _expected(line, depth)
        if wait_s <= max_wait_s
    )
    if not coming:
        return 0.0
    if not times.known:
        return coming[-1][0]
    num_rows = len(lines) + sum(depths)
    num_tokens = len(lines) + sum(sum(line.values[:depth]) for line, depth in zip(lines, depths, strict=True))
    best_s, best_rate = 0.0, num_tokens / times.round_s(num_rows, speculates=num_rows > len(lines))
    for wait_s, value in coming:
        num_rows += 1
        num_tokens += value
        rate = num_tokens / (_RUNNING_WAIT * wait_s + times.round_s(num_rows, speculates=True))
        if rate > best_rate:
            best_s, best_rate = wait_s, rate
    return best_s


def _expected(line: Line, depth: int) -> list[tuple[float, float]]:
    """Return the seconds until each further token of a line is expected, and its value."""
    if line.times is None or not line.times.known or not line.may_grow:
        return []
    reached = line.values[depth - 1] if depth else 1.0
    # What has arrived and is not verified now, because it does not pay, is not waited for either.
    if depth < len(line.values):
        return []
    waits = []
    for step in range(1, line.max_depth - depth + 1):
        reached *= line.rates.value(line.first_depth + depth + step - 1, 1)
        wait_s = line.times.arrival_s(step, is_running=line.is_running)
        if line.asked_s > _PATIENCE * wait_s + _PATIENCE_S:
            break
        waits.append((max(_OVERDUE * wait_s, wait_s - line.asked_s), reached))
    return waits
