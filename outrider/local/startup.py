"""Whether a process that starts makes progress: its log grows, or it computes."""

import os
from pathlib import Path
from time import monotonic
from typing import Final

_STALL_S: Final = 300.0
"""Seconds without any progress after which a start has failed; a pause of a slow disk or network is shorter."""
_LEAST_CPU_S: Final = 0.5
"""Processor time that counts as progress: more than the threads of a process that waits take in `_STALL_S`."""


class Startup:
    """Observes the start of one process.

    Args:
        log: file that its output goes to.
        pid: its process id.
        stall_s: seconds without progress after which it has stalled.
    """

    def __init__(self, log: Path, pid: int, stall_s: float = _STALL_S) -> None:
        self._log = log
        self._stat = Path(f"/proc/{pid}/stat")
        self._stall_s = stall_s
        self._size = -1
        self._cpu_s = 0.0
        self._since = monotonic()

    def has_stalled(self) -> bool:
        """Return whether it has made no progress for too long; call it again and again."""
        size, cpu_s = self._log.stat().st_size, self._used_cpu_s()
        if size != self._size or cpu_s >= self._cpu_s + _LEAST_CPU_S:
            self._size, self._cpu_s, self._since = size, cpu_s, monotonic()
        return monotonic() > self._since + self._stall_s

    @property
    def stall_s(self) -> float:
        """Seconds without progress after which it has stalled."""
        return self._stall_s

    def _used_cpu_s(self) -> float:
        """Return its processor time in seconds; 0 where the system does not show it, and only the log counts."""
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
