"""A proposal of the engine's own, which distinguishes a session that fails from a drafter that fails."""

from typing import Final

from outrider.drafters.drafter import Drafter, DraftTerms, OpenProposal, give_bytes
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.serving.session_failures import EngineFailed
from outrider.tokens import FeatureSpan

_SESSION_ID: Final = ""
"""No caller's session has this id: theirs have a character at least."""
_TOKEN_IDS: Final = (0, 1)
_MAX_STEPS: Final = 4
_TERMS: Final = DraftTerms(SamplingParameters(temperature=0), AcceptanceRule.COUPLED, 1, frozenset())


def probe(drafter: Drafter) -> None:
    """Draft one token for a session of the engine's own.

    Raises:
        EngineFailed: that failed.
    """
    proposal = OpenProposal(_SESSION_ID, _TOKEN_IDS, _TERMS, 1)
    proposal.max_len = drafter.info.max_session_len
    try:
        drafter.resume(_SESSION_ID)
        if drafter.info.feature_layers:
            give_bytes(drafter, _SESSION_ID, FeatureSpan(0, _no_features(drafter)))
        for _ in range(_MAX_STEPS):
            if not proposal.complete:
                drafter.step([proposal])
        drafter.end(proposal)
        drafter.forget(_SESSION_ID)
    except Exception as error:
        raise EngineFailed("drafting one token failed") from error


def _no_features(drafter: Drafter) -> bytes:
    """Return the features of one position: zeros, in bfloat16."""
    return bytes(2 * drafter.info.feature_width)
