"""A test of fit of samples against exact probabilities."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from scipy.stats import chi2

SIGNIFICANCE = 1e-6
_LEAST_EXPECTED = 5.0


def p_value(samples: Sequence[Hashable], distribution: Mapping[Hashable, float]) -> float:
    """Returns the p-value of Pearson's test; outcomes with few expected samples are pooled.

    A sample that the distribution does not allow gives 0.
    """
    counts = Counter(samples)
    if any(distribution.get(outcome, 0.0) == 0 for outcome in counts):
        return 0.0
    cells: list[tuple[float, int]] = []
    expected_rest, observed_rest = 0.0, 0
    for outcome, probability in distribution.items():
        expected = probability * len(samples)
        if expected < _LEAST_EXPECTED:
            expected_rest, observed_rest = expected_rest + expected, observed_rest + counts[outcome]
        else:
            cells.append((expected, counts[outcome]))
    if expected_rest > 0:
        cells.append((expected_rest, observed_rest))
    statistic = sum((observed - expected) ** 2 / expected for expected, observed in cells)
    return float(chi2.sf(statistic, len(cells) - 1))
