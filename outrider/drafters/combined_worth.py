"""Whether a round pays for a model's proposal beside what was found in texts, by what was measured.

A round takes the time from a proposal to the next request for one, and the time of the model's steps before it where
the model drafts. Let E be the tokens that are expected to be accepted of what was found, p the probability that its
first token is, and M the tokens that the model's proposals yield. With both, about E + (1 - p) M are accepted. The
model drafts iff

    (1 + E + (1 - p) M) / (round + steps)  >  (1 + E) / round
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from outrider.control.decaying_mean import DecayingMean

_SHARE: Final = 0.1
_COMMON_SHARE: Final = 0.02
_USUAL_ROUNDS: Final = 6
_MAX_RATIO: Final = 4.0


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Times of rounds, over all sessions.

    Attributes:
        steps_s: seconds that the model's proposal takes.
        rest_s: seconds of the rest of a round.
    """

    steps_s: DecayingMean = field(default_factory=lambda: DecayingMean(_SHARE, max_ratio=_MAX_RATIO))
    rest_s: DecayingMean = field(default_factory=lambda: DecayingMean(_SHARE, max_ratio=_MAX_RATIO))


class Yields:
    """What the proposals of a session yield, or those of all sessions.

    Args:
        common: those of all sessions, which are the initial ones of this and learn with it.
    """

    def __init__(self, common: "Yields | None" = None) -> None:
        share = _COMMON_SHARE if common is None else _SHARE
        self._common = common
        # Tokens that were accepted for each that was expected to be.
        ratio, of_model = (1.0, 1.0) if common is None else common.means
        self._found_ratio = DecayingMean(share, ratio, _USUAL_ROUNDS)
        self._of_model = DecayingMean(share, of_model, _USUAL_ROUNDS)

    @property
    def means(self) -> tuple[float, float]:
        """Tokens accepted for each that was expected of what was found, and for each proposal of the model."""
        return self._found_ratio.value, self._of_model.value

    def observe_found(self, num_accepted: int, expected: float) -> None:
        """Observe how much of what was found in texts the target's text had, and how much was expected."""
        if expected > 0:
            self._found_ratio.observe(num_accepted / expected)
            if self._common is not None:
                self._common.observe_found(num_accepted, expected)

    def observe_model(self, num_accepted: int) -> None:
        """Observe how much of a model's proposal the target's text had."""
        self._of_model.observe(num_accepted)
        if self._common is not None:
            self._common.observe_model(num_accepted)

    def model_pays(self, expected: float, first: float, times: RoundTimes) -> bool:
        """Return whether the model should draft in a round; while anything is unknown, it does.

        Args:
            expected: tokens of what was found that are expected to be accepted.
            first: probability that the first one is.
            times: of rounds.
        """
        if not times.steps_s.known or not times.rest_s.known:
            return True
        ratio, of_model = self.means
        found = ratio * expected
        both = found + (1 - min(1.0, ratio * first)) * of_model
        return (1 + both) * times.rest_s.value > (1 + found) * (times.rest_s.value + times.steps_s.value)


def expected_of(parents: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Return how many nodes are expected to be accepted, and the probability that one of the first ones is.

    Args:
        parents: of the nodes; 0 for the first ones.
        values: of the nodes.
    """
    first = sum(value for parent, value in zip(parents, values, strict=True) if not parent)
    return sum(values), min(1.0, first)
