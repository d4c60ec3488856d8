"""Fixtures of the benchmark tests."""

import pytest


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not compile, which takes longer than these benchmarks."""
    monkeypatch.setenv("OUTRIDER_COMPILE", "false")
