"""Features: the inputs of chosen target layers, stored for every cached position, for draft heads that read them.

A feature is stored in the same slot of the same page as the keys and values of its position. So every cached position
has its features, including accepted branches of trees and prefixes shared with other sessions, and features that a
draft has lost can be sent again.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from outrider.errors import ModelUnsupported
from outrider.lm.attention.rows import PassRows
from outrider.lm.kv_cache import PagedKVCache
from outrider.lm.kv_storage import KVStorage, copy_pages, lazy_zeros
from outrider.lm.model import KVCache
from outrider.lm.pages import PagePool
from outrider.lm.step_layout import PageCopy

DTYPE: Final = torch.bfloat16
_MAX_LAYERS: Final = 8


class FeatureStore:
    """The features of a model's cached positions.

    The feature of layer n is the input of layer n; for n = number of layers, the normalised input of the output layer.

    No features are stored until a draft requests them (`keep`). Then they take `hidden_size` * 2 bytes per layer and
    position. On a CPU this memory is part of the KV cache's budget: the number of pages shrinks, and memory is
    allocated as pages fill. On a GPU, where all pages are allocated at the start, it is allocated in addition.

    Args:
        decoder: model without its output layer.
        layers: decoder layers.
        hidden_size: H, width of a feature.
        storage: memory of the keys and values.
        pool: pages of the storage.
    """

    def __init__(
        self, decoder: nn.Module, layers: Sequence[nn.Module], hidden_size: int, storage: KVStorage, pool: PagePool
    ) -> None:
        self.hidden_size = hidden_size
        self._decoder = decoder
        self._modules = list(layers)
        self._storage = storage
        self._pool = pool
        self._planes: dict[int, Tensor] = {}
        self._taken: dict[int, Tensor] = {}

    @property
    def num_layers(self) -> int:
        """Number of decoder layers; features exist for layers 0 .. num_layers, both included."""
        return len(self._modules)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose features are stored, in ascending order."""
        return tuple(sorted(self._planes))

    def keep(self, layers: Sequence[int], min_len: int = 0) -> None:
        """Store the features of these layers too, from the next pass on.

        Positions cached before have no features: `adopt` does not find them any more, and their caches are not
        `is_current`.

        Args:
            layers: layer numbers, in [0, num_layers].
            min_len: length of a session, in tokens, that must still fit into the KV cache.

        Raises:
            ModelUnsupported: there is no such layer, more than 8 layers, or too little memory.
        """
        new = sorted(set(layers) - set(self._planes))
        if not new:
            return
        if new[0] < 0 or new[-1] > self.num_layers:
            raise ModelUnsupported(
                f"features of layers {list(layers)} were requested, the last layer is {self.num_layers}"
            )
        if len(self._planes) + len(new) > _MAX_LAYERS:
            raise ModelUnsupported(f"features of more than {_MAX_LAYERS} layers were requested")
        self._take_memory(new, min_len)
        for layer in new:
            self._hook(layer)
        kept = ",".join(map(str, self.layers))
        self._pool.rename(lambda root: hashlib.sha256(root + f" features {kept}".encode()).digest())

    def _take_memory(self, new: Sequence[int], min_len: int) -> None:
        """Allocate memory for more layers; raise `ModelUnsupported`, without a change, if there is too little."""
        device = self._storage.device
        extra_bytes = (len(self._planes) + len(new)) * self._storage.page_len * self.hidden_size * DTYPE.itemsize
        room_len = self._pool.num_pages_with_extra(extra_bytes) * self._pool.page_len
        if device.type == "cpu" and room_len < max(1, min_len):
            raise ModelUnsupported(
                f"with features of {len(self._planes) + len(new)} layers the KV cache has room for {room_len} tokens, "
                f"sessions may have {min_len}: increase kv_budget_bytes or reduce max_session_len"
            )
        size = (self._storage.num_pages * self._storage.page_len, self.hidden_size)
        try:
            planes = {layer: lazy_zeros(size, DTYPE, device) for layer in new}
        except (torch.OutOfMemoryError, OSError) as error:
            raise ModelUnsupported(f"not enough memory for features of {len(new)} layers") from error
        self._planes.update(planes)
        if device.type == "cpu":
            self._pool.set_extra_bytes(extra_bytes)

    def prepare(self, copies: Sequence[PageCopy]) -> None:
        """Copy the features of pages that a pass needs copies of; see `StepLayout.copies`."""
        planes = [plane.view(1, -1, self._storage.page_len, self.hidden_size) for plane in self._kept()]
        copy_pages(planes, copies)

    def taken(self) -> dict[int, Tensor]:
        """Return the features of the pass that has run, [1, rows, H], by layer in ascending order."""
        return {layer: self._taken[layer] for layer in self.layers}

    def hold(self, taken: Mapping[int, Tensor]) -> None:
        """Have `write` store these features: those of a pass that was replayed without its hooks."""
        self._taken = dict(taken)

    def write(self, rows: PassRows) -> None:
        """Store the features of the last pass."""
        taken, self._taken = self._taken, {}
        if not self._planes:
            return
        device = self._storage.device
        numbers, slots = torch.tensor([rows.write_rows, rows.write_slots], device=device).unbind(0)
        for layer, plane in self._planes.items():
            plane[slots] = taken[layer].view(-1, self.hidden_size)[numbers].to(DTYPE)

    def read_page(self, page: int) -> Tensor:
        """Return the features of a page as bytes: uint8 [page_bytes]."""
        parts = [plane.view(-1, self._storage.page_len, self.hidden_size)[page] for plane in self._kept()]
        return torch.cat([part.flatten().view(torch.uint8) for part in parts]) if parts else torch.empty(0).byte()

    def write_page(self, page: int, content: Tensor) -> None:
        """Fill a page with the result of `read_page`: uint8 [page_bytes], on a CPU."""
        kept = self._kept()
        for plane, part in zip(kept, content.view(torch.uint8).chunk(len(kept)) if kept else (), strict=True):
            place = plane.view(-1, self._storage.page_len, self.hidden_size)[page]
            place.copy_(part.view(DTYPE).view(place.shape))

    @property
    def page_bytes(self) -> int:
        """Memory of the features of a page, in bytes."""
        return len(self._planes) * self._storage.page_len * self.hidden_size * DTYPE.itemsize

    def read(self, cache: KVCache, layers: Sequence[int], start: int, end: int) -> Tensor:
        """Return the features of cached positions start .. end - 1, concatenated over layers.

        Args:
            cache: cache of the session; must be `is_current`.
            layers: layers whose features are stored.
            start: first position, at least 0.
            end: position after the last one, at most `cache.cached_len`.

        Returns:
            bfloat16 [end - start, len(layers) * H].
        """
        if not isinstance(cache, PagedKVCache):
            raise TypeError("the cache was made by another model class")
        runs = self._runs(cache.table, start, end)
        rows = [[self._planes[layer][first:last] for first, last in runs] for layer in layers]
        return torch.cat([parts[0] if len(parts) == 1 else torch.cat(parts) for parts in rows], dim=-1)

    def _kept(self) -> list[Tensor]:
        return [self._planes[layer] for layer in self.layers]

    def _runs(self, table: Sequence[int], start: int, end: int) -> list[tuple[int, int]]:
        """Return the first slot of positions start .. end - 1 in each of their pages, and the one after the last."""
        page_len, runs = self._storage.page_len, []
        while start < end:
            page, offset = divmod(start, page_len)
            num = min(page_len - offset, end - start)
            slot = table[page] * page_len + offset
            runs.append((slot, slot + num))
            start += num
        return runs

    def _hook(self, layer: int) -> None:
        if layer == self.num_layers:
            self._decoder.register_forward_hook(lambda *call: self._take(layer, call[2].last_hidden_state))
            return
        module: Any = self._modules[layer]
        # At the attribute by which compiled layers are called, as these do not run hooks.
        module._compiled_call_impl = self._hooked(layer, module._compiled_call_impl or module._call_impl)

    def _hooked(self, layer: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(*arguments: Any, **keywords: Any) -> Any:
            self._take(layer, arguments[0] if arguments else keywords["hidden_states"])
            return call(*arguments, **keywords)

        return hooked

    def _take(self, layer: int, states: Tensor) -> None:
        self._taken[layer] = states
