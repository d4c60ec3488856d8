"""Whether a round pays for a model's proposal beside what was found in texts, by what was measured.

A round takes the time from a proposal to the next request for one, and the time of the model's steps before it where
the model drafts. Let E be the tokens that are expected to be accepted of what was found, p the probability that its
first token is, and M the tokens that the model's proposals yield. With both, about E + (1 - p) M are accepted. The
model drafts iff

    (1 + E + (1 - p) M) / (round + steps)  >  (1 + E) / round

Where nothing was found it drafts in any case: whether a round waits for it is decided where it is verified. Now and
then it drafts though that would not pay, because M is measured only where it does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from outrider.control.decaying_mean import DecayingMean

_SHARE: Final = 0.1
_COMMON_SHARE: Final = 0.02
_USUAL_ROUNDS: Final = 6
_MAX_RATIO: Final = 4.0
_NUM_KINDS: Final = 4
_TRIAL_STRIDE: Final = 16
"""One of so many rounds in which the model would not pay has it draft."""


def _mean_time() -> DecayingMean:
    return DecayingMean(_SHARE, max_ratio=_MAX_RATIO, doubts_first=True)


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Times of rounds, over all sessions.

    Attributes:
        steps_s: seconds that the model's proposal takes.
        rest_s: seconds of the rest of a round.
    """

    steps_s: DecayingMean = field(default_factory=_mean_time)
    rest_s: DecayingMean = field(default_factory=_mean_time)


@dataclass(frozen=True, slots=True)
class Found:
    """What was found in texts.

    Attributes:
        expected: nodes of it that are expected to be accepted.
        first: about the probability that one of its first nodes is.
    """

    expected: float = 0.0
    first: float = 0.0

    @classmethod
    def of(cls, parents: Sequence[int], values: Sequence[float]) -> Self:
        """Return what nodes are, by their parents' numbers, 0 for the first ones, and their values."""
        first = sum(value for parent, value in zip(parents, values, strict=True) if not parent)
        return cls(sum(values), min(1.0, first))

    @property
    def kind(self) -> int:
        """Its kind, by how sure its first nodes are: estimates of short matches err otherwise than of long ones."""
        return min(_NUM_KINDS - 1, int(_NUM_KINDS * self.first))


class Yields:
    """What the proposals of a session yield, or those of all sessions.

    Args:
        common: those of all sessions, which are the initial ones of this and learn with it.
    """

    def __init__(self, common: "Yields | None" = None) -> None:
        share = _COMMON_SHARE if common is None else _SHARE
        self._common = common
        ratios, of_model = ((1.0,) * _NUM_KINDS, 1.0) if common is None else (common.ratios, common.of_model)
        self._ratios = [DecayingMean(share, ratio, _USUAL_ROUNDS) for ratio in ratios]
        self._of_model = DecayingMean(share, of_model, _USUAL_ROUNDS)
        self._num_without = 0

    @property
    def ratios(self) -> tuple[float, ...]:
        """Tokens accepted for each that was expected of what was found, by its kind."""
        return tuple(ratio.value for ratio in self._ratios)

    @property
    def of_model(self) -> float:
        """Tokens accepted of a proposal of the model."""
        return self._of_model.value

    def observe_found(self, found: Found, num_accepted: int) -> None:
        """Observe how much of what was found in texts the target's text had."""
        if found.expected > 0:
            self._ratios[found.kind].observe(num_accepted / found.expected)
            if self._common is not None:
                self._common.observe_found(found, num_accepted)

    def observe_model(self, num_accepted: int) -> None:
        """Observe how much of a model's proposal the target's text had."""
        self._of_model.observe(num_accepted)
        if self._common is not None:
            self._common.observe_model(num_accepted)

    def model_pays(self, found: Found, times: RoundTimes) -> bool:
        """Return whether the model should draft in a round; while anything is unknown, or as a trial, it does."""
        if not found.expected or not times.steps_s.known or not times.rest_s.known:
            return True
        ratio = self._ratios[found.kind].value
        alone = ratio * found.expected
        both = alone + (1 - min(1.0, ratio * found.first)) * self.of_model
        pays = (1 + both) * times.rest_s.value > (1 + alone) * (times.rest_s.value + times.steps_s.value)
        self._num_without += not pays
        return pays or self._num_without % _TRIAL_STRIDE == 0
