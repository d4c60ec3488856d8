"""What a request took, for its terminal event."""

import time
from collections import Counter

from orchestrator.metrics import OrchestratorMetrics
from outrider.statistics import SpeculationStatistics
from outrider.v1 import generation_pb2, target_pb2


class Tally:
    """Counts and times one request since it was accepted or resumed here.

    Args:
        metrics: of the process, which count fallbacks too.
    """

    def __init__(self, metrics: OrchestratorMetrics) -> None:
        self._metrics = metrics
        self._started = time.monotonic()
        self._first_token_s: float | None = None
        self._target_time_s = 0.0
        self._wait_time_s = 0.0
        self._statistics = SpeculationStatistics()
        self._fallbacks: Counter[str] = Counter()
        self._numerics: set[str] = set()
        self._feature_bytes = 0
        self._num_recomputed_tokens = 0
        self._num_proposed_nodes = 0
        self._num_hits = 0
        self._queue_time_s = 0.0
        self._num_expected_tokens = 0
        self._expected_time_s = 0.0

    def verdict(self, verdict: target_pb2.Verdict, num_tokens: int) -> None:
        """Counts a pass of which `num_tokens` belong to the output."""
        num_accepted = min(verdict.num_accepted_tokens, num_tokens)
        self._statistics.record(verdict.num_draft_tokens, num_accepted, num_tokens)
        self._target_time_s += verdict.model_time_s
        self._wait_time_s += verdict.wait_time_s
        self._queue_time_s += verdict.queue_time_s
        if verdict.expected_time_s > 0:
            self._num_expected_tokens += num_tokens
            self._expected_time_s += verdict.expected_time_s
        self._num_recomputed_tokens += verdict.num_recomputed_tokens
        self._num_proposed_nodes += verdict.num_proposed_nodes
        self._num_hits += verdict.hit
        if self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._started

    def fallback(self, reason: str) -> None:
        """Counts a case of plain decoding in place of speculation."""
        self._fallbacks[reason] += 1
        self._metrics.fallbacks.labels(reason).inc()

    def features(self, num_bytes: int) -> None:
        """Counts features that a target sent for the draft."""
        self._feature_bytes += num_bytes

    def target(self, numerics: str) -> None:
        """Notes the numerics of a target that takes part."""
        self._numerics.add(numerics)

    def message(self) -> generation_pb2.GenerationStatistics:
        """Returns the statistics of a request that ends now."""
        duration_s = time.monotonic() - self._started
        first_token_s = self._first_token_s or 0.0
        statistics = self._statistics
        num_later = statistics.num_output_tokens - 1
        return generation_pb2.GenerationStatistics(
            num_drafts=statistics.num_drafts,
            num_draft_tokens=statistics.num_draft_tokens,
            num_accepted_tokens=statistics.num_accepted_tokens,
            num_accepted_tokens_per_pos=statistics.num_accepted_tokens_per_pos,
            num_target_passes=statistics.num_target_passes,
            time_to_first_token_s=first_token_s,
            duration_s=duration_s,
            target_time_s=self._target_time_s,
            wait_time_s=self._wait_time_s,
            num_fallbacks=self._fallbacks,
            tokens_per_second=num_later / (duration_s - first_token_s) if num_later > 0 else 0.0,
            varying_numerics=len(self._numerics) > 1 or any(name.endswith(" varying") for name in self._numerics),
            feature_bytes=self._feature_bytes,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_hits=self._num_hits,
            num_proposed_nodes=self._num_proposed_nodes,
            queue_time_s=self._queue_time_s,
            num_expected_tokens=self._num_expected_tokens,
            expected_time_s=self._expected_time_s,
        )
