"""The checks of lossless rules and drafts; known wrong ones must fail the same checks."""

from torch import Tensor

from outrider.speculation.randomness import Counter, KeyedSource, Purpose
from tests.exactness.generation import Drafter, Rule, generate, output_distribution
from tests.exactness.models import MarkovChain, total_variation
from tests.exactness.sources import RecordingSource

TOLERANCE = 1e-12


class DistributionError(AssertionError):
    """The output does not follow the target's distribution."""


class PathError(AssertionError):
    """The output is not that of plain decoding."""


def check_distribution(target: MarkovChain, drafter: Drafter, rule: Rule, num: int = 4) -> None:
    """Raise `DistributionError` unless the first `num` tokens of several rounds have the target's distribution."""
    distance = total_variation(output_distribution(num, target, drafter, rule), target.joint(num))
    if not distance < TOLERANCE:
        raise DistributionError(f"total variation {distance:.3g}")


def check_counters(target: MarkovChain, drafter: Drafter, rule: Rule, num: int = 60) -> None:
    """Raise `CounterReusedError` if a counter decides twice in a generation of many rounds."""
    for seed in range(5):
        generate(num, target, drafter, rule, RecordingSource(seed))


def check_bounds(source: type[KeyedSource]) -> None:
    """Raise `DistributionError` if an event of probability 0 happens, or one of probability 1 does not."""

    class Lowest(source):  # type: ignore[misc, valid-type]
        def uniform(self, counter: Counter) -> float:
            return 0.0

    class Highest(source):  # type: ignore[misc, valid-type]
        def uniform(self, counter: Counter) -> float:
            return 1 - 2.0**-53

    counter = Counter(Purpose.ACCEPT, 0)
    if Lowest(0).accept(0.0, counter) or not Highest(0).accept(1.0, counter):
        raise DistributionError("the bounds are not exact")


def one_hot(distribution: Tensor) -> Tensor:
    """Return the distribution with all probability on the most likely token."""
    return distribution.new_zeros(distribution.shape).index_fill_(0, distribution.argmax(), 1.0)
