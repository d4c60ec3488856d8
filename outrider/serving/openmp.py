"""OpenMP's worker threads: those that compute a part of each of PyTorch's operators.

Between two operators a worker spins for some milliseconds: one that sleeps has to be woken, and is waited for. Where an
engine has nothing to run it spins all the same, on a core that others need then.
"""

import ctypes
from collections.abc import Callable

_SOFT = 1
_known: list[Callable[[int], int]] = []


def end_workers() -> None:
    """End the worker threads of the calling thread, outside of operators; its next operator starts others, in 0.1 ms.

    It is OpenMP's own call for it, `omp_pause_resource_all` (OpenMP 5.0, section 3.2.44). Where the library is not
    loaded, or does not have it, they go on.
    """
    if not _known:
        try:
            pause = ctypes.CDLL(None).omp_pause_resource_all
        except (AttributeError, OSError):
            return
        pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
        _known.append(pause)
    _known[0](_SOFT)
