"""Numbers of rows that cost alike."""

import pytest

from outrider.control.pass_sizes import PassSizes


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (PassSizes(), [4, 4, 4, 4, 8, 8, 8, 8, 12]),
        (PassSizes(6, 2), [6, 6, 6, 6, 6, 6, 8, 8, 10]),
        (PassSizes(1, 1), [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_rows_count_as_their_size_does(sizes: PassSizes, expected: list[int]) -> None:
    assert [sizes.size(num_rows) for num_rows in range(1, 10)] == expected
    for num_rows in range(1, 10):
        assert sizes.is_full(num_rows) == (sizes.size(num_rows + 1) > sizes.size(num_rows))
