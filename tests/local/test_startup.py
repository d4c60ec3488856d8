import os
import time
from pathlib import Path

import pytest

from outrider.local.startup import Startup

STALL_S = 0.3
NO_PROCESS = 2**22 + 1
"""A process id that Linux does not give."""


def stalls_within(startup: Startup, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if startup.has_stalled():
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_text("loading\n")
    return path


def test_a_log_that_grows_is_progress(log: Path) -> None:
    startup = Startup(log, NO_PROCESS, STALL_S)
    for _ in range(3):
        assert not stalls_within(startup, STALL_S / 2)
        with log.open("a") as file:
            file.write(".")
    assert stalls_within(startup, 20)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processor time is read from /proc")
def test_computing_is_progress(log: Path) -> None:
    startup = Startup(log, os.getpid(), STALL_S)
    assert not startup.has_stalled()
    since = time.process_time()
    while time.process_time() < since + 0.7:
        pass
    # Longer ago than it may take without progress, and yet.
    assert not startup.has_stalled()
    assert stalls_within(startup, 20)
