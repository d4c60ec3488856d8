"""The cost of a draft step relative to a target pass, and the speedup that it predicts."""

import time
from collections.abc import Callable
from typing import Final

import torch

from outrider.lm.heads.eagle3 import EVERY_COLUMN
from outrider.training.methods import Method
from outrider.training.teacher import Teacher
from outrider.training.teacher_batches import TeacherBatch

_NUM_TIMES: Final = 9


@torch.no_grad()
def cost_ratio(teacher: Teacher, method: Method) -> float:
    """Return the time of a draft step divided by that of a target pass, each over one position.

    Both run uncompiled and without a KV cache, so that neither attends to previous positions; medians of 9 runs.
    """
    token_ids = torch.tensor([[3]], device=teacher.device) % teacher.vocabulary_size
    features, hidden, totals = teacher.run(token_ids)
    one = torch.ones(1, dtype=torch.long, device=teacher.device)
    batch = TeacherBatch(token_ids, one, one * 0, one > 0, features, hidden, totals)
    with torch.autocast(teacher.device.type, torch.bfloat16):
        draft_s = _median_s(lambda: [method.head(state) for state in method.states(batch, 1, EVERY_COLUMN)])
    return draft_s / _median_s(lambda: teacher.model(token_ids, use_cache=False))


def predicted_speedup(mean_acceptance_length: float, depth: int, ratio: float) -> float:
    """Return the speedup over plain decoding if drafting and verification alternate (Leviathan et al. 2023, Thm. 3.8).

    A verification is assumed to cost the same as a plain pass.
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
