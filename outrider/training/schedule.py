"""How many steps a budget allows, and which step takes which conversations at which rate."""

import math
from collections.abc import Iterator
from itertools import count
from typing import Final

import numpy as np

from outrider.training.corpus import Corpus

_WARM_SHARE: Final = 0.03
_LAST_SHARE: Final = 0.05
_MIXING: Final = 0.1


def rate(step: int, num_steps: int, highest: float) -> float:
    """Returns the learning rate of a step: a linear rise, then half a cosine down to a twentieth."""
    warm = max(1, round(_WARM_SHARE * num_steps))
    if step < warm:
        return highest * (step + 1) / warm
    done = (step - warm) / max(1, num_steps - warm)
    return highest * (_LAST_SHARE + (1 - _LAST_SHARE) * (1 + math.cos(math.pi * done)) / 2)


def steps_within(budget_s: float, step_s: float, spent_s: float) -> int:
    """Returns how many steps fit into what is left of a budget, at least 1."""
    return max(1, int((budget_s - spent_s) / step_s))


def batches(corpus: Corpus, tokens_per_batch: int, seed: int) -> Iterator[list[int]]:
    """Yields numbers of conversations without end: each epoch has every one once, in an order that the seed decides.

    Conversations of one batch are of about the same length, so that little is padded.
    """
    lens = corpus.lens
    for epoch in count():
        random = np.random.default_rng([seed, epoch])
        order = np.argsort(lens * random.uniform(1 - _MIXING, 1 + _MIXING, len(lens)), kind="stable")
        groups = list(_groups(order, lens, tokens_per_batch))
        for number in random.permutation(len(groups)):
            yield groups[number]


def _groups(order: "np.ndarray[tuple[int], np.dtype[np.int64]]", lens: object, size: int) -> Iterator[list[int]]:
    group: list[int] = []
    longest = 0
    for index in order.tolist():
        longer = max(longest, int(lens[index]))  # type: ignore[index]
        if group and longer * (len(group) + 1) > size:
            yield group
            group, longer = [], int(lens[index])  # type: ignore[index]
        group.append(index)
        longest = longer
    if group:
        yield group
