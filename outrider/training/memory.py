"""How this process gets its memory from the system."""

import ctypes
from contextlib import suppress
from typing import Final

# Of <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_MAX: Final = -4
_PAD_BYTES: Final = 256 << 20


def keep_freed_memory() -> None:
    """Has glibc keep freed memory for the next tensor; elsewhere nothing is done.

    A step makes and drops tensors of tens of megabytes. By default each comes from the system, which clears it page by
    page, and goes back: 2 cores spent a quarter of a training's time there.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_TOP_PAD, _PAD_BYTES)
