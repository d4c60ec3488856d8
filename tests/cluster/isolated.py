"""Runs a command in network, mount and process namespaces of its own, and removes what it leaves: `make cluster`.

    python -m tests.cluster.isolated COMMAND...

Whatever the command starts ends with it, on Ctrl-C too. Then the machine is compared with what it was before:
processes, mounts, cgroups, network links, routes, rules, and the settings of the kernel that a kubelet writes. A
difference is an error.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.cluster.node import CACHE, CGROUP, CGROUPS, KERNEL_SETTINGS, PROGRAMS, RUN

_INSIDE: Final = "--inside"
_REMOVE_S: Final = 20.0


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: that of the command, or 1 where something remains."""
    if arguments[:1] == [_INSIDE]:
        return _run_as_init(arguments[1:])
    if os.geteuid():
        sys.exit("cluster: must be root: a node mounts, and makes networks and cgroups")
    # Held until this process ends.
    lock = (CACHE / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit("cluster: another run uses the same folder; wait for its end")
    remove_remains()
    before = machine()
    # What is not ended by Ctrl-C is ended with this process.
    command = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "unshare",
        "--net",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child=KILL",
    ]
    process = subprocess.Popen([*command, sys.executable, "-m", "tests.cluster.isolated", _INSIDE, *arguments])
    signal.signal(signal.SIGTERM, lambda *_: process.kill())
    # The terminal sends it to all of them; pytest ends by it as ever.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = process.wait()
    remove_remains()
    left = [line for name, lines in machine().items() for line in difference(name, before[name], lines)]
    for line in left:
        print(f"cluster: remains: {line}", file=sys.stderr)
    return 1 if left else status if status >= 0 else 128 - status


def machine() -> dict[str, set[str]]:
    """Returns what a run might change of this machine, by kind."""
    node = CACHE / "node"
    return {
        "process": _processes(),
        "mount": {line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(CACHE) in line},
        "cgroup": {str(path) for path in CGROUPS.glob(f"*/**/*{CGROUP}*")},
        "link": _lines(node, "ip", "-oneline", "link"),
        "route": _lines(node, "ip", "route", "show", "table", "all")
        | _lines(node, "ip", "-6", "route", "show", "table", "all"),
        "rule": _lines(node, "ip", "rule") | _lines(node, "iptables-save"),
        "setting": {f"{name} {Path('/proc/sys', name).read_text().strip()}" for name in KERNEL_SETTINGS},
        "file": {str(RUN)} if RUN.exists() else set(),
    }


def difference(name: str, before: set[str], after: set[str]) -> list[str]:
    """Returns a line for everything that came or went."""
    return [
        f"{name}: {sign} {line}"
        for sign, lines in (("+", after - before), ("-", before - after))
        for line in sorted(lines)
    ]


def remove_remains() -> None:
    """Removes the cgroups and the files of a run that has ended."""
    give_up = time.monotonic() + _REMOVE_S
    # Deepest first; one whose last process is just ending is busy for a moment.
    for path in sorted(CGROUPS.glob(f"*/{CGROUP}/**/"), key=lambda path: -len(path.parts)):
        while path.exists():
            try:
                path.rmdir()
            except OSError:
                if time.monotonic() > give_up:
                    break
                time.sleep(0.05)
    shutil.rmtree(RUN, ignore_errors=True)


def _processes() -> set[str]:
    """Returns the processes of the cluster, its node and its pods."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            places = [os.readlink(path / "exe"), os.readlink(path / "root"), (path / "cgroup").read_text()]
            if any(
                sign in place for place in places for sign in (str(PROGRAMS), str(CACHE / "node"), str(RUN), CGROUP)
            ):
                found.add(f"{path.name} {places[0]}")
    return found


def _lines(node: Path, *command: str) -> set[str]:
    done = subprocess.run(["chroot", node, *command], capture_output=True, text=True, timeout=20, check=True)
    # iptables-save heads its answer with the time.
    return {line for line in done.stdout.splitlines() if not line.startswith(("#", ":"))}


def _run_as_init(arguments: Sequence[str]) -> int:
    """Runs a command as the first process of its namespace, which every orphan there gets as its parent."""
    signal.signal(signal.SIGINT, lambda *_: None)
    # A new network namespace has a loopback that is down, and some tests have no node that would do this.
    _lines(CACHE / "node", "ip", "link", "set", "lo", "up")
    process = subprocess.Popen(arguments)
    while True:
        pid, status = os.wait()
        if pid == process.pid:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
