"""The rows of a pass on a GPU: always as many, described by one tensor of numbers.

The numbers, int32, of R rows: R token ids, R positions, R places of the rows' page tables, R + 1 places of their
slots; then the slots that keys and values are written to, and the page tables. A place is an index of this tensor. A
row without a page table, -1, is padding.
"""

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from outrider.lm.attention.rows import PassRows

GPU_BLOCK_LEN: Final = 64
"""Positions per block. It affects the numerics: attention sums within a block, then over blocks."""
PADDING: Final = -1


class GpuPass(NamedTuple):
    """One pass.

    Attributes:
        numbers: int32, on the GPU.
        page_len: positions per page.
    """

    numbers: torch.Tensor
    page_len: int


def header_len(num_rows: int) -> int:
    """Return how many numbers come before the slots and the page tables."""
    return 4 * num_rows + 1


def describe(num_rows: int, token_ids: Sequence[int], positions: Sequence[int], rows: PassRows) -> "array[int]":
    """Return the numbers of a pass.

    Args:
        num_rows: R.
        token_ids: of the rows; the last one is repeated for padding.
        positions: of the rows, likewise.
        rows: their page tables and slots; at most R.
    """
    missing = num_rows - len(token_ids)
    first = header_len(num_rows)
    slots: list[list[int]] = [[] for _ in range(num_rows)]
    for row, slot in zip(rows.write_rows, rows.write_slots, strict=True):
        slots[row].append(slot)
    places = array("i", (first,))
    for found in slots:
        places.append(places[-1] + len(found))
    tables = array("i", [PADDING] * num_rows)
    pages = array("i")
    for branch in rows.branches:
        for row in branch.rows:
            tables[row] = places[-1] + len(pages)
        pages.extend(branch.table)
    numbers = array("i", (*token_ids, *[token_ids[-1]] * missing, *positions, *[positions[-1]] * missing))
    numbers.extend(tables)
    numbers.extend(places)
    for found in slots:
        numbers.extend(found)
    numbers.extend(pages)
    return numbers
