"""Attention by PyTorch's `scaled_dot_product_attention`, which is not batch-invariant but faster and smaller.

The kernel's order of summation depends on the number of rows and keys of a pass, so that a position's last bits depend
on how it was computed. Keys and values have the model's dtype. The rows of a prompt share their reads, which makes long
prompts several times as fast.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from outrider.errors import ModelUnsupported
from outrider.lm.attention.rows import PassBranch, PassRows
from outrider.lm.kv_storage import KVStorage


@dataclass(slots=True)
class _BranchTensors:
    """A branch of the pass: pages, rows and positions, int64, and the number of slots that any row attends to."""

    pages: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    num_keys: int

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Return the keys that each row attends to: bool [rows, num_keys]; None if every row attends to all."""
        keys = torch.arange(self.num_keys, device=self.positions.device)
        rows = self.positions.unsqueeze(1)
        if window is not None:
            return (keys <= rows) & (keys > rows - window)
        return None if len(self.rows) == 1 else keys <= rows


class SdpaPass:
    """One forward pass over the rows of several sessions.

    Args:
        rows: their positions, page tables and write slots.
        storage: memory of the pages.
    """

    def __init__(self, rows: PassRows, storage: KVStorage) -> None:
        device = storage.device
        self._page_len = storage.page_len
        self._write_rows = torch.tensor(rows.write_rows, device=device)
        self._write_slots = torch.tensor(rows.write_slots, device=device)
        self._branches = [_branch_tensors(branch, storage.page_len, device) for branch in rows.branches if branch.rows]
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Write the new keys and values, then attend; arguments and result as of `_attend`."""
        if softcap is not None:
            raise ModelUnsupported(
                "the model bounds attention scores, which PyTorch's SDPA does not support: set OUTRIDER_INVARIANT=true"
            )
        keys: torch.Tensor = module.kv_keys  # type: ignore[assignment]
        values: torch.Tensor = module.kv_values  # type: ignore[assignment]
        for stored, new in ((keys, key), (values, value)):
            stored[self._write_slots] = new[0].transpose(0, 1)[self._write_rows].to(stored.dtype)
        output = query.new_zeros(query.shape[2], query.shape[1], value.shape[3])
        for number, branch in enumerate(self._branches):
            if (number, sliding_window) not in self._masks:
                self._masks[number, sliding_window] = branch.mask(sliding_window)
            attended = scaled_dot_product_attention(
                query[:, :, branch.rows].to(keys.dtype),
                self._gathered(branch, keys),
                self._gathered(branch, values),
                attn_mask=self._masks[number, sliding_window],
                scale=scaling,
                enable_gqa=True,
            )
            output[branch.rows] = attended[0].transpose(0, 1).to(query.dtype)
        return output.unsqueeze(0)

    def _gathered(self, branch: _BranchTensors, stored: torch.Tensor) -> torch.Tensor:
        """Return the branch's keys or values in order of position: [1, num_kv_heads, num_keys, dim]."""
        pages = stored.view(-1, self._page_len, *stored.shape[1:])[branch.pages]
        return pages.flatten(0, 1)[: branch.num_keys].transpose(0, 1).unsqueeze(0)


def _branch_tensors(branch: PassBranch, page_len: int, device: torch.device) -> _BranchTensors:
    num_keys = max(branch.positions) + 1
    return _BranchTensors(
        torch.tensor(branch.table[: -(-num_keys // page_len)], device=device),
        torch.tensor(branch.rows, device=device),
        torch.tensor(branch.positions, device=device),
        num_keys,
    )
