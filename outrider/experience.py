"""What a target has measured of speculation in all its sessions: a new one begins with it."""

from dataclasses import dataclass, field
from typing import Final

from outrider.acceptance import AcceptanceRates
from outrider.draft_times import AnswerTimes
from outrider.pass_times import DecayingMean, PassTimes

_FADING: Final = 0.998


@dataclass(frozen=True, slots=True)
class Experience:
    """See the module. Each session adds to it.

    Attributes:
        times: what passes and rounds take.
        rates: values of nodes.
        answers: when drafts answer.
        came_true: how many tokens were accepted for each that was expected.
    """

    times: PassTimes = field(default_factory=PassTimes)
    rates: AcceptanceRates = field(default_factory=lambda: AcceptanceRates(fading=_FADING))
    answers: AnswerTimes = field(default_factory=AnswerTimes)
    came_true: DecayingMean = field(default_factory=lambda: DecayingMean(0.02, start=1.0))
