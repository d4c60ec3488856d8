"""What a rule and its drafts must pass to be called lossless; wrong ones are shown to fail the very same checks."""

from torch import Tensor

from outrider.speculation.randomness import Counter, KeyedSource, Purpose
from tests.exactness.generation import Drafter, Rule, generate, output_law
from tests.exactness.models import MarkovChain, total_variation
from tests.exactness.sources import RecordingSource

TOLERANCE = 1e-12


class LawError(AssertionError):
    """The output does not follow the target's law."""


class PathError(AssertionError):
    """The output is not that of plain decoding."""


def check_law(target: MarkovChain, drafter: Drafter, rule: Rule, num: int = 4) -> None:
    """Raises `LawError` unless the first `num` tokens of several rounds follow the target's joint law."""
    distance = total_variation(output_law(num, target, drafter, rule), target.joint(num))
    if not distance < TOLERANCE:
        raise LawError(f"total variation {distance:.3g}")


def check_counters(target: MarkovChain, drafter: Drafter, rule: Rule, num: int = 60) -> None:
    """Raises `CounterReusedError` where a counter decides twice in a generation of many rounds."""
    for seed in range(5):
        generate(num, target, drafter, rule, RecordingSource(seed))


def check_bounds(source: type[KeyedSource]) -> None:
    """Raises `LawError` where the impossible happens, or the certain does not, at the ends of the unit interval."""

    class Lowest(source):  # type: ignore[misc, valid-type]
        def uniform(self, counter: Counter) -> float:
            return 0.0

    class Highest(source):  # type: ignore[misc, valid-type]
        def uniform(self, counter: Counter) -> float:
            return 1 - 2.0**-53

    counter = Counter(Purpose.ACCEPT, 0)
    if Lowest(0).accept(0.0, counter) or not Highest(0).accept(1.0, counter):
        raise LawError("the bounds are not exact")


def one_hot(law: Tensor) -> Tensor:
    """Returns the law that always says the most likely token."""
    return law.new_zeros(law.shape).index_fill_(0, law.argmax(), 1.0)
