"""Names of drafters and of combinations of two."""

import pytest

from outrider.drafter_names import DRAFTERS, has_suffix, includes, main_of
from outrider.drafters.options import DrafterKind


def test_the_names_are_those_that_settings_take() -> None:
    assert sorted(kind.value for kind in DrafterKind) == sorted(DRAFTERS)
    assert all(kind.main.value == main_of(kind.value) for kind in DrafterKind)


@pytest.mark.parametrize(
    ("drafter", "wanted", "fits"),
    [
        ("eagle3", "", True),
        ("eagle3", "eagle3", True),
        ("eagle3+suffix", "eagle3+suffix", True),
        ("eagle3+suffix", "eagle3", True),
        ("eagle3+suffix", "suffix", True),
        ("eagle3", "eagle3+suffix", False),
        ("eagle3+suffix", "model", False),
        ("", "eagle3", False),
    ],
)
def test_a_combination_is_each_of_its_drafters_too(drafter: str, wanted: str, fits: bool) -> None:
    assert includes(drafter, wanted) is fits


def test_the_parts_of_names() -> None:
    assert [main_of(name) for name in ("suffix", "model+suffix")] == ["suffix", "model"]
    assert [has_suffix(name) for name in ("suffix", "model+suffix", "ngram", "model", "")] == [True, True, *[False] * 3]
