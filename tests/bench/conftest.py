import pytest


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes longer than these benches."""
    monkeypatch.setenv("OUTRIDER_COMPILE", "false")
