"""Measuring passes at the start, for the choice between restoring and computing."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
import torch

from outrider.control.pass_times import PassTimes
from outrider.lm.model import SessionStep
from target_service.engine.restoring import measure_passes
from tests.target_service.conversation import model


@pytest.mark.parametrize(("num_rows", "max_len"), [(512, 4096), (8, 4096), (512, 100), (512, 40)])
def test_a_prompt_of_any_allowed_length_is_measured_and_leaves_no_pages(num_rows: int, max_len: int) -> None:
    measured, times = model(), PassTimes()
    measure_passes(measured, times, num_rows, max_len)
    assert times.known
    # These passes take so short that beside other processes longer ones may be measured as no longer.
    assert 0 <= times.prefill_s(256, 0) < inf
    assert measured.kv_usage.num_held == 0


@pytest.mark.parametrize(("part_rows", "expected"), [(1, {128, 1}), (128, {512, 1})])
def test_what_is_measured_has_several_parts_of_a_pass(part_rows: int, expected: set[int]) -> None:
    """Less would take as long as one row, and a prompt would seem to cost nothing."""
    measured = Parted(part_rows)
    measure_passes(measured, PassTimes(), 512, 4096)  # type: ignore[arg-type]
    assert measured.lens == expected


class Parted:
    """A model that runs passes in parts, and remembers how long they were."""

    def __init__(self, part_rows: int) -> None:
        self._model = model()
        self.info = replace(self._model.info, part_rows=part_rows)
        self.new_cache = self._model.new_cache
        self.lens: set[int] = set()

    def forward(self, steps: Sequence[SessionStep]) -> list[torch.Tensor]:
        self.lens.update(step.num_rows for step in steps)
        return self._model.forward(steps)
