"""Memory in pages of 2 MiB, where the system has them: addresses are found sooner, and passes read gigabytes."""

import mmap
import threading
from contextlib import suppress
from typing import Final

import torch

_CHUNK_BYTES: Final = 64 << 20
_LINE_BYTES: Final = 64


def huge_pages(num_bytes: int) -> torch.Tensor:
    """Return zeros, uint8 [num_bytes], whose memory is allocated page by page at the first write to each."""
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory, on a CPU, as a tensor that begins its storage: compiled layers take no offsets then."""
    return torch.from_numpy(tensor.view(torch.uint8).numpy()).view(tensor.dtype)


class WeightMemory:
    """Chunks of huge pages that weights share: most weights are smaller than a page.

    A chunk is freed with the last of its weights.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def place(self, weight: torch.Tensor, num_written: int) -> torch.Tensor:
        """Return a weight of the same bytes in a chunk.

        Args:
            weight: on a CPU, dense.
            num_written: bytes that are used, from the first on. The memory of the other bytes is other weights'.
        """
        content = weight.view(-1).view(torch.uint8)
        with self._lock:
            if self._used + len(content) > len(self._chunk):
                self._chunk, self._used = huge_pages(max(_CHUNK_BYTES, len(content))), 0
            place = self._chunk[self._used : self._used + len(content)]
            self._used += -(-num_written // _LINE_BYTES) * _LINE_BYTES
        place[:num_written] = content[:num_written]
        return alone(place).view(weight.dtype).view(weight.shape)


WEIGHTS: Final = WeightMemory()
"""Of this process."""
