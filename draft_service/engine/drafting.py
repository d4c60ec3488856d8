"""A proposal that is being drafted for a session: what of it was sent, and the next reply."""

import time
from dataclasses import dataclass, field

from draft_service.engine.commands import FeaturesMissing, Handle, Proposed, Refused, Reply
from outrider.drafters.drafter import OpenProposal
from outrider.drafters.stepping import SentProposal
from outrider.tokens import Base


@dataclass(slots=True, eq=False)
class Drafting:
    """A proposal and the session that it is for.

    Attributes:
        handle: of the session.
        sent: the proposal, and how much of it has been sent.
        requested_at: monotonic time at which nodes were last requested.
        num_feature_frames: frames of features that have come for the session.
        has_gap: whether the features that came last begin behind those that are missing.
    """

    handle: Handle
    sent: SentProposal
    requested_at: float = field(default_factory=time.monotonic)
    num_feature_frames: int = 0
    has_gap: bool = False
    _has_requested: bool = False

    @property
    def proposal(self) -> OpenProposal:
        """The proposal."""
        return self.sent.proposal

    def advance(self, base: Base) -> None:
        """Go on below the proposal: its session has been extended along it."""
        self.sent.advance(base)
        self.requested_at = time.monotonic()

    def is_late(self, alone_s: float) -> bool:
        """Return whether no node was sent for longer than a draft with one session would have taken.

        Such a draft would take the step that is running and one of its own, of `alone_s` seconds each.
        """
        is_owed = not self.sent.num_sent and self.sent.can_go_on and self.proposal.num_speculative_tokens > 0
        return is_owed and time.monotonic() - self.requested_at > 2 * alone_s > 0

    def next_reply(self, step_time_s: float) -> Reply | None:
        """Return the reply that follows the last one, if there is one; `step_time_s` are the seconds of a step."""
        proposal = self.proposal
        if proposal.refusal is not None:
            return Refused(self.handle.number, proposal.refusal)
        if proposal.missing_features_from is not None:
            return self._features_missing(proposal.missing_features_from)
        part = self.sent.next_part(step_time_s)
        return None if part is None else Proposed(self.handle.number, part)

    def _features_missing(self, start: int) -> Reply | None:
        """Request features once, and once more where those that came begin behind the missing ones."""
        requests = self.has_gap or not self._has_requested
        self._has_requested, self.has_gap = True, False
        return FeaturesMissing(self.handle.number, start, self.num_feature_frames) if requests else None
