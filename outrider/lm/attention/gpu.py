"""Batch-invariant attention by Triton kernels, for GPUs.

A program computes the outputs of one row for the query heads that share a key head. It reads the keys and values of the
row's branch in blocks counted from position 0, in order, and adds in float32: the bits follow from the row's own query,
position and page table. All sessions of a pass take one launch a layer.

Triton comes with PyTorch's builds for GPUs. It compiles a kernel when it first runs, for which it needs a C compiler.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from outrider.lm.attention.gpu_rows import GPU_BLOCK_LEN, GpuPass

_STAGED_BYTES: Final = 32 << 10
"""A block of keys and values of 128 numbers each, in 16 bits. The smallest GPUs have 99 KB of shared memory."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    outrider_pass: GpuPass,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Write the new keys and values, then attend; arguments and result as of `_attend` in `attention`."""
    keys: torch.Tensor = module.kv_keys  # type: ignore[assignment]
    values: torch.Tensor = module.kv_values  # type: ignore[assignment]
    numbers, page_len = outrider_pass
    _, num_heads, num_rows, key_dim = query.shape
    num_kv_heads, value_dim = value.shape[1], value.shape[3]
    for stored, new in ((keys, key), (values, value)):
        rows = new[0].transpose(0, 1).to(stored.dtype).contiguous()
        width = num_kv_heads * rows.shape[2]
        _write[(num_rows,)](rows, stored, numbers, num_rows, width, triton.next_power_of_2(width))
    output = query.new_empty(1, num_rows, num_heads, value_dim)
    _attend[(num_rows, num_kv_heads)](
        query[0].transpose(0, 1).to(keys.dtype).contiguous(),
        keys,
        values,
        output,
        numbers,
        scaling,
        softcap or 0.0,
        NUM_ROWS=num_rows,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        PADDED_GROUP=_padded(num_heads // num_kv_heads),
        KEY_DIM=key_dim,
        PADDED_KEY=_padded(key_dim),
        VALUE_DIM=value_dim,
        PADDED_VALUE=_padded(value_dim),
        WINDOW=sliding_window or 0,
        HAS_SOFTCAP=softcap is not None,
        PAGE_LEN=page_len,
        BLOCK=GPU_BLOCK_LEN,
        num_stages=_num_stages(keys.element_size(), key_dim + value_dim),
    )
    return output


def _num_stages(num_bytes: int, num_values: int) -> int:
    """Return how many blocks of keys and values are held at once: Triton's default, or one where they are large."""
    return 3 if GPU_BLOCK_LEN * num_values * num_bytes <= _STAGED_BYTES else 1


def _padded(num: int) -> int:
    """Return a size that products of the kernel can have."""
    return max(16, int(triton.next_power_of_2(num)))


# All integers are constants: Triton compiles variants by the values of others, which may add in another order.
@triton.jit
def _write(new, stored, numbers, NUM_ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Copy a row, [WIDTH], to each of its slots."""
    row = tl.program_id(0)
    at = tl.arange(0, PADDED)
    content = tl.load(new + row * WIDTH + at, mask=at < WIDTH)
    first = tl.load(numbers + 3 * NUM_ROWS + row)
    end = tl.load(numbers + 3 * NUM_ROWS + row + 1)
    for place in range(first, end):
        slot = tl.load(numbers + place).to(tl.int64)
        tl.store(stored + slot * WIDTH + at, content, mask=at < WIDTH)


@triton.jit
def _attend(
    query,
    keys,
    values,
    output,
    numbers,
    scaling,
    softcap,
    NUM_ROWS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PAGE_LEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the outputs, [GROUP, VALUE_DIM], of one row and the query heads of one key head; zeros for padding."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    position = tl.load(numbers + NUM_ROWS + row)
    table = tl.load(numbers + 2 * NUM_ROWS + row)
    member = tl.arange(0, PADDED_GROUP)
    key_at = tl.arange(0, PADDED_KEY)
    value_at = tl.arange(0, PADDED_VALUE)
    heads = row * NUM_HEADS + kv_head * GROUP + member
    of_group = (member < GROUP)[:, None]
    of_key = (key_at < KEY_DIM)[None, :]
    of_value = (value_at < VALUE_DIM)[None, :]
    queries = tl.load(query + heads[:, None] * KEY_DIM + key_at[None, :], mask=of_group & of_key, other=0.0)
    first = 0
    end = position + 1
    if WINDOW > 0:
        # A function of the position alone; the block has a key that the row attends to.
        first = tl.maximum(end - WINDOW, 0) // BLOCK * BLOCK
    if table < 0:
        end = first
    largest = tl.full((PADDED_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED_GROUP,), tl.float32)
    summed = tl.zeros((PADDED_GROUP, PADDED_VALUE), tl.float32)
    for start in range(first, end, BLOCK):
        places = start + tl.arange(0, BLOCK)
        seen = places < end
        if WINDOW > 0:
            seen = seen & (places >= end - WINDOW)
        page = tl.load(numbers + table + places // PAGE_LEN, mask=seen, other=0)
        lines = (page.to(tl.int64) * PAGE_LEN + places % PAGE_LEN) * (NUM_HEADS // GROUP) + kv_head
        key = tl.load(keys + lines[:, None] * KEY_DIM + key_at[None, :], mask=seen[:, None] & of_key, other=0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scaling
        if HAS_SOFTCAP:
            # tanh, by the exponential of a number that is not positive.
            decay = tl.exp(-2.0 * tl.abs(scores) / softcap)
            bounded = softcap * (1.0 - decay) / (1.0 + decay)
            scores = tl.where(scores < 0, -bounded, bounded)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        before = largest
        largest = tl.maximum(before, tl.max(scores, 1))
        kept = tl.exp(before - largest)
        weights = tl.exp(scores - largest[:, None])
        value = tl.load(
            values + lines[:, None] * VALUE_DIM + value_at[None, :], mask=seen[:, None] & of_value, other=0.0
        )
        total = total * kept + tl.sum(weights, 1)
        summed = summed * kept[:, None]
        summed += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    if table < 0:
        total += 1.0
    found = summed / total[:, None]
    places = output + heads[:, None] * VALUE_DIM + value_at[None, :]
    tl.store(places, found.to(output.dtype.element_ty), mask=of_group & of_value)
