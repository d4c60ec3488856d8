"""Attention by PyTorch's flex attention, compiled: each row reads the pages of its own table.

All pages together are one long sequence of keys, of which a block mask lists, for every row, the pages of its table.
Query heads that share a key head are the rows of one unit of work, so a unit has the same shape in every pass: that is
what makes its bits independent of the pass.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
import torch._dynamo
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from outrider.lm.attention.rows import PassRows, filled_rows
from outrider.lm.kv_storage import KVStorage, lazy_zeros
from outrider.lm.pages import SCRATCH_PAGE

_NUM_ROWS: Final = 4096


class FlexPass(NamedTuple):
    """One pass; N rows, of which the last ones may fill it up.

    Attributes:
        write_rows: int64 [W].
        write_slots: int64 [W].
        row_positions: int32 [at least N].
        row_pages: first slot of the page that each row's own position is on: int32 [at least N].
        slot_positions: int32 [num_slots].
        num_pages: pages that each row reads: int32 [1, 1, N].
        pages: their numbers: int32 [1, 1, N, pages of the storage].
    """

    write_rows: torch.Tensor
    write_slots: torch.Tensor
    row_positions: torch.Tensor
    row_pages: torch.Tensor
    slot_positions: torch.Tensor
    num_pages: torch.Tensor
    pages: torch.Tensor


class FlexPasses:
    """Makes passes; keeps the memory of positions and page lists between them.

    Args:
        storage: of keys and values.
        row_step: passes are filled up to a multiple of so many rows.
    """

    def __init__(self, storage: KVStorage, row_step: int) -> None:
        self._storage = storage
        self._row_step = row_step
        self._make_room(_NUM_ROWS)
        for tensor in (storage.positions, *storage.tensors):
            _mark_static(tensor)

    def make(self, rows: PassRows) -> FlexPass:
        """Returns the pass over these rows; the one before is void."""
        num_rows = filled_rows(rows.num_rows, self._row_step)
        if num_rows > len(self._positions):
            self._make_room(2 * num_rows)
        # Beyond a row's number of pages its list is not read, so what an earlier pass left there does not matter.
        pages, positions = self._pages[:num_rows], self._positions[:num_rows]
        for branch in rows.branches:
            index = torch.tensor(branch.rows)
            positions[index] = torch.tensor(branch.positions, dtype=torch.int32)
            pages[index, : len(branch.table)] = torch.tensor(branch.table, dtype=torch.int32)
        # Rows that fill the pass up look at one slot that nobody uses.
        positions[rows.num_rows :] = 0
        pages[rows.num_rows :, 0] = SCRATCH_PAGE
        last = positions // self._storage.page_len
        torch.mul(pages.gather(1, last.long()[:, None])[:, 0], self._storage.page_len, out=self._row_pages[:num_rows])
        return FlexPass(
            write_rows=_filled_up(rows.write_rows),
            write_slots=_filled_up(rows.write_slots),
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


def _filled_up(values: list[int]) -> torch.Tensor:
    # A repeated write changes nothing, and a size of 1 would be compiled by itself.
    return torch.tensor(values + [values[-1]] * (filled_rows(len(values)) - len(values)))


def _mark_static(tensor: torch.Tensor) -> None:
    # A symbol for the size of what a mask looks up breaks the code that PyTorch 2.13 generates.
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
    """Writes the new keys and values, then attends; see `_attend`. To be compiled: else it is slow and takes memory."""
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
        # The other kernel splits the keys between threads by their number.
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
        # All of a row's pages but the one it is on itself are seen whole, so no slot's position need be looked up.
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
