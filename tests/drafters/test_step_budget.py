"""Which nodes a step runs, as rows cost little or much, and as sessions are many."""

from collections.abc import Callable

from outrider.control.pass_times import PassTimes
from outrider.drafters.step_budget import Frontier, StepBudget
from outrider.speculation.proposal_tree import Candidate

VALUES = [0.8, 0.6, 0.4, 0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05, 0.02, 0.02]


def _budget(seconds: Callable[[int], float], max_rows: int = 512) -> StepBudget:
    """Returns a budget over the times of steps of all sizes."""
    times = PassTimes()
    for num_rows in range(4, 65, 4):
        for _ in range(16):
            times.observe(seconds(num_rows), num_rows)
    return StepBudget(max_rows, times)


def _cheap(num_rows: int) -> float:
    return 0.01


def _dear(num_rows: int) -> float:
    return 0.001 * -(-num_rows // 4)


def _frontier(*values: float, num_musts: int = 0) -> Frontier:
    return Frontier([Candidate(number, value) for number, value in enumerate(values, 1)], num_musts)


def test_rows_that_cost_nothing_are_all_run_and_dear_ones_while_they_are_worth_it() -> None:
    assert _budget(_cheap).choose([_frontier(*VALUES)], 0, 0) == [list(range(1, 13))]
    # A step is padded to four rows; four more would take as long again, for less than as much.
    assert _budget(_dear).choose([_frontier(*VALUES)], 0, 0) == [[1, 2, 3, 4]]
    assert _budget(_dear).choose([_frontier(*[0.5] * 3)], 0, 0) == [[1, 2, 3]]


def test_before_anything_is_measured_as_many_as_may_be_are_run() -> None:
    assert StepBudget(8, PassTimes()).choose([_frontier(*VALUES)], 0, 0) == [list(range(1, 9))]


def test_the_best_nodes_are_run_of_whichever_session() -> None:
    chosen = _budget(_dear).choose([_frontier(0.9, 0.8), _frontier(0.1, 0.1), _frontier(0.7, 0.6)], 0, 0)
    assert chosen == [[1, 2], [], [1, 2]]


def test_no_load_keeps_an_awaited_line_from_growing() -> None:
    better = [_frontier(0.9, 0.8, 0.8, 0.8) for _ in range(8)]
    chosen = _budget(_dear, max_rows=4).choose([*better, _frontier(0.1, 0.1, num_musts=1)], 0, 0)
    assert chosen[-1] == [1]
    # Nor do texts, long as they are.
    chosen = _budget(_dear, max_rows=4).choose([_frontier(0.1, num_musts=1)], 1, 64)
    assert chosen == [[1]]


def test_it_is_known_how_many_rows_a_session_would_have_alone() -> None:
    budget = _budget(_dear)
    crowd = [_frontier(*VALUES) for _ in range(8)]
    num_chosen = sum(map(len, budget.choose(crowd, 0, 0)))
    assert budget.num_rows_alone == 4
    assert num_chosen < 8 * 4
    budget.choose([], 1, 1)
    assert budget.num_rows_alone == 0
