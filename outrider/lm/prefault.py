"""Memory of the KV cache that the system clears before a pass writes to it.

The first write to a page of the system waits until it has been cleared, and the planes of all layers come to their next
page in the same pass: with pages of 2 MiB some 120 MB for the embedded model. So a thread has the next pages cleared
meanwhile, of each plane no more than it holds.
"""

import ctypes
import math
import mmap
import sys
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

_CHUNK = 2 << 20
"""Bytes of a huge page, of which one of each plane is kept ready."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14


class Prefault:
    """Keeps the memory behind the last page in use ready. `reach` is called in one thread.

    Args:
        planes: of the cache, each of consecutive pages from page 0 on; contiguous, on a CPU.
        num_pages: of each plane.
    """

    def __init__(self, planes: Sequence[Tensor], num_pages: int) -> None:
        self._planes = planes
        self._num_pages = num_pages
        self._populate = _populate()
        self._due: float = 0 if self._populate is not None else math.inf
        self._ready = [plane.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE for plane in planes]
        self._thread: threading.Thread | None = None

    def reach(self, page: int) -> None:
        """Have the memory behind a page made ready, where it is not."""
        if page < self._due:
            return
        ends = [self._end(plane, page) for plane in self._planes]
        self._due = min(map(self._due_at, self._planes, ends), default=math.inf)
        # It was started one chunk of each plane ago: only a system without a free core has not ended it.
        self.wait()
        self._thread = threading.Thread(target=self._prepare, args=(ends,), name="prefault", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all memory that was asked for is ready."""
        if self._thread is not None:
            self._thread.join()

    def _end(self, plane: Tensor, page: int) -> int:
        """Return the address up to which a plane is to be ready where a page is in use: a chunk behind that page's."""
        start = plane.data_ptr()
        used = start + plane.nbytes // self._num_pages * (page + 1)
        return min(start + plane.nbytes, (used // _CHUNK + 2) * _CHUNK)

    def _due_at(self, plane: Tensor, end: int) -> float:
        """Return the page at which a plane that is ready up to an address comes to its last chunk."""
        start = plane.data_ptr()
        if end >= start + plane.nbytes:
            return math.inf
        return (end - _CHUNK - start) // (plane.nbytes // self._num_pages)

    def _prepare(self, ends: Sequence[int]) -> None:
        assert self._populate is not None
        for number, end in enumerate(ends):
            while (start := self._ready[number]) < end:
                stop = min(end, (start // _CHUNK + 1) * _CHUNK)
                if not self._populate(start, stop - start):
                    self._due = math.inf
                    return
                self._ready[number] = stop


def _populate() -> Callable[[int, int], bool] | None:
    """Return a function that clears the memory at an address, of some length, and tells whether it could."""
    if sys.platform != "linux":
        return None
    # Unlike `mmap.madvise` it lets other threads run meanwhile.
    advise = ctypes.CDLL(None).madvise
    advise.argtypes, advise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return lambda address, length: bool(advise(address, length, _POPULATE_WRITE) == 0)
