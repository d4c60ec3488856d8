"""What a target has measured of speculation in all its sessions: a new one begins with it."""

from dataclasses import dataclass, field
from typing import Final

from outrider.control.draft_times import AnswerTimes
from outrider.control.pass_times import DecayingMean, PassTimes
from outrider.speculation.acceptance import AcceptanceRates

_FADING: Final = 0.998
_PRIOR_WEIGHT: Final = 30.0
"""A session's first rounds count in its own values already."""


@dataclass(frozen=True, slots=True)
class Experience:
    """See the module. Each session adds to it.

    Attributes:
        times: what passes and rounds take.
        rates: values of nodes.
        answers: when drafts answer.
        came_true: how many tokens were accepted for each that a main line was expected to give.
    """

    times: PassTimes = field(default_factory=PassTimes)
    rates: AcceptanceRates = field(default_factory=lambda: AcceptanceRates(decay=_FADING, prior_weight=_PRIOR_WEIGHT))
    answers: AnswerTimes = field(default_factory=AnswerTimes)
    came_true: DecayingMean = field(default_factory=lambda: DecayingMean(0.02, 1.0, 20))
