"""Pass plans as integers."""

import random

import pytest

from outrider.lm.attention.rows import PassBranch, PassRows
from outrider.lm.pass_plan import PassPlan
from outrider.lm.step_layout import PageCopy

EMPTY = PassPlan(PassRows(0, [], [], []), [], [], [], [], [])


def some(seed: int) -> PassPlan:
    chosen = random.Random(seed)

    def numbers() -> list[int]:
        return [chosen.randrange(1 << 40) for _ in range(chosen.randrange(5))]

    def copies() -> list[PageCopy]:
        return [PageCopy(number, number + 1, number % 7) for number in numbers()]

    branches = [PassBranch(tuple(numbers()), tuple(numbers()), tuple(numbers())) for _ in range(chosen.randrange(4))]
    rows = PassRows(chosen.randrange(100), branches, numbers(), numbers())
    return PassPlan(rows, numbers(), copies(), numbers(), numbers(), numbers())


def test_a_plan_is_what_it_was() -> None:
    for plan in (EMPTY, *map(some, range(50))):
        assert PassPlan.from_numbers(plan.to_numbers()) == plan


def test_numbers_that_are_no_plan_are_refused() -> None:
    whole = next(plan.to_numbers() for plan in map(some, range(50)) if len(plan.rows.branches) > 1)
    wrong = [whole[:length] for length in range(len(whole))]
    wrong += [[*whole, 0], [*whole, 5], [*whole, -1], [whole[0], whole[1] + 1, *whole[2:]], [0, -3]]
    wrong += [[*EMPTY.to_numbers()[:5], 1, 7, *EMPTY.to_numbers()[6:]]]  # a third of a copy
    for numbers in wrong:
        with pytest.raises(ValueError):
            PassPlan.from_numbers(numbers)
