"""The progress of a benchmark: few lines in a log, and none on standard output."""

import pytest

from bench import progress as module
from bench.progress import progress


def test_elsewhere_than_on_a_terminal_lines_come_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    with progress(3) as step:
        for name in ("plain", "colocated", "streaming"):
            step(name)
            now_s += 20.0
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "2 of 3 done in 40 s: streaming\n"


def test_the_count_stays_within_what_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    with progress(1) as step:
        for name in ("first", "second", "third"):
            step(name)
            now_s += 30.0
    assert capsys.readouterr().err.splitlines() == ["1 of 1 done in 30 s: second", "1 of 1 done in 60 s: third"]
