"""What a draft's step costs next to a pass of its target, and what that predicts."""

import time
from collections.abc import Callable
from typing import Final

import torch

from outrider.training.methods import Method
from outrider.training.teacher import Lesson, Teacher

_NUM_TIMES: Final = 9


@torch.no_grad()
def cost_ratio(teacher: Teacher, method: Method) -> float:
    """Returns the time of one guess for one position over that of the target's pass for one position.

    Both uncompiled and without a cache, so attention to what came before is in neither; medians of a few times.
    """
    token_ids = torch.tensor([[3]], device=teacher.device) % teacher.vocabulary_size
    features, hidden, totals = teacher.run(token_ids)
    one = torch.ones(1, dtype=torch.long, device=teacher.device)
    lesson = Lesson(token_ids, one, one * 0, one > 0, features, hidden, totals)
    with torch.autocast(teacher.device.type, torch.bfloat16):
        draft_s = _median_s(lambda: [method.head(state) for state in method.states(lesson, 1)])
    return draft_s / _median_s(lambda: teacher.model(token_ids, use_cache=False))


def predicted_speedup(mean_acceptance_length: float, depth: int, ratio: float) -> float:
    """Returns tokens a second over plain decoding where drafting and verifying take turns (Leviathan et al. 2023).

    A verification is taken to cost what a plain pass does.
    """
    return mean_acceptance_length / (1 + depth * ratio)


def _median_s(action: Callable[[], object]) -> float:
    times = []
    for _ in range(_NUM_TIMES):
        started_s = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started_s)
    return sorted(times)[_NUM_TIMES // 2]
