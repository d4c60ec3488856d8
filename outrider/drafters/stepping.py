"""What every engine that runs a drafter does: steps of which one session's failure is its own, and parts to send."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outrider.control.pass_times import PassTimes
from outrider.drafters.drafter import Drafter, OpenProposal
from outrider.drafters.step_time import StepTime
from outrider.errors import OutriderError, RequestFailed
from outrider.tokens import Base, ProposalPart

_LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SentProposal:
    """A proposal, and how much of it has been sent.

    Attributes:
        base: what it was planted under.
        proposal: it.
        known_len: length of the session as it was last told.
        is_reported: whether it was said that nothing more will come before the session is longer.
        num_sent: nodes that were sent.
    """

    base: Base
    proposal: OpenProposal
    known_len: int
    is_reported: bool = False
    num_sent: int = 0

    @property
    def can_go_on(self) -> bool:
        """Whether a step may bring it forward."""
        return not self.proposal.complete and self.proposal.missing_features_from is None

    def advance(self, base: Base) -> None:
        """Learns that the session has gone on below the proposal."""
        self.known_len, self.is_reported = base.len, False

    def next_part(self, step_time_s: float) -> ProposalPart | None:
        """Returns what has come since the last part, if anything has to be said; `step_time_s` is what a step takes."""
        nodes = tuple(self.proposal.nodes[self.num_sent :])
        if not nodes and (self.is_reported or not self.proposal.complete):
            return None
        first_node = self.num_sent + 1
        self.num_sent += len(nodes)
        self.is_reported = self.proposal.complete
        return ProposalPart(self.base, first_node, nodes, self.proposal.complete, self.known_len, step_time_s)


class Stepper:
    """Runs a drafter's steps, and counts them.

    Args:
        drafter: what drafts.

    Attributes:
        num_passes: steps that went well.
        num_failed: sessions that failed by themselves, with an error that has no name.
        num_tokens: that they ran.
        model_time_s: seconds of all steps.
        shared_time_s: seconds of these that a session alone would not have had to wait for: what others took.
        alone_s: seconds that a step of one of the last step's sessions would take.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._step_time = StepTime()
        self.num_passes = 0
        self.num_failed = 0
        self.num_tokens = 0
        self.model_time_s = 0.0
        self.shared_time_s = 0.0
        self.alone_s = 0.0
        self._times = PassTimes()

    @property
    def step_time_s(self) -> float:
        """Seconds that a step takes."""
        return self._step_time.seconds

    def step(self, proposals: Sequence[OpenProposal]) -> None:
        """Brings proposals forward, at least one; those that cannot be are refused, and those alone."""
        num_before, started_s = self.num_tokens, time.perf_counter()
        self._draft(proposals)
        duration_s = time.perf_counter() - started_s
        self.model_time_s += duration_s
        self._step_time.observe(duration_s)
        self._share(self.num_tokens - num_before, len(proposals), duration_s)

    def _share(self, num_rows: int, num_sessions: int, duration_s: float) -> None:
        """Learns what a step took, and how much of it was for others than the session that waits for it.

        A drafter may give each of many sessions fewer rows than it would give one alone. What it would take to give all
        of them as many is what they take from each other.
        """
        if num_rows <= 0 or duration_s <= 0:
            return
        self._times.observe(duration_s, num_rows)
        num_alone = self._drafter.num_rows_alone or max(1, num_rows // num_sessions)
        together_s = self._times.pass_s(max(num_rows, num_alone * num_sessions))
        self.alone_s = self._times.pass_s(num_alone)
        self.shared_time_s += duration_s * max(0.0, 1 - self.alone_s / together_s)

    def _draft(self, proposals: Sequence[OpenProposal]) -> None:
        """Runs one step; where it fails, each session by itself, so that only those that fail are refused."""
        try:
            self.num_tokens += self._drafter.step(proposals)
            self.num_passes += 1
            return
        except Exception as error:
            _LOG.exception("a draft step failed", extra={"num_sessions": len(proposals)})
            failure = error if isinstance(error, OutriderError) else RequestFailed("drafting failed for this session")
        for proposal in proposals:
            self._drafter.forget(proposal.session_id)  # what a broken pass has cached is not known
        if len(proposals) == 1:
            self.num_failed += isinstance(failure, RequestFailed)
            proposals[0].refuse(failure)
            return
        for proposal in proposals:
            if not proposal.complete and proposal.missing_features_from is None:
                self._draft([proposal])
