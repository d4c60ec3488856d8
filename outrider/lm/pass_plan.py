"""What a pass takes besides the model, and how it goes from the first rank to the others: as whole numbers, no objects.

Each part is written as its length and its numbers, one behind the other. Whoever reads them takes nothing on trust: a
length that goes beyond the end, or numbers that are left over, are an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.lm.attention.rows import PassBranch, PassRows


@dataclass(frozen=True, slots=True)
class PassPlan:
    """All that a pass takes besides the model; small, and the same on every rank.

    Attributes:
        rows: where the rows stand.
        new_pages: see `StepLayout`.
        copies: see `StepLayout`.
        token_ids: of all rows.
        positions: of all rows.
        wanted: rows whose logits are wanted.
    """

    rows: PassRows
    new_pages: list[tuple[int, int]]
    copies: list[tuple[int, int]]
    token_ids: list[int]
    positions: list[int]
    wanted: list[int]

    def to_numbers(self) -> list[int]:
        """Returns the plan as whole numbers; `from_numbers` is its inverse."""
        rows = self.rows
        numbers = [rows.num_rows, len(rows.branches)]
        lists: list[Sequence[int]] = [
            *(part for branch in rows.branches for part in (branch.table, branch.rows, branch.positions)),
            rows.write_rows,
            rows.write_slots,
            *([number for pair in pairs for number in pair] for pairs in (self.new_pages, self.copies)),
            self.token_ids,
            self.positions,
            self.wanted,
        ]
        for part in lists:
            numbers.append(len(part))
            numbers.extend(part)
        return numbers

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> "PassPlan":
        """Returns the plan of `to_numbers`; raises ValueError for numbers that are none."""
        if len(numbers) < 2:
            raise ValueError(f"{len(numbers)} numbers are no plan")
        num_rows, num_branches = numbers[:2]
        lists = _split(numbers[2:])
        if len(lists) != 3 * num_branches + 7:
            raise ValueError(f"{len(lists)} lists are no plan of {num_branches} branches")
        branches = [
            PassBranch(*map(tuple, lists[first : first + 3]))  # table, rows, positions
            for first in range(0, 3 * num_branches, 3)
        ]
        write_rows, write_slots, new_pages, copies, *rest = lists[3 * num_branches :]
        return cls(PassRows(num_rows, branches, write_rows, write_slots), _pairs(new_pages), _pairs(copies), *rest)


def _split(numbers: Sequence[int]) -> list[list[int]]:
    """Returns the lists of numbers that stand one behind the other, each behind its length."""
    lists, at = [], 0
    while at < len(numbers):
        end = at + 1 + numbers[at]
        if not at < end <= len(numbers):
            raise ValueError(f"a list of {numbers[at]} numbers does not fit")
        lists.append(list(numbers[at + 1 : end]))
        at = end
    return lists


def _pairs(numbers: list[int]) -> list[tuple[int, int]]:
    even: Iterator[int] = iter(numbers)
    return list(zip(even, even, strict=True))
