"""A proposal of the engine's own, which tells a session that fails from a drafter that does."""

from typing import Final

from outrider.drafters.drafter import Drafter, DraftTerms, OpenProposal
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.tokens import FeatureSpan

_SESSION_ID: Final = ""
"""No caller's: theirs have a character at least."""
_TOKEN_IDS: Final = (0, 1)
_MAX_STEPS: Final = 4
_TERMS: Final = DraftTerms(SamplingParameters(temperature=0), AcceptanceRule.COUPLED, 1, frozenset())


class EngineFailed(Exception):
    """The drafter drafts for no session any more: the process is of no use."""


def probe(drafter: Drafter) -> None:
    """Drafts one token for a session of its own.

    Raises:
        EngineFailed: that failed.
    """
    proposal = OpenProposal(_SESSION_ID, _TOKEN_IDS, _TERMS, 1)
    proposal.max_len = drafter.info.max_session_len
    try:
        drafter.resume(_SESSION_ID)
        if drafter.info.feature_layers:
            drafter.give(_SESSION_ID, FeatureSpan(0, _no_features(drafter)))
        for _ in range(_MAX_STEPS):
            if not proposal.complete:
                drafter.step([proposal])
        drafter.end(proposal)
        drafter.forget(_SESSION_ID)
    except Exception as error:
        raise EngineFailed("drafting one token failed") from error


def _no_features(drafter: Drafter) -> bytes:
    """Returns the features of one position: zeros, in bfloat16."""
    return bytes(2 * len(drafter.info.feature_layers) * drafter.info.hidden_size)
