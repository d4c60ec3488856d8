"""Stepping a drafter, as every engine that has one does: failures stay with their session, and nodes are sent once."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outrider.drafters.drafter import Drafter, OpenProposal, StepRows
from outrider.errors import OutriderError, RequestFailed
from outrider.tokens import Base, ProposalPart

_LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SentProposal:
    """A proposal, and how much of it has been sent.

    Attributes:
        base: its root.
        proposal: the proposal.
        known_len: length of the session as last received.
        is_reported: whether its end was sent: that no more nodes follow before the session is longer.
        num_sent: nodes that were sent.
    """

    base: Base
    proposal: OpenProposal
    known_len: int
    is_reported: bool = False
    num_sent: int = 0

    @property
    def can_go_on(self) -> bool:
        """Whether a step may advance it."""
        return not self.proposal.complete and self.proposal.missing_features_from is None

    def advance(self, base: Base) -> None:
        """Record that the session has gone on below the proposal."""
        self.known_len, self.is_reported = base.len, False

    def next_part(self, step_time_s: float) -> ProposalPart | None:
        """Return the nodes since the last part, or the proposal's end; None where there is neither.

        Args:
            step_time_s: seconds of a step for each token of a path, sent with them if they took any.
        """
        nodes = tuple(self.proposal.nodes[self.num_sent :])
        if not nodes and (self.is_reported or not self.proposal.complete):
            return None
        first_node = self.num_sent + 1
        self.num_sent += len(nodes)
        self.is_reported = self.proposal.complete
        step_time_s *= self.proposal.took_steps
        return ProposalPart(self.base, first_node, nodes, self.proposal.complete, self.known_len, step_time_s)


class Stepper:
    """Runs a drafter's steps, and counts them.

    Args:
        drafter: the drafter; its `times` observe each step.

    Attributes:
        num_passes: steps that succeeded.
        num_failed: sessions that failed by themselves, with an unexpected error.
        num_tokens: tokens that were run.
        model_time_s: seconds of all steps.
        shared_time_s: seconds of these that a session alone would not have waited for: the part of other sessions.
        alone_s: seconds that a step of one of the last step's sessions alone would take.
        step_time_s: seconds that a step without prompts takes for each token of a path that it drafts; 0 before the
            first step.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.num_passes = 0
        self.num_failed = 0
        self.num_tokens = 0
        self.model_time_s = 0.0
        self.shared_time_s = 0.0
        self.alone_s = 0.0
        self.step_time_s = 0.0
        self._seen_sizes: set[int] = set()

    def step(self, proposals: Sequence[OpenProposal]) -> None:
        """Advance proposals, at least one; those that fail are refused, and those alone."""
        started_s = time.perf_counter()
        rows = self._draft(proposals)
        duration_s = time.perf_counter() - started_s
        self.model_time_s += duration_s
        if rows is not None and duration_s > 0:
            self._observe(rows, len(proposals), duration_s)

    def _observe(self, rows: StepRows, num_sessions: int, duration_s: float) -> None:
        """Observe the time of a step, and the part of it that each session waits for the others.

        A drafter may give each of many sessions fewer rows than it would give one alone. The time to give all of them
        as many is the time that they take from each other.
        """
        times = self._drafter.times
        if rows.prompts or self._has_seen(rows.num_decode):
            times.observe(duration_s, rows.num_decode, rows.prompts)
        if not times.known:
            self.step_time_s = duration_s / self._drafter.tokens_per_step
        elif rows.num_decode:
            self.step_time_s = times.pass_s(rows.num_decode) / self._drafter.tokens_per_step
        if rows.num_rows and times.known:
            num_alone = self._drafter.num_rows_alone or max(1, rows.num_rows // num_sessions)
            together_s = times.pass_s(max(rows.num_rows, num_alone * num_sessions))
            self.alone_s = times.pass_s(num_alone)
            self.shared_time_s += duration_s * max(0.0, 1 - self.alone_s / together_s)

    def _has_seen(self, num_rows: int) -> bool:
        """Return whether a step of this batch size counts: the first may compile its code.

        A size that looked expensive for that would not be chosen again, and so not be corrected.
        """
        size = self._drafter.times.sizes.padded(num_rows)
        was_seen = size in self._seen_sizes
        self._seen_sizes.add(size)
        return was_seen and num_rows > 0

    def _draft(self, proposals: Sequence[OpenProposal]) -> StepRows | None:
        """Run one step and return its rows.

        Where it fails, run each session by itself, so that only those that fail are refused, and return None.
        """
        try:
            rows = self._drafter.step(proposals)
            self.num_tokens += rows.num_rows
            self.num_passes += 1
            return rows
        except Exception as error:
            _LOG.exception("a draft step failed", extra={"num_sessions": len(proposals)})
            failure = error if isinstance(error, OutriderError) else RequestFailed("drafting failed for this session")
        for proposal in proposals:
            self._drafter.forget(proposal.session_id)  # the cache is undefined after a pass that failed
        if len(proposals) == 1:
            self.num_failed += isinstance(failure, RequestFailed)
            proposals[0].refuse(failure)
            return None
        for proposal in proposals:
            if not proposal.complete and proposal.missing_features_from is None:
                self._draft([proposal])
        return None
