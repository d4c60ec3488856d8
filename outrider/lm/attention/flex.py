"""Batch-invariant attention by PyTorch's compiled flex attention: each row reads the pages of its own table.

The pages of the pool form one sequence of keys; a block mask lists, for every row, the pages of its table. The query
heads of a row that share a key head are one query block, so that a block has the same shape in every pass and its bits
do not depend on the pass.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
import torch._dynamo
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from outrider.control.pass_times import MULTIPLES_OF_FOUR, PaddedSizes
from outrider.lm.attention.rows import PassRows
from outrider.lm.kv_storage import KVStorage, lazy_zeros
from outrider.lm.pages import SCRATCH_PAGE

_NUM_ROWS: Final = 4096


class FlexPass(NamedTuple):
    """The tensors of one pass of N rows, padding included.

    Attributes:
        write_rows: rows whose keys and values are written: int64 [W].
        write_slots: slots that they are written to: int64 [W].
        row_positions: session position of each row: int32 [at least N].
        row_pages: first slot of the page that holds each row's own position: int32 [at least N].
        slot_positions: session position of each slot: int32 [num_slots].
        num_pages: number of pages that each row reads: int32 [1, 1, N].
        pages: page numbers of each row: int32 [1, 1, N, pages of the storage].
    """

    write_rows: torch.Tensor
    write_slots: torch.Tensor
    row_positions: torch.Tensor
    row_pages: torch.Tensor
    slot_positions: torch.Tensor
    num_pages: torch.Tensor
    pages: torch.Tensor


class FlexPasses:
    """A factory of passes that reuses the memory of positions and page lists.

    Args:
        storage: memory of keys and values.
        sizes: numbers of rows that passes are padded to.
    """

    def __init__(self, storage: KVStorage, sizes: PaddedSizes) -> None:
        self._storage = storage
        self._sizes = sizes
        self._make_room(_NUM_ROWS)
        for tensor in (storage.positions, *storage.tensors):
            _mark_static(tensor)

    def make(self, rows: PassRows) -> FlexPass:
        """Return the pass over these rows; it overwrites the tensors of the previous pass."""
        num_rows = self._sizes.padded(rows.num_rows)
        if num_rows > len(self._positions):
            self._make_room(2 * num_rows)
        # A row's page list is not read beyond its number of pages, so that old entries need not be cleared.
        pages, positions = self._pages[:num_rows], self._positions[:num_rows]
        for branch in rows.branches:
            index = torch.tensor(branch.rows)
            positions[index] = torch.tensor(branch.positions, dtype=torch.int32)
            pages[index, : len(branch.table)] = torch.tensor(branch.table, dtype=torch.int32)
        # Padding rows read the scratch page.
        positions[rows.num_rows :] = 0
        pages[rows.num_rows :, 0] = SCRATCH_PAGE
        last = positions // self._storage.page_len
        torch.mul(pages.gather(1, last.long()[:, None])[:, 0], self._storage.page_len, out=self._row_pages[:num_rows])
        return FlexPass(
            write_rows=_padded(rows.write_rows),
            write_slots=_padded(rows.write_slots),
            row_positions=self._positions,
            row_pages=self._row_pages,
            slot_positions=self._storage.positions,
            num_pages=(last + 1).view(1, 1, -1),
            pages=pages.view(1, 1, num_rows, -1),
        )

    def _make_room(self, num_rows: int) -> None:
        self._positions, self._row_pages = torch.zeros(2, num_rows, dtype=torch.int32)
        self._pages = lazy_zeros((num_rows, self._storage.num_pages), torch.int32, torch.device("cpu"))
        _mark_static(self._positions)
        _mark_static(self._row_pages)


def _padded(values: list[int]) -> torch.Tensor:
    # A repeated write has no effect, and a size of 1 would be compiled separately.
    return torch.tensor(values + [values[-1]] * (MULTIPLES_OF_FOUR.padded(len(values)) - len(values)))


def _mark_static(tensor: torch.Tensor) -> None:
    # With symbolic sizes of the tensors that a mask reads, PyTorch 2.13 generates invalid code.
    torch._dynamo.mark_static(tensor)


def flex_attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    outrider_pass: FlexPass,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Write the new keys and values, attend; see `_attend`. Must be compiled, else it is slow and takes much memory."""
    keys: torch.Tensor = module.kv_keys  # type: ignore[assignment]
    values: torch.Tensor = module.kv_values  # type: ignore[assignment]
    _write(keys, key, outrider_pass)
    _write(values, value, outrider_pass)
    group: int = module.kv_group  # type: ignore[assignment]
    page_len: int = module.kv_page_len  # type: ignore[assignment]
    num_rows, num_kv_heads = query.shape[2], keys.shape[1]
    units = query[0].to(keys.dtype).view(num_kv_heads, group, num_rows, -1).transpose(1, 2)
    output = flex_attention(
        units.reshape(1, num_kv_heads, num_rows * group, -1),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        score_mod=_softcap(softcap) if softcap is not None else None,
        block_mask=_block_mask(outrider_pass, (group, page_len), (num_rows * group, keys.shape[0]), sliding_window),
        scale=scaling,
        # The decoding kernel splits the keys between threads by their number, which changes the bits.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    assert isinstance(output, torch.Tensor)
    by_row = output[0].view(num_kv_heads, num_rows, group, -1).transpose(0, 1)
    return by_row.reshape(1, num_rows, num_kv_heads * group, -1).to(query.dtype)


def _write(stored: torch.Tensor, rows: torch.Tensor, outrider_pass: FlexPass) -> None:
    new = rows[0].transpose(0, 1).index_select(0, outrider_pass.write_rows)
    stored.index_copy_(0, outrider_pass.write_slots, new.to(stored.dtype))


def _block_mask(
    outrider_pass: FlexPass, block_size: tuple[int, int], lengths: tuple[int, int], window: int | None
) -> BlockMask:
    row_positions, row_pages, slot_positions = outrider_pass[2:5]
    group, page_len = block_size

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        row = query // group
        if window is not None:
            other = slot_positions[slot]
            return (other <= row_positions[row]) & (other > row_positions[row] - window)
        # A row attends to all of each page but the last, so that slot positions need not be read.
        offset = slot - row_pages[row]
        return (offset <= row_positions[row] % page_len) | (offset >= page_len)

    return BlockMask.from_kv_blocks(
        outrider_pass.num_pages,
        outrider_pass.pages,
        BLOCK_SIZE=block_size,
        mask_mod=sees,
        seq_lengths=lengths,
        compute_q_blocks=False,
    )


def _softcap(bound: float) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.tanh(score / bound) * bound

    return capped
