"""The memory of a page pool: keys and values of every position on every layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.lm.prefault import Prefault
from outrider.lm.step_layout import PageCopy
from outrider.native.memory import alone, huge_pages


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
    """The tensors of keys and values of all pages.

    A page of a layer has its positions in order of their slots, slot = page * page_len + offset; or those of its first
    head, then those of the next one, so that a kernel which reads head by head reads memory in order.

    Args:
        shapes: cached shapes of every layer.
        num_pages: number of pages, the scratch page 0 included.
        page_len: positions per page.
        dtype: of keys and values.
        device: device of the tensors.
        reads_masked: whether attention reads positions that no row sees: it multiplies them by 0, so that they must be
            numbers: new pages are cleared, and pages are copied as a whole.
        by_heads: whether a page has its positions head by head.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_pages: int,
        page_len: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        reads_masked: bool = True,
        by_heads: bool = False,
    ) -> None:
        self.page_len = page_len
        self.num_pages = num_pages
        self._reads_masked = reads_masked
        # Keys and values lie apart: compiled layers copy what they write to if it shares memory with another argument.
        self._planes: dict[tuple[str, int, int], torch.Tensor] = {}
        numbers: dict[tuple[str, int, int], int] = {}
        places = []
        for shape in shapes:
            for part, dim in (("keys", shape.key_dim), ("values", shape.value_dim)):
                kind = (part, shape.num_heads, dim)
                places.append((kind, numbers.get(kind, 0)))
                numbers[kind] = numbers.get(kind, 0) + 1
        for kind, num in numbers.items():
            # Zeros, because masked slots may be multiplied by 0, and NaN would remain NaN.
            _, num_heads, dim = kind
            page_size = (num_pages, num_heads, page_len) if by_heads else (num_pages * page_len, num_heads)
            self._planes[kind] = lazy_zeros((num, *page_size, dim), dtype, device)
        layers = [layer for plane in self._planes.values() for layer in plane]
        self._prefault = Prefault(layers, num_pages) if device.type == "cpu" else None
        self._pages = [
            plane.transpose(2, 3) if by_heads else plane.view(len(plane), num_pages, page_len, num_heads, dim)
            for (_, num_heads, dim), plane in self._planes.items()
        ]
        ordered = [self._planes[kind][number] for kind, number in places]
        self.tensors = [alone(layer) if device.type == "cpu" else layer for layer in ordered]
        """Keys and values of layer 0, then of layer 1, ..."""
        self.device = device

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values.

        Returns:
            [num_slots, num_heads, key_dim] and [num_slots, num_heads, value_dim]; head by head [num_pages, num_heads,
            page_len, key_dim] and [num_pages, num_heads, page_len, value_dim].
        """
        return self.tensors[2 * index], self.tensors[2 * index + 1]

    @property
    def layout(self) -> str:
        """Description of the shapes and the dtype of a page's bytes."""
        kinds = " ".join(f"{part} {plane.shape[0]}x{heads}x{dim}" for (part, heads, dim), plane in self._planes.items())
        return f"{kinds} {self.tensors[0].dtype} pages of {self.page_len}".replace("torch.", "")

    def read_page(self, page: int) -> torch.Tensor:
        """Return the keys and values of a page as bytes in order of its slots: uint8 [page_bytes]."""
        return torch.cat([pages[:, page].flatten().view(torch.uint8) for pages in self._pages])

    def write_page(self, page: int, content: torch.Tensor) -> None:
        """Fill a page with the result of `read_page`.

        Args:
            page: page number.
            content: uint8 [page_bytes], on a CPU.
        """
        start = 0
        for pages in self._pages:
            place = pages[:, page]
            num = place.numel() * place.element_size()
            part = content[start : start + num].to(place.device)
            pages[:, page] = part.view(place.dtype).view(place.shape)
            start += num

    def prepare(self, new_pages: Sequence[int], copies: Sequence[PageCopy]) -> None:
        """Clear new pages where attention reads all of them, then copy pages; see `StepLayout`."""
        if new_pages and self._prefault is not None:
            self._prefault.reach(max(new_pages))
        copied = {copy.target for copy in copies}
        empty = [page for page in new_pages if page not in copied]
        if empty and self._reads_masked:
            # Old content is masked, but 0 times NaN is NaN: a failed session must not affect another.
            for pages in self._pages:
                pages[:, empty] = 0
        whole = [copy._replace(length=self.page_len) for copy in copies] if self._reads_masked else copies
        copy_pages(self._pages, whole)


def copy_pages(planes: Sequence[torch.Tensor], copies: Sequence[PageCopy]) -> None:
    """Copy pages of planes [layers, pages, page_len, ...], or more than that; no page is both source and target."""
    if not copies or not planes:
        return
    if planes[0].device.type == "cpu":
        # A third of the time of a gather and a scatter: one copy in place of two, and whole rows of it.
        for plane in planes:
            for source, target, length in copies:
                plane[:, target, :length].copy_(plane[:, source, :length])
        return
    sources, targets, _ = torch.tensor(copies, device=planes[0].device).unbind(1)
    for plane in planes:
        plane[:, targets] = plane[:, sources]


def lazy_zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros whose memory is allocated on a CPU page by page at the first write, unlike `torch.zeros`.

    Huge pages of 2 MiB are used if the system has them: the reads of a pass are scattered over gigabytes, and with
    pages of 4 KiB TLB misses took a third of a prompt's time.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return huge_pages(math.prod(size) * dtype.itemsize).view(dtype).view(*size)
