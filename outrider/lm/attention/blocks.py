"""Batch-invariant attention by plain PyTorch operations, in blocks of `BLOCK_LEN` positions counted from 0.

Scores and weights are float32. The weighted values of each block are summed by one matrix product of fixed shape, and
the blocks are added sequentially in order of position. Later blocks only add exact zeros, and the number of rows does
not change a row's sums (measured on CPUs: float32 products of at least `MIN_ROWS` rows, any number of blocks).
"""

from dataclasses import dataclass, field

import torch

from outrider.lm.attention.rows import MIN_ROWS, PassBranch, PassRows
from outrider.lm.kv_storage import KVStorage
from outrider.lm.pages import SCRATCH_PAGE

BLOCK_LEN = 256
"""Positions per block. It affects the numerics: attention sums within a block, then over blocks."""


@dataclass(slots=True)
class _BranchTensors:
    """A branch of the pass: pages, int64 [num_blocks * pages per block]; rows, positions, int64 [at least MIN_ROWS]."""

    pages: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    num_blocks: int
    biases: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def bias(self, group: int, window: int | None) -> torch.Tensor:
        """Return 0 for keys that a row attends to, else -inf: float32 [num_blocks, 1, group * rows, BLOCK_LEN]."""
        if (group, window) not in self.biases:
            keys = torch.arange(self.num_blocks * BLOCK_LEN, device=self.positions.device)
            rows = self.positions.repeat(group).unsqueeze(1)
            seen = keys <= rows if window is None else (keys <= rows) & (keys > rows - window)
            bias = torch.zeros(seen.shape, device=keys.device).masked_fill_(~seen, float("-inf"))
            self.biases[group, window] = bias.view(-1, self.num_blocks, 1, BLOCK_LEN).permute(1, 2, 0, 3).contiguous()
        return self.biases[group, window]


class BlockPass:
    """One forward pass over the rows of several sessions.

    Args:
        rows: their positions, page tables and write slots.
        storage: memory of the pages; its `page_len` divides `BLOCK_LEN`.
    """

    def __init__(self, rows: PassRows, storage: KVStorage) -> None:
        device = storage.device
        self._page_len = storage.page_len
        self._write_rows = torch.tensor(rows.write_rows, device=device)
        self._write_slots = torch.tensor(rows.write_slots, device=device)
        self._branches = [_branch_tensors(branch, storage.page_len, device) for branch in rows.branches if branch.rows]

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
        keys: torch.Tensor = module.kv_keys  # type: ignore[assignment]
        values: torch.Tensor = module.kv_values  # type: ignore[assignment]
        for stored, new in ((keys, key), (values, value)):
            stored[self._write_slots] = new[0].transpose(0, 1)[self._write_rows].to(stored.dtype)
        output = query.new_zeros(query.shape[2], query.shape[1], value.shape[3])
        scaled = query[0].float() * scaling
        for branch in self._branches:
            summed = self._branch_output(branch, scaled[:, branch.rows], keys, values, sliding_window, softcap)
            output[branch.rows] = summed.to(query.dtype)
        return output.unsqueeze(0)

    def _branch_output(
        self,
        branch: _BranchTensors,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Return outputs, float32 [rows, num_heads, value_dim]; `query` is float32 [num_heads, rows, key_dim]."""
        num_heads, num_rows, _ = query.shape
        num_kv_heads = keys.shape[1]
        group = num_heads // num_kv_heads
        # Query heads that share a key head become rows of one product, so that keys need not be repeated.
        grouped = query.reshape(num_kv_heads, group * num_rows, -1)
        bias = branch.bias(group, window)
        summed = block_attention(grouped, self._blocks(branch, keys), self._blocks(branch, values), bias, softcap)
        return summed.view(num_kv_heads, group, num_rows, -1).permute(2, 0, 1, 3).flatten(1, 2)

    def _blocks(self, branch: _BranchTensors, stored: torch.Tensor) -> torch.Tensor:
        """Return the branch's keys or values in order of position: [num_blocks, num_kv_heads, BLOCK_LEN, dim]."""
        pages = stored.view(-1, self._page_len, *stored.shape[1:])[branch.pages]
        return pages.reshape(branch.num_blocks, BLOCK_LEN, *stored.shape[1:]).transpose(1, 2)


def _branch_tensors(branch: PassBranch, page_len: int, device: torch.device) -> _BranchTensors:
    num_blocks = max(branch.positions) // BLOCK_LEN + 1
    num_pages = num_blocks * BLOCK_LEN // page_len
    pages = [*branch.table[:num_pages], *[SCRATCH_PAGE] * (num_pages - len(branch.table))]
    # The last row is repeated so that matrix products have at least MIN_ROWS rows; repetitions write the same result.
    missing = max(0, MIN_ROWS - len(branch.rows))
    rows = [*branch.rows, *[branch.rows[-1]] * missing]
    positions = [*branch.positions, *[branch.positions[-1]] * missing]
    return _BranchTensors(
        torch.tensor(pages, device=device),
        torch.tensor(rows, device=device),
        torch.tensor(positions, device=device),
        num_blocks,
    )


def block_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """Return softmax(query keys^T + bias) values, summed block by block in order of position.

    Args:
        query: scaled, float32 [H, R, D]; R at least `MIN_ROWS`.
        keys: [num_blocks, H, BLOCK_LEN, D], any floating dtype.
        values: [num_blocks, H, BLOCK_LEN, E], any floating dtype.
        bias: float32 [num_blocks, 1, R, BLOCK_LEN], 0 or -inf; 0 for at least one key of every row.
        softcap: bound of the scores, applied by tanh; None for none.

    Returns:
        float32 [H, R, E].
    """
    scores = torch.matmul(query, keys.float().transpose(-1, -2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores += bias
    # A maximum is exact in any order, so that it may be taken over all blocks at once.
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True).amax(dim=0)).exp_()
    parts = torch.matmul(weights, values.float())
    totals = weights.sum(dim=-1, keepdim=True)
    output, total = parts[0], totals[0]
    for part, block_total in zip(parts[1:], totals[1:], strict=True):
        output = output + part
        total = total + block_total
    return output / total
