"""The layout of the rows of a pass: positions, page tables, and the slots of their keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.lm.step_layout import Branch, StepLayout

MIN_ROWS = 4
"""Least rows of a product whose weights are not packed: other numbers select other kernels.

Measured with float32 linear layers on 2 threads: 1 to 3, 5 to 7 and 9 to 11 rows have other bits than 4, 8 and 12,
because rows are split between threads into parts of fewer than 4; bfloat16 differed for 1 row only.
"""


@dataclass(frozen=True, slots=True)
class PassBranch:
    """A branch of one step: its page table, and its rows, numbered over the whole pass, with their positions."""

    table: tuple[int, ...]
    rows: tuple[int, ...]
    positions: tuple[int, ...]

    def part(self, start: int, end: int) -> "PassBranch":
        """Return the branch with its rows in start .. end - 1, numbered from 0; perhaps none."""
        kept = [index for index, row in enumerate(self.rows) if start <= row < end]
        rows = tuple(self.rows[index] - start for index in kept)
        return PassBranch(self.table, rows, tuple(self.positions[index] for index in kept))


@dataclass(frozen=True, slots=True)
class PassRows:
    """The rows of all steps of a pass, one step after another.

    Attributes:
        num_rows: number of rows, padding excluded.
        branches: branches of all steps; each row is in exactly one.
        write_rows: rows whose keys and values are written; once per branch for a row that several branches share.
        write_slots: slots that they are written to.
    """

    num_rows: int
    branches: list[PassBranch]
    write_rows: list[int]
    write_slots: list[int]

    def part(self, start: int, end: int) -> "PassRows":
        """Return the rows start .. end - 1, numbered from 0."""
        writes = [
            (row - start, slot)
            for row, slot in zip(self.write_rows, self.write_slots, strict=True)
            if start <= row < end
        ]
        branches = [branch.part(start, end) for branch in self.branches]
        return PassRows(
            end - start,
            [branch for branch in branches if branch.rows],
            [row for row, _ in writes],
            [slot for _, slot in writes],
        )


def lay_out_rows(layouts: Sequence[StepLayout], page_len: int) -> PassRows:
    """Return the rows of all steps, one step after another: its span first, then its nodes in order of number."""
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
