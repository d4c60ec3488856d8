"""Results of benchmarks."""

import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import outrider


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The result of a benchmark: its rows, and its figures by the names used in the documentation.

    Attributes:
        bench: name of the benchmark.
        config: options and machine.
        rows: measurements.
        figures: summary numbers.
    """

    bench: str
    config: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)


def machine() -> dict[str, Any]:
    """Return versions and number of cores, for the result."""
    return {"outrider": outrider.__version__, "python": platform.python_version(), "cores": os.cpu_count()}


def median(values: Iterable[float]) -> float:
    """Return the median; of an even number of values, the lower of the middle two."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def quantile(values: Iterable[float], share: float) -> float:
    """Return the quantile of a share in [0, 1]: the value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
