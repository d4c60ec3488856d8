"""The plan of a forward pass: all inputs besides the model, serialised as integers for the other ranks.

Each list is written as its length followed by its numbers. Reading validates the numbers: a length beyond the end, or
numbers left over, raise ValueError.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.lm.attention.rows import PassBranch, PassRows, lay_out_rows
from outrider.lm.kv_cache import PagedKVCache
from outrider.lm.model import SessionStep
from outrider.lm.step_layout import PageCopy


@dataclass(frozen=True, slots=True)
class PassPlan:
    """The inputs of a forward pass besides the model; small, and the same on every rank.

    Attributes:
        rows: positions, page tables and write slots of the rows.
        new_pages: see `StepLayout`.
        copies: see `StepLayout`.
        token_ids: token ids of all rows.
        positions: session positions of all rows.
        wanted: indices of the rows whose logits are computed.
    """

    rows: PassRows
    new_pages: list[int]
    copies: list[PageCopy]
    token_ids: list[int]
    positions: list[int]
    wanted: list[int]

    def to_numbers(self) -> list[int]:
        """Return the plan as integers; `from_numbers` is the inverse."""
        rows = self.rows
        numbers = [rows.num_rows, len(rows.branches)]
        lists: list[Sequence[int]] = [
            *(part for branch in rows.branches for part in (branch.table, branch.rows, branch.positions)),
            rows.write_rows,
            rows.write_slots,
            self.new_pages,
            [number for copy in self.copies for number in copy],
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
        """Return the plan from the result of `to_numbers`; raise ValueError for invalid numbers."""
        if len(numbers) < 2:
            raise ValueError(f"a plan has at least 2 numbers, not {len(numbers)}")
        num_rows, num_branches = numbers[:2]
        lists = _split(numbers[2:])
        if len(lists) != 3 * num_branches + 7:
            raise ValueError(f"a plan of {num_branches} branches has {3 * num_branches + 7} lists, not {len(lists)}")
        branches = [
            PassBranch(*map(tuple, lists[first : first + 3]))  # table, rows, positions
            for first in range(0, 3 * num_branches, 3)
        ]
        write_rows, write_slots, new_pages, copies, *rest = lists[3 * num_branches :]
        return cls(PassRows(num_rows, branches, write_rows, write_slots), new_pages, _copies(copies), *rest)

    def parts(self, num_rows: int) -> "list[PassPlan]":
        """Return plans of at most `num_rows` rows each, to be run one after another; they prepare no pages."""
        num = len(self.token_ids)
        return [self._part(start, min(num, start + num_rows)) for start in range(0, num, num_rows)]

    def _part(self, start: int, end: int) -> "PassPlan":
        return PassPlan(
            self.rows.part(start, end),
            [],
            [],
            self.token_ids[start:end],
            self.positions[start:end],
            [row - start for row in self.wanted if start <= row < end],
        )


def plan_pass(steps: Sequence[SessionStep], page_len: int) -> PassPlan:
    """Return the plan of a pass over these steps; reserve pages that were not reserved.

    Args:
        steps: steps on paged caches.
        page_len: positions per page.

    Raises:
        KVPoolFull: the page pool has too few free pages.
    """
    layouts = [paged_cache(step).lay_out(step.span, step.tree) for step in steps]
    return PassPlan(
        lay_out_rows(layouts, page_len),
        [page for layout in layouts for page in layout.new_pages],
        [copy for layout in layouts for copy in layout.copies],
        *_pack(steps),
    )


def paged_cache(step: SessionStep) -> PagedKVCache:
    """Return the cache of a step; raise TypeError if it was made by another model class."""
    if not isinstance(step.cache, PagedKVCache):
        raise TypeError("the cache was made by another model class")
    return step.cache


def _pack(steps: Sequence[SessionStep]) -> tuple[list[int], list[int], list[int]]:
    """Return token ids and positions of all rows, and the indices of the rows whose logits are wanted."""
    token_ids: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    for step in steps:
        first = len(token_ids)
        span, tree = step.span, step.tree
        token_ids += span.token_ids
        token_ids += [node.token_id for node in tree.nodes]
        positions += range(span.start, span.end)
        positions += [span.end + tree.depth(number) - 1 for number in range(1, len(tree) + 1)]
        if step.wants_logits:
            wanted += range(first + len(span.token_ids) - 1, len(token_ids))
    return token_ids, positions, wanted


def _split(numbers: Sequence[int]) -> list[list[int]]:
    """Return the lists of numbers, each of which is preceded by its length."""
    lists, at = [], 0
    while at < len(numbers):
        end = at + 1 + numbers[at]
        if not at < end <= len(numbers):
            raise ValueError(f"a list of {numbers[at]} numbers exceeds the plan")
        lists.append(list(numbers[at + 1 : end]))
        at = end
    return lists


def _copies(numbers: list[int]) -> list[PageCopy]:
    number = iter(numbers)
    return [PageCopy(*copy) for copy in zip(number, number, number, strict=True)]
