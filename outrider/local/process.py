"""A service as a child process, which drains on SIGTERM and never outlives this process."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from outrider.errors import ERRORS, Unavailable
from outrider.local.startup import Startup

_POLL_S = 0.02
_TAIL_LINES = 12
_SEARCHED_LINES = 200
"""Lines in which its own error is looked for: torchrun reports the end of a rank at length."""
_READY = '{"ready": true'
# The child may take longer to notice the signal than it allows itself to drain.
_KILL_SLACK_S = 2.0
# By which progress bars move the cursor.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ATTACHED = "outrider.local.attached"
_TORCHRUN = "torch.distributed.run"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start a service.

    Attributes:
        name: of this replica, such as "target-0"; names its files too.
        module: run with `python -m`.
        environment: settings, on top of this process's own environment.
        drain_budget_s: seconds from SIGTERM to SIGKILL.
        cores: that it runs on, by number; empty for those of this process.
        num_ranks: processes that run one model together, by torchrun; 1 for none but this.
        interpreter: Python that runs it; empty for that of this process.
    """

    name: str
    module: str
    environment: Mapping[str, str]
    drain_budget_s: float = 10.0
    cores: frozenset[int] = frozenset()
    num_ranks: int = 1
    interpreter: str = ""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of Python that start it."""
        module = ("-m", _ATTACHED, self.module)
        if self.num_ranks == 1:
            return module
        # Each rank watches the parent too: torchrun, killed, leaves its ranks alone.
        return ("-m", _ATTACHED, _TORCHRUN, "--standalone", "--nproc-per-node", str(self.num_ranks), *module)


class ServiceProcess:
    """A running service. It ends when this process does, in whatever way that ends.

    Attributes:
        spec: how it was started.
        log: file with its standard output and error.
        address: host:port that it listens on; empty until it is ready.
    """

    def __init__(self, spec: ProcessSpec, directory: Path) -> None:
        self.spec = spec
        self.log = directory / f"{spec.name}.log"
        self.address = ""
        self._ready_file = directory / f"{spec.name}.address"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id; 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def is_running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def metrics_address(self) -> str:
        """Address of its metrics; empty where it exposes none, or does not serve yet."""
        return self.announced("metrics_address")

    def announced(self, name: str) -> str:
        """Return a value of the line with which it announced its addresses; empty without one."""
        for line in reversed(self.log.read_text(errors="replace").splitlines()):
            if line.startswith(_READY):
                return str(json.loads(line).get(name, ""))
        return ""

    @property
    def http_address(self) -> str:
        """Address of its HTTP API; empty where it has none, or does not serve yet."""
        return self.announced("http_address")

    @property
    def exit_code(self) -> int | None:
        """Its exit code: a negative number is a signal; None while it runs."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Start it; a second start replaces the first, with the log continued."""
        self.kill()
        self._ready_file.unlink(missing_ok=True)
        self.address = ""
        environment = {**os.environ, **self.spec.environment, "OUTRIDER_READY_FILE": str(self._ready_file)}
        with self.log.open("ab") as log, _on_cores(self.spec.cores):
            # A session of its own: Ctrl-C in the terminal reaches this process alone, which then drains the others.
            self._process = subprocess.Popen(
                [self.spec.interpreter or sys.executable, *self.spec.arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def restart(self) -> None:
        """Start it again at the addresses that it had, after it has ended, with its log continued."""
        environment = {**self.spec.environment, "OUTRIDER_ADDRESS": self.address}
        if http_address := self.http_address:
            environment["OUTRIDER_HTTP_ADDRESS"] = http_address
        self.spec = replace(self.spec, environment=environment)
        self.start()

    async def wait_ready(self, timeout_s: float | None, progress: Callable[[str], None] = lambda line: None) -> str:
        """Return its address once it serves.

        Args:
            timeout_s: bound on the wait; None waits as long as it makes progress, see `Startup`.
            progress: called with the latest line of the log while the service is loading.

        Raises:
            Unavailable: it ended early or is not ready in time; the message has its error, or the end of its log.
        """
        startup = Startup(self.log, self.pid)
        give_up = None if timeout_s is None else monotonic() + timeout_s
        while not self._ready_file.exists():
            if not self.is_running:
                raise Unavailable(self._early_end())
            if give_up is not None and monotonic() > give_up:
                raise Unavailable(f"{self.spec.name} is not ready after {timeout_s:g} s{self._log_tail()}")
            if give_up is None and startup.has_stalled():
                problem = f"is not ready and made no progress for {startup.stall_s:g} s"
                raise Unavailable(f"{self.spec.name} {problem}{self._log_tail()}")
            progress(self._last_line())
            await asyncio.sleep(_POLL_S)
        self.address = self._ready_file.read_text().strip()
        return self.address

    def terminate(self) -> None:
        """Send SIGTERM, which drains it; return at once."""
        if self._process is not None and self.is_running:
            self._process.terminate()

    def kill(self) -> None:
        """Kill it, as a crash would; no-op for one that has ended."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def wait_ended(self) -> None:
        """Return when it has ended; kill it at the end of its drain budget."""
        give_up = monotonic() + self.spec.drain_budget_s + _KILL_SLACK_S
        while self.is_running and monotonic() < give_up:
            await asyncio.sleep(_POLL_S)
        self.kill()

    def _early_end(self) -> str:
        """Return why it ended while starting: an error that it named itself, else the end of its log."""
        for line in reversed(self._tail(_SEARCHED_LINES)):
            reason, _, message = line.partition(": ")
            if message and reason in ERRORS:
                return f"{self.spec.name} cannot start: {message}"
        return f"{self.spec.name} ended with {self._status()} while starting{self._log_tail()}"

    def _status(self) -> str:
        code = self._process.returncode if self._process else None
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def _last_line(self) -> str:
        lines = self._tail(1)
        return lines[0] if lines else ""

    def _log_tail(self) -> str:
        return "".join(f"\n  {line}" for line in [f"the end of {self.log}:", *self._tail(_TAIL_LINES)])

    def _tail(self, num_lines: int) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 256 * num_lines))
            # Progress bars redraw their line with a carriage return; only the latest state is of interest.
            text = _ESCAPES.sub("", log.read().decode(errors="replace"))
            lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n")]
        return [line.strip() for line in lines if line.strip()][-num_lines:]


@contextmanager
def _on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Run this thread, and what it starts, on these cores; an empty set leaves all that it has."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
