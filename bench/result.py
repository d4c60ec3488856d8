"""What a bench returns."""

import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import outrider


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A bench's rows, and its figures by the names that the documentation uses.

    Attributes:
        bench: its name.
        config: what was measured on what.
        rows: the measurements.
        figures: the numbers that sum them up.
    """

    bench: str
    config: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)


def machine() -> dict[str, Any]:
    """Returns what a result needs to be read later: versions, cores."""
    return {"outrider": outrider.__version__, "python": platform.python_version(), "cores": os.cpu_count()}


def median(values: Iterable[float]) -> float:
    """Returns the median; the lower of the two in the middle."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def quantile(values: Iterable[float], share: float) -> float:
    """Returns the value below which that share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
