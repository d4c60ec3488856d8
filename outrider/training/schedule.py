"""How many steps a budget allows, and which step takes which conversations at which rate."""

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
"""Steps whose times decide how many there will be, where a budget is given."""


def rate(step: int, num_steps: int, highest: float) -> float:
    """Returns the learning rate of a step: a linear rise, then half a cosine down to a twentieth."""
    warm = max(1, round(_WARM_SHARE * num_steps))
    if step < warm:
        return highest * (step + 1) / warm
    done = (step - warm) / max(1, num_steps - warm)
    return highest * (_LAST_SHARE + (1 - _LAST_SHARE) * (1 + math.cos(math.pi * done)) / 2)


def is_deep(step: int, num_steps: int) -> bool:
    """Returns whether a step trains guesses of every depth, and not the first one alone.

    A step over the first guess alone takes a fraction of the time and teaches it as much, and the deeper guesses are
    made by the same weights: so those come last. Of the steps that are timed to make a plan, the first half is deep.

    Args:
        step: its number, from 0.
        num_steps: of the plan; 0 while it is being made.
    """
    return step < NUM_TIMED_STEPS // 2 or (num_steps > 0 and step >= (1 - _DEEP_SHARE) * num_steps)


def steps_within(left_s: float, deep_s: float, shallow_s: float) -> int:
    """Returns how many steps a plan has that fits into a time, at least 1.

    Args:
        left_s: the time.
        deep_s: seconds of a step that is deep.
        shallow_s: seconds of one that is not.
    """
    return max(1, int(left_s / (_DEEP_SHARE * deep_s + (1 - _DEEP_SHARE) * shallow_s)))


def batches(corpus: Corpus, tokens_per_batch: int, seed: int) -> Iterator[list[int]]:
    """Yields numbers of conversations without end: each epoch has every one once, in an order that the seed decides.

    Conversations of one batch are of about the same length, so that little is padded.
    """
    lens = corpus.lens
    for epoch in count():
        random = np.random.default_rng([seed, epoch])
        order = np.argsort(lens * random.uniform(1 - _MIXING, 1 + _MIXING, len(lens)), kind="stable")
        epoch_groups = list(groups(order, lens, tokens_per_batch))
        for number in random.permutation(len(epoch_groups)):
            yield epoch_groups[number]


def groups(order: NDArray[np.int64], lens: NDArray[np.int64], tokens_per_batch: int) -> Iterator[list[int]]:
    """Yields conversations in this order, as many together as fill a pass once all are padded to the longest.

    Args:
        order: numbers of conversations.
        lens: tokens of each conversation.
        tokens_per_batch: of a pass, padding included; a single conversation may have more.
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
