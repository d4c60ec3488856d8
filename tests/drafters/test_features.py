"""Features as they come: of whole positions, and in order."""

import pytest
import torch

from outrider.drafters.features import FeatureBuffer, Features
from outrider.errors import InvalidArgument
from outrider.tokens import FeatureSpan

ROWS = torch.arange(60, dtype=torch.bfloat16).view(20, 3)


def span(start: int, end: int) -> FeatureSpan:
    return FeatureSpan(start, ROWS[start:end].contiguous().view(torch.uint8).numpy().tobytes())


def test_bytes_become_rows() -> None:
    found = Features.of(span(4, 9), 3)
    assert found.start == 4 and torch.equal(found.rows, ROWS[4:9])
    assert Features.of(span(4, 4), 3).rows.shape == (0, 3)


def test_bytes_of_half_a_position_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"features\.data"):
        Features.of(FeatureSpan(0, b"12345"), 3)


def test_what_continues_the_buffer_is_added() -> None:
    buffer = FeatureBuffer(3)
    assert not buffer.give(Features(0, ROWS[:5]))
    assert not buffer.give(Features(3, ROWS[3:8]))  # in part here already
    assert buffer.give(Features(9, ROWS[9:12]))  # behind a gap
    assert not buffer.give(Features(8, ROWS[8:8]))
    assert (buffer.start, buffer.end) == (0, 8)
    assert torch.equal(buffer.take(3), ROWS[:3])
    assert torch.equal(buffer.peek(), ROWS[3:8])
