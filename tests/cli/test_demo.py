"""The demo's table: figures over all runs, and a text that speculation changes is told."""

import pytest

from outrider.cli.demo import Comparison, figures
from outrider.client.events import Finished, Generation
from outrider.client.statistics import Statistics
from outrider.local.stack_options import DraftOptions
from outrider.parameters import FinishReason


def _run(num_tokens: int, per_second: float, first: int = 1) -> Generation:
    statistics = Statistics(num_drafts=10, num_draft_tokens=20, num_accepted_tokens=4, tokens_per_second=per_second)
    token_ids = [first, *range(2, num_tokens + 1)]
    finished = Finished(FinishReason.LENGTH, num_tokens, "", statistics)
    return Generation(finished=finished, text=str(first), token_ids=token_ids)


def test_figures_are_those_of_all_runs_by_their_time() -> None:
    comparison = Comparison("questions", ("a", "b"), DraftOptions("block", at="target"))
    comparison.speculative.extend((_run(101, 100.0), _run(51, 25.0, first=7)))
    comparison.plain.extend((_run(101, 50.0), _run(51, 25.0, first=7)))
    found = figures(comparison)
    assert found["tokens"] == "152" and found["draft at"] == "target" and found["same text"] == "yes"
    # 150 tokens after the first ones: in 1 + 2 seconds, and in 2 + 2.
    assert found["tokens/s with speculation"] == "50.0" and found["tokens/s without"] == "37.5"
    assert found["speed-up"] == "1.33x"
    assert found["acceptance rate"] == "20%" and found["mean acceptance length"] == "1.40"


@pytest.mark.parametrize("changed", [0, 1])
def test_one_text_that_differs_is_told(changed: int) -> None:
    comparison = Comparison("questions", ("a", "b"), DraftOptions("block", at="target"))
    comparison.plain.extend((_run(9, 50.0), _run(9, 50.0)))
    comparison.speculative.extend(_run(9, 50.0, first=3 if place == changed else 1) for place in range(2))
    assert not comparison.is_equal and figures(comparison)["same text"] == "NO"


def test_runs_of_one_token_have_no_speed() -> None:
    comparison = Comparison("questions", ("a",), DraftOptions("block", at="target"), [_run(1, 0.0)], [_run(1, 0.0)])
    assert figures(comparison)["speed-up"] == "-"
