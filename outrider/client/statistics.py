"""Tokens, passes and times of a generation."""

from dataclasses import dataclass, field

from outrider import wire
from outrider.parameters import AcceptanceRule
from outrider.statistics import SpeculationStatistics
from outrider.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Statistics:
    """Tokens, passes and times of a request, counted since its stream was last resumed.

    Attributes:
        num_drafts: target passes that verified a proposal.
        num_draft_tokens: tokens drafted and verified.
        num_accepted_tokens: of those, kept.
        num_accepted_tokens_per_pos: kept tokens by position in the proposal.
        num_target_passes: target passes that gave output.
        time_to_first_token_s: seconds from acceptance to the first output token.
        duration_s: seconds from acceptance to the end.
        target_time_s: seconds of model time of the target's passes.
        wait_time_s: seconds the target waited for proposals.
        tokens_per_second: output tokens per second between the first and the last; 0 for a single token.
        num_fallbacks: times that plain decoding replaced speculation, by reason.
        varying_numerics: whether load, speculation or a failover may have changed the text, because a target took part
            whose bits depend on how a position is computed, or several of different numerics.
        feature_bytes: bytes of features that went from target to draft.
        num_recomputed_tokens: output tokens whose KV cache was computed again, after a failover or where a target's
            memory was short; where numerics vary, what follows them may differ.
        num_hits: target passes whose own last token had been proposed, so that the next proposal was there at once.
        num_proposed_nodes: nodes that drafts proposed, verified or not.
        queue_time_s: seconds that the session was ready while the target ran others, or its window was closed.
        num_expected_tokens: output tokens of the rounds whose time the target's controller had predicted.
        expected_time_s: seconds that it predicted for them, of a target that runs nothing else.
        num_cached_prompt_tokens: tokens of session and prompt that were in the first target's KV cache.
        num_prediction_tokens: tokens of the request's prediction; 0 without one.
        num_accepted_prediction_tokens: output tokens that the prediction had right.
        drafter: the drafter that proposed last; empty where none did.
        draft_at: where it ran: `service`, or `target`, within the target's process; empty where none proposed.
        acceptance_rule: the rule that tokens were drawn by; None where the service does not report it.
        num_accepted_tokens_by_drafter: where a draft combines several drafters: accepted tokens by the one that
            proposed them, or by those that did, joined by "+".
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_target_passes: int = 0
    time_to_first_token_s: float = 0.0
    duration_s: float = 0.0
    target_time_s: float = 0.0
    wait_time_s: float = 0.0
    tokens_per_second: float = 0.0
    num_fallbacks: dict[str, int] = field(default_factory=dict)
    varying_numerics: bool = False
    feature_bytes: int = 0
    num_recomputed_tokens: int = 0
    num_hits: int = 0
    num_proposed_nodes: int = 0
    queue_time_s: float = 0.0
    num_expected_tokens: int = 0
    expected_time_s: float = 0.0
    num_cached_prompt_tokens: int = 0
    num_prediction_tokens: int = 0
    num_accepted_prediction_tokens: int = 0
    drafter: str = ""
    draft_at: str = ""
    acceptance_rule: AcceptanceRule | None = None
    num_accepted_tokens_by_drafter: dict[str, int] = field(default_factory=dict)

    @property
    def predicted_tokens_per_second(self) -> float:
        """Tokens per second that the controller predicted for the accepted tokens; 0 without a prediction."""
        return self.num_expected_tokens / self.expected_time_s if self.expected_time_s else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the target passes whose own last token had been proposed, in [0, 1]."""
        return self.num_hits / self.num_target_passes if self.num_target_passes else 0.0

    @property
    def num_wasted_nodes(self) -> int:
        """Proposed nodes that did not become output tokens."""
        return max(0, self.num_proposed_nodes - self.num_accepted_tokens - self.num_hits)

    @property
    def acceptance_rate(self) -> float:
        """As `SpeculationStatistics.acceptance_rate`."""
        return self._speculation.acceptance_rate

    @property
    def mean_acceptance_length(self) -> float:
        """As `SpeculationStatistics.mean_acceptance_length`."""
        return self._speculation.mean_acceptance_length

    @property
    def _speculation(self) -> SpeculationStatistics:
        return SpeculationStatistics(
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )


def statistics_from_message(message: generation_pb2.GenerationStatistics) -> Statistics:
    """Return the statistics."""
    return Statistics(
        num_drafts=message.num_drafts,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        num_accepted_tokens_per_pos=tuple(message.num_accepted_tokens_per_pos),
        num_target_passes=message.num_target_passes,
        time_to_first_token_s=message.time_to_first_token_s,
        duration_s=message.duration_s,
        target_time_s=message.target_time_s,
        wait_time_s=message.wait_time_s,
        tokens_per_second=message.tokens_per_second,
        num_fallbacks=dict(message.num_fallbacks),
        varying_numerics=message.varying_numerics,
        feature_bytes=message.feature_bytes,
        num_recomputed_tokens=message.num_recomputed_tokens,
        drafter=message.drafter,
        draft_at=message.draft_at,
        num_hits=message.num_hits,
        num_proposed_nodes=message.num_proposed_nodes,
        queue_time_s=message.queue_time_s,
        num_expected_tokens=message.num_expected_tokens,
        expected_time_s=message.expected_time_s,
        num_cached_prompt_tokens=message.num_cached_prompt_tokens,
        num_prediction_tokens=message.num_prediction_tokens,
        num_accepted_prediction_tokens=message.num_accepted_prediction_tokens,
        acceptance_rule=wire.rule_from_number(message.acceptance_rule),
        num_accepted_tokens_by_drafter=dict(message.num_accepted_tokens_by_drafter),
    )
