"""What all tests share: which of them must run in one process when pytest-xdist spreads them over several."""

import pytest
import torch

# Models here are tiny: a second thread gains nothing, and beside other work each operation waits until it is scheduled.
# Services run with as many threads as they are told to; `tests/lm` tests what several threads compute.
torch.set_num_threads(1)

_TOGETHER = frozenset({"attacks", "browser", "faults", "served"})
"""Folders whose tests share running services; elsewhere the tests of a file share what is slow to make."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups tests by the folder or the file whose fixtures they share."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            file = item.nodeid.partition("::")[0]
            folder = file.split("/")[1]
            item.add_marker(pytest.mark.xdist_group(folder if folder in _TOGETHER else file))
