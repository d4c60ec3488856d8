"""The KV cache of one session: blocks of keys and values in order of position, with a pending proposal tree on top."""

from collections.abc import Sequence

import torch

BLOCK_LEN = 256
"""Positions per block. Part of the numerics: attention sums within a block, then over blocks (see `attention`)."""


class BlockKVCache:
    """Keys and values of one session on every layer, in blocks of `BLOCK_LEN` positions.

    A pass writes a span at its positions, and of a proposal tree the main line (the branch of first children) right
    behind it, as if it were committed; the nodes beside the main line wait aside. `keep` then only has to move the
    nodes of an accepted side branch to their positions, and truncation is one assignment: what lies beyond `cached_len`
    is never read.

    Shapes: per layer keys and values [num_blocks, num_kv_heads, BLOCK_LEN, head_dim]; memory grows by doubling.
    """

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._aside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._main_line: tuple[int, ...] = ()
        self._side_nodes: dict[int, int] = {}
        self._cached_len = 0

    @property
    def cached_len(self) -> int:
        """Tokens cached."""
        return self._cached_len

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def truncate(self, length: int) -> None:
        """Drops everything from position `length` on; memory stays for reuse."""
        self._cached_len = min(self._cached_len, length)
        self._forget_tree()

    def begin(self, span_end: int, main_line: tuple[int, ...], side_nodes: Sequence[int]) -> None:
        """Announces what the pass will write: tokens up to `span_end`, then nodes of a tree."""
        self._forget_tree()
        self._cached_len = span_end
        self._main_line = main_line
        self._side_nodes = {number: index for index, number in enumerate(side_nodes)}

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts keys and values [num_kv_heads, rows, head_dim] at positions start, start + 1, ..."""
        self._reserve(layer, start + keys.shape[1], keys, values)
        for stored, rows in ((self._keys[layer], keys), (self._values[layer], values)):
            _write(stored, start, rows)

    def put_aside(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Holds keys and values [num_kv_heads, num_side_nodes, head_dim] of the nodes beside the main line."""
        self._aside[layer] = (keys, values)

    def blocks(self, layer: int, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of the first blocks: keys and values [num_blocks, num_kv_heads, BLOCK_LEN, head_dim]."""
        return self._keys[layer][:num_blocks], self._values[layer][:num_blocks]

    def branch_blocks(
        self, layer: int, num_blocks: int, path: Sequence[int], base_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of the first blocks in which the nodes of `path` stand at their positions."""
        keys, values = (tensor.clone() for tensor in self.blocks(layer, num_blocks))
        self._place(layer, keys, values, path, base_len)
        return keys, values

    def keep(self, path: Sequence[int]) -> None:
        """Keeps the branch through these nodes (from a child of the root downwards) and drops the rest of the tree."""
        if not set(path) <= {*self._main_line, *self._side_nodes}:
            raise ValueError("the path has nodes that the last pass did not run")
        for layer in self._aside:
            self._place(layer, self._keys[layer], self._values[layer], path, self._cached_len)
        self._cached_len += len(path)
        self._forget_tree()

    def _place(self, layer: int, keys: torch.Tensor, values: torch.Tensor, path: Sequence[int], base_len: int) -> None:
        for position, number in enumerate(path, start=base_len):
            index = self._side_nodes.get(number)
            if index is not None:
                for stored, aside in zip((keys, values), self._aside[layer], strict=True):
                    _write(stored, position, aside[:, index : index + 1])

    def _forget_tree(self) -> None:
        self._aside = {}
        self._main_line = ()
        self._side_nodes = {}

    def _reserve(self, layer: int, length: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        needed = -(-length // BLOCK_LEN)
        for stores, rows in ((self._keys, keys), (self._values, values)):
            if layer == len(stores):
                stores.append(_allocate(needed, rows))
            elif stores[layer].shape[0] < needed:
                grown = _allocate(max(needed, 2 * stores[layer].shape[0]), rows)
                grown[: stores[layer].shape[0]] = stores[layer]
                stores[layer] = grown


def _allocate(num_blocks: int, rows: torch.Tensor) -> torch.Tensor:
    # Zeros, not empty: masked positions are multiplied by 0, and uninitialised memory may hold NaN.
    return rows.new_zeros(num_blocks, rows.shape[0], BLOCK_LEN, rows.shape[2])


def _write(stored: torch.Tensor, start: int, rows: torch.Tensor) -> None:
    done = 0
    while done < rows.shape[1]:
        block, offset = divmod(start + done, BLOCK_LEN)
        num = min(BLOCK_LEN - offset, rows.shape[1] - done)
        stored[block, :, offset : offset + num] = rows[:, done : done + num]
        done += num
