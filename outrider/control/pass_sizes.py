"""Which numbers of rows cost a pass alike: kernels work in blocks of rows, and part of one costs what all of it does.

Whoever chooses rows by their cost, as the target does for verification and a draft for its steps, takes those that come
for nothing; and what is measured of one number of rows says the same of the others of its size.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PassSizes:
    """Sizes of a model's passes, in rows.

    Attributes:
        first: rows of the smallest size, at least 1: fewer cost as many.
        step: rows from one size to the next, at least 1.
    """

    first: int = 4
    step: int = 4

    def size(self, num_rows: int) -> int:
        """Returns the size that a number of rows has: at least as many."""
        return self.first + max(0, -(-(num_rows - self.first) // self.step) * self.step)

    def is_full(self, num_rows: int) -> bool:
        """Whether another row would make a pass longer."""
        return self.size(num_rows) == num_rows


FOURS: Final = PassSizes()
