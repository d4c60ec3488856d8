"""Fixtures of the model tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Use two threads, because the bits of a pass may depend on how rows are split between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
