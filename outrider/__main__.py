"""The command line as a program: `python -m outrider`, and the script `outrider`.

Ctrl-C ends it quietly, with code 130, at any moment. A command that runs cleans up first; before and after it, while
modules are imported and threads are joined, there is nothing to clean up.
"""

import os
import signal
from typing import NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def main() -> None:
    """Run the command line, which ends the process."""
    interrupt = signal.getsignal(signal.SIGINT)
    # Where SIGINT is ignored, as in a shell's background jobs, it stays so.
    takes_interrupts = interrupt is signal.default_int_handler
    if takes_interrupts:
        signal.signal(signal.SIGINT, _end)
    try:
        from outrider.cli.main import main as run

        signal.signal(signal.SIGINT, interrupt)
        run(prog_name="outrider")
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        if takes_interrupts:
            signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: object) -> NoReturn:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
