"""Run a module as a process that does not outlive its parent: `python -m outrider.local.attached MODULE`.

The parent holds the write end of this process's standard input and never writes to it. When the parent ends, in
whatever way, the kernel closes that end; then this process drains as on SIGTERM, and is killed after a grace period.
"""

import os
import runpy
import signal
import sys
import threading
from time import sleep

GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL once the parent is gone."""


def end_with_parent() -> None:
    """Begin to watch standard input; return at once."""
    threading.Thread(target=_watch, name="parent-watch", daemon=True).start()


def _watch() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the module named by the first argument with the arguments after it."""
    end_with_parent()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
