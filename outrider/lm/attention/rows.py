"""Where the rows of a pass stand: positions, tables, and the slots that their keys and values go to."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.lm.kv_cache import Branch, StepLayout

MIN_ROWS = 4
"""Passes have at least so many rows, and usually a multiple of them: other numbers take other kernels, with other bits.

Measured with float32 linear layers on 2 threads: 1 to 3, 5 to 7 and 9 to 11 rows give other bits than 4, 8 and 12,
because the rows are split between threads down to fewer than 4; bfloat16 differed for 1 row only.
"""


@dataclass(frozen=True, slots=True)
class PassBranch:
    """A branch of one of the steps; its rows are numbered over the whole pass."""

    table: tuple[int, ...]
    rows: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PassRows:
    """The rows of all steps of a pass, one step after another.

    Attributes:
        num_rows: rows, without any that fill the pass up.
        branches: each row is in exactly one.
        write_rows: rows whose keys and values are written; a row that several branches share, once for each.
        write_slots: where.
    """

    num_rows: int
    branches: list[PassBranch]
    write_rows: list[int]
    write_slots: list[int]


def filled_rows(num_rows: int, step: int = MIN_ROWS) -> int:
    """Returns the rows that a pass is filled up to: a multiple of `step`, and no fewer than `MIN_ROWS`."""
    return max(MIN_ROWS, -(-num_rows // step) * step)


def lay_out_rows(layouts: Sequence[StepLayout], page_len: int) -> PassRows:
    """Numbers the rows of all steps: of each step its span first, then its nodes in order of their numbers."""
    rows = PassRows(sum(len(item.span.token_ids) + item.num_nodes for item in layouts), [], [], [])
    first = 0
    for layout in layouts:
        for branch in layout.branches:
            numbers = tuple(first + row for row in branch.rows)
            rows.branches.append(PassBranch(branch.table, numbers, branch.positions))
            _add_writes(rows, branch, first, page_len)
        first += len(layout.span.token_ids) + layout.num_nodes
    return rows


def _add_writes(rows: PassRows, branch: Branch, first: int, page_len: int) -> None:
    table = branch.table
    rows.write_rows.extend(first + row for row, _ in branch.writes)
    rows.write_slots.extend(table[at // page_len] * page_len + at % page_len for _, at in branch.writes)
