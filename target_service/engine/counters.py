"""Counters of a target's engine: work done since the start, and work that waits."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.statistics import SpeculationStatistics
from target_service.engine.results import RoundMetrics, RoundResult


@dataclass(slots=True)
class EngineLoad:
    """Counters that `GetLoad` and metrics report; written by the engine's thread, read by any.

    Attributes:
        num_active_sessions: requests that are open.
        num_waiting_sessions: of these, those whose prompt has not been run yet.
        num_queued_tokens: tokens of prompts that wait to be run.
        num_cached_sessions: sessions whose tokens are here.
        num_preemptions: sessions whose KV cache was released for older ones.
        num_passes: of the model.
        num_tokens: rows of all passes.
        model_time_s: seconds of all passes.
        num_stale_messages: see `GetLoadResponse`.
        num_invalid_proposals: see there.
        feature_bytes: see there.
        speculation: drafted and accepted tokens.
        num_rounds: passes times the sessions that got output from them.
        num_hits: of these, those whose last token had been proposed.
        num_without: of these, those after which the controller requested no proposal though there is a draft.
        num_wanted_tokens: tokens of the main lines that it requested.
        expected_s: seconds that it expected of rounds.
        expected_of_s: seconds that these rounds took.
        num_proposed_nodes: nodes that drafts sent.
        num_verified_nodes: of these, those that were verified.
        num_answered_waits: rounds that waited for a draft and had nodes to verify.
        num_expired_waits: rounds that waited and had none.
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

    def record_waiting(self, nums: Iterable[int]) -> None:
        """Record how many tokens of each open request are still to be run, the one that each round adds included."""
        waiting = [num for num in nums if num > 1]
        self.num_waiting_sessions, self.num_queued_tokens = len(waiting), sum(waiting)

    def record_round(self, result: RoundResult, metrics: RoundMetrics, *, waited: bool, does_without: bool) -> None:
        """Count a round.

        Args:
            result: its output.
            metrics: its times and counts.
            waited: whether it waited for a draft.
            does_without: whether the next one requests no proposal though there is a draft.
        """
        self.speculation.record(result.num_draft_tokens, result.num_accepted, len(result.token_ids))
        self.num_rounds += 1
        self.num_hits += metrics.hit
        self.num_without += does_without
        self.num_wanted_tokens += metrics.num_wanted
        if metrics.expected_time_s > 0:
            self.expected_s += metrics.expected_time_s
            self.expected_of_s += metrics.model_time_s + metrics.wait_time_s
        self.num_proposed_nodes += metrics.num_proposed
        self.num_verified_nodes += result.num_nodes
        self.num_answered_waits += waited and result.num_nodes > 0
        self.num_expired_waits += waited and result.num_nodes == 0
        self.round_model_s += metrics.model_time_s
        self.wait_s += metrics.wait_time_s
        self.queue_s += metrics.queue_time_s
