import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.errors import Unavailable
from outrider.local.process import ProcessSpec, ServiceProcess
from outrider.local.startup import Startup

MODULE = "tests.local.trivial_service"


def service(directory: Path, how: str = "", drain_budget_s: float = 10.0) -> ServiceProcess:
    return ServiceProcess(ProcessSpec("trivial-0", MODULE, {"TRIVIAL": how}, drain_budget_s), directory)


async def test_it_starts_reports_its_address_and_drains(tmp_path: Path) -> None:
    process = service(tmp_path)
    process.start()
    assert await process.wait_ready(20) == "127.0.0.1:4242" == process.address
    assert process.is_running
    process.terminate()
    await process.wait_ended()
    assert not process.is_running
    assert "trivial service" in process.log.read_text()


async def test_one_that_ends_early_says_so_with_its_log(tmp_path: Path) -> None:
    process = service(tmp_path, "dies")
    process.start()
    with pytest.raises(
        Unavailable, match=r"trivial-0 ended with exit code 1 while starting(.|\n)*no such model: nonsense"
    ):
        await process.wait_ready(20)
    await process.wait_ended()


async def test_one_that_names_its_error_ends_with_that_alone(tmp_path: Path) -> None:
    process = service(tmp_path, "names its error")
    process.start()
    with pytest.raises(Unavailable) as caught:
        await process.wait_ready(None)
    assert caught.value.message.startswith("trivial-0 cannot start: cannot load nonsense: it is too strange")
    assert "\n" not in caught.value.message
    await process.wait_ended()


async def test_one_without_progress_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Startup, "has_stalled", lambda startup: True)
    process = service(tmp_path, "never ready")
    process.start()
    with pytest.raises(Unavailable, match="is not ready and made no progress for 300 s"):
        await process.wait_ready(None)
    process.kill()


async def test_a_restart_keeps_its_addresses(tmp_path: Path) -> None:
    spec = ProcessSpec("trivial-0", MODULE, {"OUTRIDER_HTTP_ADDRESS": "127.0.0.1:0"})
    process = ServiceProcess(spec, tmp_path)
    process.start()
    await process.wait_ready(20)
    process.restart()
    assert process.spec.environment["OUTRIDER_ADDRESS"] == "0.0.0.0:4242"
    assert process.spec.environment["OUTRIDER_HTTP_ADDRESS"] == "0.0.0.0:4343"
    process.kill()


def test_progress_bars_show_their_latest_state(tmp_path: Path) -> None:
    process = service(tmp_path)
    process.log.write_text("loading\n\rmodel.safetensors:  10%|#  |\rmodel.safetensors:  20%|## |\x1b[A\r")
    assert process._last_line() == "model.safetensors:  20%|## |"


async def test_one_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    process = service(tmp_path, "never ready")
    process.start()
    lines: list[str] = []
    async with asyncio.timeout(20):
        while "trivial service" not in process.log.read_text():
            await asyncio.sleep(0.02)
    with pytest.raises(Unavailable, match=r"not ready after 0.5 s"):
        await process.wait_ready(0.5, lines.append)
    process.terminate()
    await process.wait_ended()
    assert lines[-1] == "trivial service as none"


async def test_one_that_does_not_drain_is_killed_at_its_budget(tmp_path: Path) -> None:
    process = service(tmp_path, "stubborn", drain_budget_s=-1.8)
    process.start()
    await process.wait_ready(20)
    process.terminate()
    await process.wait_ended()
    assert not process.is_running


async def test_it_can_be_killed_and_started_again(tmp_path: Path) -> None:
    process = service(tmp_path)
    process.start()
    await process.wait_ready(20)
    pid = process.pid
    process.kill()
    assert not process.is_running
    process.start()
    await process.wait_ready(20)
    assert process.pid != pid
    process.terminate()
    await process.wait_ended()


def test_it_does_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio, os, sys
from pathlib import Path
from outrider.local.startup import Startup
from outrider.local.process import ProcessSpec, ServiceProcess
process = ServiceProcess(ProcessSpec("trivial-0", {MODULE!r}, {{}}), Path({str(tmp_path)!r}))
process.start()
asyncio.run(process.wait_ready(20))
print(process.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while _exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _exists(pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # An orphan that has ended stays in the table until init reaps it.
    return (
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" if Path("/proc").exists() else True
    )
