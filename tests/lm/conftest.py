"""Fixtures of the models' tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Two threads, where how rows are shared among them is what the bits of a pass may depend on."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
