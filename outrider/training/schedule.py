"""The training schedule: number of steps, learning rate, depths, and the conversations of each step."""

import math
from collections.abc import Iterator
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.training.corpus import Corpus

_WARM_SHARE: Final = 0.03
_LAST_SHARE: Final = 0.05
_MIXING: Final = 0.1
_DEEP_SHARE: Final = 0.33

NUM_TIMED_STEPS: Final = 8
"""Number of first steps whose times determine the number of steps that fit into the budget."""


def rate(step: int, num_steps: int, highest: float) -> float:
    """Return the learning rate of a step: linear warmup, then cosine decay to 1/20 of `highest`."""
    warm = max(1, round(_WARM_SHARE * num_steps))
    if step < warm:
        return highest * (step + 1) / warm
    done = (step - warm) / max(1, num_steps - warm)
    return highest * (_LAST_SHARE + (1 - _LAST_SHARE) * (1 + math.cos(math.pi * done)) / 2)


def is_deep(step: int, num_steps: int) -> bool:
    """Return whether a step trains predictions of every depth, instead of the first depth alone.

    A step of the first depth alone takes a fraction of the time and trains that depth as well, and deeper predictions
    use the same weights; so deep steps come last. Of the steps that are timed for the plan, the first half is deep.

    Args:
        step: number of the step, from 0.
        num_steps: number of steps of the plan; 0 before the plan exists.
    """
    return step < NUM_TIMED_STEPS // 2 or (num_steps > 0 and step >= (1 - _DEEP_SHARE) * num_steps)


def steps_within(left_s: float, deep_s: float, shallow_s: float) -> int:
    """Return the number of steps of a plan that fits into a time, at least 1.

    Args:
        left_s: available time, in seconds.
        deep_s: seconds per deep step.
        shallow_s: seconds per shallow step.
    """
    return max(1, int(left_s / (_DEEP_SHARE * deep_s + (1 - _DEEP_SHARE) * shallow_s)))


def batches(corpus: Corpus, tokens_per_batch: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of conversation indices without end: each epoch has every one once, in an order set by the seed.

    The conversations of a batch have similar lengths, so that there is little padding.
    """
    lens = corpus.lens
    for epoch in count():
        random = np.random.default_rng([seed, epoch])
        order = np.argsort(lens * random.uniform(1 - _MIXING, 1 + _MIXING, len(lens)), kind="stable")
        epoch_groups = list(groups(order, lens, tokens_per_batch))
        for number in random.permutation(len(epoch_groups)):
            yield epoch_groups[number]


def groups(order: NDArray[np.int64], lens: NDArray[np.int64], tokens_per_batch: int) -> Iterator[list[int]]:
    """Yield groups of conversations in this order, as many per group as fit into a pass when padded to the longest.

    Args:
        order: indices of conversations.
        lens: number of tokens of each conversation.
        tokens_per_batch: maximum tokens per pass, padding included; a single conversation may have more.
    """
    group: list[int] = []
    longest = 0
    for index in order.tolist():
        longest = max(longest, int(lens[index]))
        if group and longest * (len(group) + 1) > tokens_per_batch:
            yield group
            group, longest = [], int(lens[index])
        group.append(index)
    if group:
        yield group
