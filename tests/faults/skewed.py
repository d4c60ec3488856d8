"""An orchestrator on a machine whose clock is a day ahead."""

import time

_AHEAD_S = 86400.0
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _AHEAD_S
time.time_ns = lambda: _time_ns() + int(1e9 * _AHEAD_S)

if __name__ == "__main__":
    from orchestrator.__main__ import main

    main()
