"""What an engine has done so far, and what waits for it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.statistics import SpeculationStatistics
from target_service.engine.results import RoundAbout, RoundResult


@dataclass(slots=True)
class EngineLoad:
    """Counters that `GetLoad` and metrics report; written by the engine's thread, read by any.

    Attributes:
        num_active_sessions: requests that are open.
        num_waiting_sessions: of these, those whose prompt is not run yet.
        num_queued_tokens: tokens of prompts that wait to be run.
        num_cached_sessions: sessions whose tokens are here.
        num_preemptions: sessions that gave their KV cache back to older ones.
        num_passes: of the model.
        num_tokens: rows of all passes.
        model_time_s: seconds of all passes.
        num_stale_messages: see `GetLoadResponse`.
        num_invalid_proposals: see there.
        feature_bytes: see there.
        speculation: what was drafted and accepted.
        num_rounds: passes times the sessions that got output from them.
        num_hits: of these, those whose last token had been proposed.
        num_without: of these, those behind which the controller asked for no proposal, though there is a draft.
        num_wanted_tokens: tokens of the main lines that it asked for.
        expected_s: seconds that it expected of rounds.
        expected_of_s: seconds that these rounds took.
        num_proposed_nodes: that came.
        num_verified_nodes: of these.
        num_answered_waits: rounds that waited for a draft, and had something to verify.
        num_expired_waits: rounds that waited, and nothing came.
        round_model_s: seconds of passes, counted for each round.
        wait_s: seconds that rounds waited for drafts.
        queue_s: seconds that rounds waited for other sessions' passes.
    """

    num_active_sessions: int = 0
    num_cached_sessions: int = 0
    num_preemptions: int = 0
    num_passes: int = 0
    num_tokens: int = 0
    model_time_s: float = 0.0
    num_stale_messages: int = 0
    num_invalid_proposals: int = 0
    feature_bytes: int = 0
    num_waiting_sessions: int = 0
    num_queued_tokens: int = 0
    speculation: SpeculationStatistics = field(default_factory=SpeculationStatistics)
    num_rounds: int = 0
    num_hits: int = 0
    num_without: int = 0
    num_wanted_tokens: int = 0
    expected_s: float = 0.0
    expected_of_s: float = 0.0
    num_proposed_nodes: int = 0
    num_verified_nodes: int = 0
    num_answered_waits: int = 0
    num_expired_waits: int = 0
    round_model_s: float = 0.0
    wait_s: float = 0.0
    queue_s: float = 0.0

    def note_waiting(self, nums: Iterable[int]) -> None:
        """Notes how many tokens each open request has still to be run, the one that each round adds included."""
        waiting = [num for num in nums if num > 1]
        self.num_waiting_sessions, self.num_queued_tokens = len(waiting), sum(waiting)

    def note_round(self, result: RoundResult, about: RoundAbout, *, waited: bool, does_without: bool) -> None:
        """Counts a round.

        Args:
            result: what it gave.
            about: what else there is to say of it.
            waited: whether it waited for a draft.
            does_without: whether the next one does not, though there is a draft.
        """
        self.speculation.record(result.num_draft_tokens, result.num_accepted, len(result.token_ids))
        self.num_rounds += 1
        self.num_hits += about.hit
        self.num_without += does_without
        self.num_wanted_tokens += about.num_wanted
        if about.expected_time_s > 0:
            self.expected_s += about.expected_time_s
            self.expected_of_s += about.model_time_s + about.wait_time_s
        self.num_proposed_nodes += about.num_proposed
        self.num_verified_nodes += result.num_nodes
        self.num_answered_waits += waited and result.num_nodes > 0
        self.num_expired_waits += waited and result.num_nodes == 0
        self.round_model_s += about.model_time_s
        self.wait_s += about.wait_time_s
        self.queue_s += about.queue_time_s
