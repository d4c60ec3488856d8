"""What a target's rounds take in a simulation: the model of `outrider.planning`, with prompts beside it.

A round of S sessions, d of which have a draft that proposes k tokens, in g groups that take turns:

    pass   P = pass_s + (S + d k) row_s / g + S rest_s / g + prompt rows * row_s
    wait   W = (1 - hit_rate) (rtt_s + k D)
    round  R = max(g P, W + P)

k and g are those that give the most tokens a second without prompts, as the controller chooses by measured times. A
pass takes as many rows of prompts as a target's budget for them leaves (`target_service.pass_budget`).
"""

import math
from dataclasses import dataclass
from typing import Final

from outrider.planning import Measurements, tokens_per_round

_MAX_GROUPS: Final = 8
_MIN_PROMPT_ROWS: Final = 4


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """What bounds a target's passes.

    Attributes:
        max_line: longest main line of a round.
        max_pass_rows: rows of a pass.
        max_slowdown: how many times as long each prompt may make a pass.
    """

    max_line: int
    max_pass_rows: int
    max_slowdown: float


@dataclass(frozen=True, slots=True)
class RoundLoad:
    """What a target has to do.

    Attributes:
        num_decoding: sessions that decode.
        num_drafted: of these, those that have a draft.
        draft_step_s: seconds of their drafts' steps, on average.
        hit_rate: share of their rounds whose proposal is there at once.
        num_prompts: sessions whose prompt is run.
        num_prompt_rows: rows of prompts that a pass could take at most.
    """

    num_decoding: int
    num_drafted: int
    draft_step_s: float
    hit_rate: float
    num_prompts: int
    num_prompt_rows: float


@dataclass(frozen=True, slots=True)
class Round:
    """A round.

    Attributes:
        line: k, drafted tokens that are verified.
        round_s: seconds of a round.
        quiet_round_s: seconds of one without prompts.
        pass_s: seconds of a pass.
        passes_per_s: passes a second.
        prompt_rows: rows of prompts of each pass.
        num_tokens: that a drafted session gets; others get one.
    """

    line: int
    round_s: float
    quiet_round_s: float
    pass_s: float
    passes_per_s: float
    prompt_rows: float
    num_tokens: float


def best_round(measured: Measurements, limits: RoundLimits, load: RoundLoad) -> Round | None:
    """Returns the round that gives the most tokens a second; None where there is nothing to do."""
    if not load.num_decoding:
        if not load.num_prompts:
            return None
        rows = min(load.num_prompt_rows, limits.max_pass_rows)
        pass_s = measured.pass_s + rows * measured.row_s
        return Round(0, pass_s, pass_s, pass_s, 1 / pass_s, rows, 1.0)
    best = (0.0, 0, 1)
    for line in range(limits.max_line + 1 if load.num_drafted else 1):
        num_tokens = load.num_decoding + load.num_drafted * (tokens_per_round(measured.acceptance, line) - 1)
        wait_s = _wait_s(measured, load, line)
        for groups in range(1, min(load.num_decoding, _MAX_GROUPS) + 1):
            pass_s = _pass_s(measured, load, line, groups)
            best = max(best, (num_tokens / max(groups * pass_s, wait_s + pass_s), -line, -groups))
    line, groups = -best[1], -best[2]
    return _with_prompts(measured, limits, load, line, groups)


def _with_prompts(measured: Measurements, limits: RoundLimits, load: RoundLoad, line: int, groups: int) -> Round:
    pass_s, wait_s = _pass_s(measured, load, line, groups), _wait_s(measured, load, line)
    quiet_round_s = max(groups * pass_s, wait_s + pass_s)
    rows = 0.0
    if load.num_prompts:
        allowance_s = (limits.max_slowdown - 1) * load.num_prompts * pass_s
        num_allowed = allowance_s / measured.row_s if measured.row_s else math.inf
        num_decoded = (load.num_decoding + load.num_drafted * line) / groups
        room = max(_MIN_PROMPT_ROWS, limits.max_pass_rows - num_decoded)
        rows = min(load.num_prompt_rows, room, max(_MIN_PROMPT_ROWS, num_allowed))
    pass_s += rows * measured.row_s
    round_s = max(groups * pass_s, wait_s + pass_s)
    num_tokens = tokens_per_round(measured.acceptance, line)
    return Round(line, round_s, quiet_round_s, pass_s, groups / round_s, rows, num_tokens)


def _pass_s(measured: Measurements, load: RoundLoad, line: int, groups: int) -> float:
    num_rows = load.num_decoding + load.num_drafted * line
    return measured.pass_s + (num_rows * measured.row_s + load.num_decoding * measured.rest_s) / groups


def _wait_s(measured: Measurements, load: RoundLoad, line: int) -> float:
    return (1 - load.hit_rate) * (measured.rtt_s + line * load.draft_step_s) if line else 0.0
