"""Seeds of tests that prove the same with every one of them: a few by default, all of them by `make exactness`."""

import pytest
from _pytest.mark.structures import ParameterSet


def seeds(num: int, num_slow: int) -> list[int | ParameterSet]:
    """Returns the first `num` seeds, and those up to `num_slow` as slow ones."""
    return [*range(num), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(num, num_slow))]
