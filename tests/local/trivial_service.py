"""A service that does nothing: reports a port as ready, waits for SIGTERM. `TRIVIAL` says how it misbehaves."""

import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    """Runs until SIGTERM."""
    how = os.environ.get("TRIVIAL", "")
    print(f"trivial service as {os.environ.get('OUTRIDER_MODEL', 'none')}", flush=True)
    if how == "dies":
        sys.exit("no such model: nonsense")
    if how != "never ready":
        Path(os.environ["OUTRIDER_READY_FILE"]).write_text("127.0.0.1:4242")
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
