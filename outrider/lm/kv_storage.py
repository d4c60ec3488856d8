"""The memory of a page pool: keys and values of every position on every layer."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shapes that a layer caches per position: keys [num_heads, key_dim] and values [num_heads, value_dim]."""

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_values(self) -> int:
        """Number of cached values per position."""
        return self.num_heads * (self.key_dim + self.value_dim)


class KVStorage:
    """The tensors of keys and values over all slots of all pages: slot = page * page_len + offset.

    Args:
        shapes: cached shapes of every layer.
        num_pages: number of pages, the scratch page 0 included.
        page_len: positions per page.
        dtype: of keys and values.
        device: device of the tensors.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], num_pages: int, page_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_len = page_len
        self.num_pages = num_pages
        self._planes: dict[tuple[int, int], torch.Tensor] = {}
        numbers: dict[tuple[int, int], int] = {}
        places = []
        for shape in shapes:
            for dim in (shape.key_dim, shape.value_dim):
                kind = (shape.num_heads, dim)
                places.append((kind, numbers.get(kind, 0)))
                numbers[kind] = numbers.get(kind, 0) + 1
        for (num_heads, dim), num in numbers.items():
            # Zeros, because masked slots are multiplied by 0, and NaN would remain NaN.
            size = (num, num_pages * page_len, num_heads, dim)
            self._planes[num_heads, dim] = lazy_zeros(size, dtype, device)
        self.tensors = [self._planes[kind][number] for kind, number in places]
        """Keys and values of layer 0, then of layer 1, ..."""
        offsets = torch.arange(page_len, dtype=torch.int32, device=device)
        self._offsets = offsets
        self.positions = offsets.repeat(num_pages)
        """Session position of each slot: int32 [num_slots]."""

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys [num_slots, num_heads, key_dim] and values [num_slots, num_heads, value_dim]."""
        return self.tensors[2 * index], self.tensors[2 * index + 1]

    @property
    def layout(self) -> str:
        """Description of the shapes and the dtype of a page's bytes."""
        kinds = " ".join(f"{plane.shape[0]}x{heads}x{dim}" for (heads, dim), plane in self._planes.items())
        return f"{kinds} {self.tensors[0].dtype} pages of {self.page_len}".replace("torch.", "")

    def read_page(self, page: int) -> torch.Tensor:
        """Return the keys and values of a page as bytes: uint8 [page_bytes]."""
        return torch.cat([pages[:, page].flatten().view(torch.uint8) for pages in self._pages()])

    def write_page(self, page: int, index: int, content: torch.Tensor) -> None:
        """Fill a page with the result of `read_page`.

        Args:
            page: page number.
            index: index of the page in the page tables of its sessions.
            content: uint8 [page_bytes], on a CPU.
        """
        self.positions.view(-1, self.page_len)[page] = index * self.page_len + self._offsets
        start = 0
        for pages in self._pages():
            place = pages[:, page]
            num = place.numel() * place.element_size()
            part = content[start : start + num].to(place.device)
            pages[:, page] = part.view(place.dtype).view(place.shape)
            start += num

    def prepare(self, new_pages: Sequence[tuple[int, int]], copies: Sequence[tuple[int, int]]) -> None:
        """Set the positions of new pages and clear them, then copy pages; see `StepLayout`."""
        if new_pages:
            copied = {target for _, target in copies}
            self._clear(new_pages, [page for page, _ in new_pages if page not in copied])
        if copies:
            source, target = torch.tensor(copies, device=self.positions.device).unbind(1)
            for pages in self._pages():
                pages[:, target] = pages[:, source]

    def _clear(self, new_pages: Sequence[tuple[int, int]], empty: list[int]) -> None:
        """Set the positions of new pages, and clear those that are not copied to."""
        page, index = torch.tensor(new_pages, device=self.positions.device).unbind(1)
        starts = (index * self.page_len).to(torch.int32)
        self.positions.view(-1, self.page_len)[page] = starts[:, None] + self._offsets
        if not empty:
            return
        # Old content is masked, but 0 times NaN is NaN: a failed session must not affect another.
        for pages in self._pages():
            pages[:, empty] = 0

    def _pages(self) -> list[torch.Tensor]:
        return [plane.view(plane.shape[0], self.num_pages, -1) for plane in self._planes.values()]


def lazy_zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros whose memory is allocated on a CPU page by page at the first write, unlike `torch.zeros`.

    Huge pages of 2 MiB are used if the system has them: the reads of a pass are scattered over gigabytes, and with
    pages of 4 KiB TLB misses took a third of a prompt's time.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*size)
