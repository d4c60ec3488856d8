"""A service that does nothing: reports a port as ready, waits for SIGTERM. `TRIVIAL` says how it misbehaves."""

import json
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
    if how == "names its error":
        sys.exit("MODEL_UNSUPPORTED: cannot load nonsense: " + "it is too strange " * 30)
    if how != "never ready":
        http_address = "0.0.0.0:4343" if os.environ.get("OUTRIDER_HTTP_ADDRESS") else ""
        # Where it has HTTP, it claims to listen on all hosts.
        address = "0.0.0.0:4242" if http_address else "127.0.0.1:4242"
        print(json.dumps({"ready": True, "address": address, "http_address": http_address}), flush=True)
        # Whole or not at all, as the services do.
        ready_file = Path(os.environ["OUTRIDER_READY_FILE"])
        partial = ready_file.with_suffix(".partial")
        partial.write_text(address)
        partial.replace(ready_file)
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
