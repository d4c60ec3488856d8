"""Features: what chosen layers of a target take in, kept for every cached position, for drafts that are made of them.

A feature stands where its position's keys and values stand: in the same slot of the same page. So whatever is cached
has its features too, be it an accepted branch of a tree, the prefix of another session, or what was computed long ago,
and a draft that has lost them can be sent them again.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from outrider.errors import ModelUnsupported
from outrider.lm.attention.rows import PassRows
from outrider.lm.kv_cache import PagedKVCache
from outrider.lm.kv_storage import KVStorage, lazy_zeros
from outrider.lm.model import KVCache
from outrider.lm.pages import PagePool

DTYPE: Final = torch.bfloat16
_MAX_LAYERS: Final = 8


class FeatureStore:
    """The features of a model's cached positions.

    Layer n stands for what layer n takes in; the number of layers, for what the output layer does, normalised.

    Nothing is kept until a draft asks for it. What is kept from then on takes `hidden_size` * 2 bytes a layer and
    position. On a CPU that comes out of the KV cache's memory: there are fewer pages, and memory is taken as they fill.
    On a GPU, where the memory of all pages is taken at the start, it comes on top, at once.

    Args:
        decoder: the model without its output layer.
        layers: its layers.
        hidden_size: H.
        storage: of the keys and values.
        pool: its pages.
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
        """Layers of the model; features are of 0 .. num_layers, both included."""
        return len(self._modules)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose features are kept."""
        return tuple(sorted(self._planes))

    def keep(self, layers: Sequence[int], min_len: int = 0) -> None:
        """Has all passes from now on keep the features of these layers too.

        What was cached before has none. It is not found by `adopt` any more, and the caches that were made before are
        not `is_current`.

        Args:
            layers: their numbers.
            min_len: tokens of a session that must still fit into the KV cache.

        Raises:
            ModelUnsupported: the model has no such layer, they are too many, or there is no memory for them.
        """
        new = sorted(set(layers) - set(self._planes))
        if not new:
            return
        if new[0] < 0 or new[-1] > self.num_layers:
            raise ModelUnsupported(
                f"features of layers {list(layers)} are asked for, the last one is {self.num_layers}"
            )
        if len(self._planes) + len(new) > _MAX_LAYERS:
            raise ModelUnsupported(f"features of more than {_MAX_LAYERS} layers are asked for")
        self._take_memory(new, min_len)
        for layer in new:
            self._tap(layer)
        kept = ",".join(map(str, self.layers))
        self._pool.rename(lambda root: hashlib.sha256(root + f" features {kept}".encode()).digest())

    def _take_memory(self, new: Sequence[int], min_len: int) -> None:
        """Makes room for further layers; changes nothing where there is none."""
        device = self._storage.positions.device
        beside_bytes = (len(self._planes) + len(new)) * self._storage.page_len * self.hidden_size * DTYPE.itemsize
        room_len = self._pool.num_pages_beside(beside_bytes) * self._pool.page_len
        if device.type == "cpu" and room_len < max(1, min_len):
            raise ModelUnsupported(
                f"with features of {len(self._planes) + len(new)} layers the KV cache has room for {room_len} tokens, "
                f"sessions may have {min_len}: a larger kv_budget_bytes or a smaller max_session_len is needed"
            )
        size = (len(self._storage.positions), self.hidden_size)
        try:
            planes = {layer: lazy_zeros(size, DTYPE, device) for layer in new}
        except (torch.OutOfMemoryError, OSError) as error:
            raise ModelUnsupported(f"there is no memory for features of {len(new)} layers") from error
        self._planes.update(planes)
        if device.type == "cpu":
            self._pool.keep_beside(beside_bytes)

    def prepare(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies what is needed in two pages, before a pass; see `StepLayout`."""
        if copies and self._planes:
            source, target = torch.tensor(copies, device=self._storage.positions.device).unbind(1)
            for plane in self._planes.values():
                pages = plane.view(-1, self._storage.page_len, self.hidden_size)
                pages[target] = pages[source]

    def write(self, rows: PassRows) -> None:
        """Keeps the features of the pass that was run last."""
        taken, self._taken = self._taken, {}
        if not self._planes:
            return
        device = self._storage.positions.device
        numbers, slots = torch.tensor([rows.write_rows, rows.write_slots], device=device).unbind(0)
        for layer, plane in self._planes.items():
            plane[slots] = taken[layer].view(-1, self.hidden_size)[numbers].to(DTYPE)

    def read_page(self, page: int) -> Tensor:
        """Returns the features that a page holds: bytes [page_bytes]."""
        parts = [plane.view(-1, self._storage.page_len, self.hidden_size)[page] for plane in self._kept()]
        return torch.cat([part.flatten().view(torch.uint8) for part in parts]) if parts else torch.empty(0).byte()

    def write_page(self, page: int, content: Tensor) -> None:
        """Fills a page with what `read_page` returned: uint8 [page_bytes], on a CPU."""
        kept = self._kept()
        for plane, part in zip(kept, content.view(torch.uint8).chunk(len(kept)) if kept else (), strict=True):
            place = plane.view(-1, self._storage.page_len, self.hidden_size)[page]
            place.copy_(part.view(DTYPE).view(place.shape))

    @property
    def page_bytes(self) -> int:
        """Memory of the features of a page."""
        return len(self._planes) * self._storage.page_len * self.hidden_size * DTYPE.itemsize

    def read(self, cache: KVCache, layers: Sequence[int], start: int, end: int) -> Tensor:
        """Returns the features of cached positions start .. end - 1, those of the layers side by side.

        Args:
            cache: of the session; `is_current`.
            layers: that are kept.
            start: at least 0.
            end: at most `cache.cached_len`.

        Returns:
            bfloat16 [end - start, len(layers) * H].
        """
        if not isinstance(cache, PagedKVCache):
            raise TypeError("the cache was made by another model class")
        slots = self._slots(cache.table, start, end)
        return torch.cat([self._planes[layer][slots] for layer in layers], dim=-1)

    def _kept(self) -> list[Tensor]:
        return [self._planes[layer] for layer in self.layers]

    def _slots(self, table: Sequence[int], start: int, end: int) -> Tensor:
        page_len, device = self._storage.page_len, self._storage.positions.device
        positions = torch.arange(start, end, device=device)
        return torch.tensor(table, device=device)[positions // page_len] * page_len + positions % page_len

    def _tap(self, layer: int) -> None:
        if layer == self.num_layers:
            self._decoder.register_forward_hook(lambda *call: self._take(layer, call[2].last_hidden_state))
            return
        module: Any = self._modules[layer]
        # Where a compiled layer is called too, which knows no hooks.
        module._compiled_call_impl = self._tapped(layer, module._compiled_call_impl or module._call_impl)

    def _tapped(self, layer: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def tapped(*arguments: Any, **keywords: Any) -> Any:
            self._take(layer, arguments[0] if arguments else keywords["hidden_states"])
            return call(*arguments, **keywords)

        return tapped

    def _take(self, layer: int, states: Tensor) -> None:
        self._taken[layer] = states
