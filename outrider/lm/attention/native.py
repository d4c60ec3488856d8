"""Batch-invariant attention by the native operator `paged_attention`, for CPUs; see `outrider.native`.

A pass is described to the operator by one tensor of numbers, so that compiled layers see a single size that varies.
Pages hold bfloat16 where a model computes it: the operator reads its keys and values without loss, and adds in float32.
"""

from array import array
from typing import Final, NamedTuple

import torch

from outrider import native
from outrider.lm.attention.rows import PassRows

PAGE_LEN: Final = 32
"""Positions of a page, as the operator has them."""


class NativePass(NamedTuple):
    """One pass.

    Attributes:
        layout: see `lay_out`.
    """

    layout: torch.Tensor


def lay_out(rows: PassRows) -> NativePass:
    """Return the pass over these rows.

    Its layout, int32, has the number of writes, their rows and their slots; then the number of branches, and of each
    the number of its rows and of its pages, the rows, their positions, and the pages. Rows of no branch are padding.
    """
    numbers = array("i", (len(rows.write_rows), *rows.write_rows, *rows.write_slots, len(rows.branches)))
    for branch in rows.branches:
        numbers.extend((len(branch.rows), len(branch.table), *branch.rows, *branch.positions, *branch.table))
    return NativePass(torch.frombuffer(numbers, dtype=torch.int32))


def page_dtype(dtype: torch.dtype, key_dims: set[int]) -> torch.dtype:
    """Return the dtype of the pages of a model: bfloat16 if the operator can read it, else float32."""
    return dtype if dtype == torch.bfloat16 and all(dim % 2 == 0 for dim in key_dims) else torch.float32


def kernel(dtype: torch.dtype) -> str:
    """Return the name of the bits for pages of a dtype, which is part of `numerics`: AMX has its own for bfloat16."""
    has_tiles = native.best_variant() is native.Variant.AMX and dtype == torch.bfloat16
    return f"{'amx' if has_tiles else 'native'}-pages-{PAGE_LEN}"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    outrider_pass: NativePass,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Write the new keys and values, then attend; arguments and result as of `_attend` in `attention`."""
    keys: torch.Tensor = module.kv_keys  # type: ignore[assignment]
    values: torch.Tensor = module.kv_values  # type: ignore[assignment]
    output: torch.Tensor = torch.ops.outrider.paged_attention.default(
        query.to(keys.dtype),
        key.to(keys.dtype),
        value.to(keys.dtype),
        keys,
        values,
        outrider_pass.layout,
        scaling,
        sliding_window or 0,
        softcap or 0.0,
        module.kv_variant,
    )
    return output.to(query.dtype)
