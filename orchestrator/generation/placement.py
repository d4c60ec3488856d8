"""Where a request drafts: at a draft service, or within its target's process.

Where both can, the seconds that a token takes decide, as the targets report them for rounds that drafted: passes and
waits. Requests try both places by turns at first, and the one that is not the better now and then.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from outrider.control.decaying_mean import DecayingMean
from outrider.parameters import DRAFT_PLACES

_SHARE: Final = 0.1
_LEAST_REQUESTS: Final = 4
"""Of each place, before they are compared: texts differ in how well they are drafted."""
_TRIAL_STRIDE: Final = 64
_LEAST_TOKENS: Final = 16
_MAX_TARGETS: Final = 1024


@dataclass(slots=True)
class _Case:
    num_requests: int = 0
    token_s: dict[str, DecayingMean] = field(
        default_factory=lambda: {place: DecayingMean(_SHARE) for place in DRAFT_PLACES}
    )
    num_seen: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFT_PLACES, 0))


class Placement:
    """Chooses for each request; see the module. In the event loop."""

    def __init__(self) -> None:
        self._cases: OrderedDict[str, _Case] = OrderedDict()

    def choose(self, target: str) -> str:
        """Return the place for a request on a target, given by its address, whose drafter could draft for it too."""
        case = self._case(target)
        case.num_requests += 1
        fewest = min(DRAFT_PLACES, key=case.num_seen.__getitem__)
        if case.num_seen[fewest] < _LEAST_REQUESTS:
            # By turns also while the first ones run.
            return DRAFT_PLACES[case.num_requests % 2]
        best = min(DRAFT_PLACES, key=lambda place: case.token_s[place].value)
        if case.num_requests % _TRIAL_STRIDE == 0:
            return next(place for place in DRAFT_PLACES if place != best)
        return best

    def observe(self, target: str, place: str, seconds: float, num_tokens: int) -> None:
        """Observe a request that drafted at a place.

        Args:
            target: its target's address.
            place: where it drafted.
            seconds: of its rounds, waits and passes together.
            num_tokens: that they output.
        """
        if num_tokens >= _LEAST_TOKENS:
            case = self._case(target)
            case.token_s[place].observe(seconds / num_tokens)
            case.num_seen[place] += 1

    def _case(self, target: str) -> _Case:
        case = self._cases.setdefault(target, _Case())
        self._cases.move_to_end(target)
        if len(self._cases) > _MAX_TARGETS:
            self._cases.popitem(last=False)
        return case
