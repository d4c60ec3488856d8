"""A target on vLLM whose steps take a while, so that drafts open a request in time; with a right or a wrong rule.

The wrong rule replaces a rejected token by its likeliest one, which the test of fit must catch.
"""

import os
import time
from typing import Any

import torch
import vllm.v1.sample.rejection_sampler as sampler

from target_service.__main__ import main
from target_service.vllm_engine.scheduler import TargetScheduler

RULE = "PACED_TARGET_RULE"
_STEP_S = 0.1
_right = sampler.rejection_sample
_schedule = TargetScheduler.schedule


def paced(scheduler: TargetScheduler, *args: Any, **named: Any) -> Any:
    """Schedules after a pause."""
    time.sleep(_STEP_S)
    return _schedule(scheduler, *args, **named)


def wrong_rule(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    """Judges as vLLM does, with the wrong replacement where one is due."""
    output = _right(
        draft_token_ids,
        num_draft_tokens,
        max_spec_len,
        cu_num_draft_tokens,
        draft_probs,
        target_logits,
        *rest,
        **named,
    )
    for place, num_drafted in enumerate(num_draft_tokens):
        num = int((output[place] != sampler.PLACEHOLDER_TOKEN_ID).sum())
        if 0 < num <= num_drafted:
            row = int(cu_num_draft_tokens[place]) - num_drafted + num - 1
            if int(draft_token_ids[row]) >= 0:
                output[place, num - 1] = target_logits[row].argmax()
    return output


if __name__ == "__main__":
    TargetScheduler.schedule = paced  # type: ignore[method-assign]
    if os.environ[RULE] == "wrong":
        sampler.rejection_sample = wrong_rule
    main()
