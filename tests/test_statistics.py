"""Counters and rates of speculation."""

import pytest

from outrider.statistics import SpeculationStatistics


def recorded(*passes: tuple[int, int, int]) -> SpeculationStatistics:
    statistics = SpeculationStatistics()
    for numbers in passes:
        statistics.record(*numbers)
    return statistics


def test_nothing_recorded() -> None:
    statistics = SpeculationStatistics()
    assert (statistics.acceptance_rate, statistics.mean_acceptance_length) == (0, 1)


def test_passes_add_up() -> None:
    statistics = recorded((4, 4, 5), (4, 1, 2), (0, 0, 1), (2, 0, 1))
    assert statistics == SpeculationStatistics(
        num_drafts=3,
        num_draft_tokens=10,
        num_accepted_tokens=5,
        num_accepted_tokens_per_pos=[2, 1, 1, 1],
        num_target_passes=4,
        num_output_tokens=9,
    )
    assert statistics.acceptance_rate == 0.5
    assert statistics.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert statistics.acceptance_rates == pytest.approx([2 / 3, 1 / 2, 1, 1])


def test_a_plain_pass_is_no_draft() -> None:
    statistics = recorded((0, 0, 1))
    assert (statistics.num_drafts, statistics.num_target_passes, statistics.num_output_tokens) == (0, 1, 1)


@pytest.mark.parametrize("numbers", [(1, 2, 3), (0, 1, 1), (-1, 0, 1), (2, -1, 1), (1, 1, -1)])
def test_counts_that_cannot_be_are_refused(numbers: tuple[int, int, int]) -> None:
    statistics = SpeculationStatistics()
    with pytest.raises(ValueError, match="accepted"):
        statistics.record(*numbers)
    assert statistics == SpeculationStatistics()


@pytest.mark.parametrize("split", range(4))
def test_parts_add_up_to_the_whole(split: int) -> None:
    passes = [(4, 4, 5), (1, 1, 2), (6, 2, 3)]
    part, rest = recorded(*passes[:split]), recorded(*passes[split:])
    part.add(rest)
    assert part == recorded(*passes)
    assert rest == recorded(*passes[split:])
