"""Metrics of an orchestrator, and the times and statistics of one request."""

import asyncio
import logging
import time
from collections import Counter as Counts
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import Span
from prometheus_client import CollectorRegistry, Counter, Histogram

from orchestrator.counted_names import CountedNames
from outrider import wire
from outrider.errors import OutriderError
from outrider.parameters import AcceptanceRule
from outrider.serving.metrics import LATENCY_BUCKETS_S, PREFIX, STEP_BUCKETS_S
from outrider.serving.spans import fail
from outrider.statistics import SpeculationStatistics
from outrider.v1 import generation_pb2, target_pb2

_LOG: Final = logging.getLogger(__name__)
_CLIENT_GONE: Final = "client_gone"
_INTERNAL: Final = "INTERNAL"


class OrchestratorMetrics:
    """Counters and histograms of one orchestrator.

    Names and buckets are vLLM's where it has the same metric, under our prefix.

    Args:
        registry: exposes them.

    Attributes:
        requests: requests that have ended, by outcome.
        prompt_tokens: tokens of prompts.
        generation_tokens: tokens of output, each counted once.
        queue_time: seconds until a request was admitted.
        first_token: seconds from a request's arrival to its first token.
        between: seconds between a request's messages with tokens.
        per_token: seconds for each token after the first message, by request.
        duration: seconds from a request's arrival to its end.
        accepted_by_drafter: accepted tokens by the drafter that proposed them, where a draft combines several.
        fallbacks: cases of plain decoding in place of speculation, by reason.
        target_changes: changes of a request's target, by the reason for leaving the one before.
        resumes: requests that a client resumed at an offset.
        commit_time: seconds of each commit to Redis.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            f"{PREFIX}requests",
            "Requests that have ended, by finish_reason, reason of the error, or client_gone.",
            ["outcome"],
            registry=registry,
        )
        self.prompt_tokens = Counter(f"{PREFIX}prompt_tokens", "Tokens of prompts.", registry=registry)
        self.generation_tokens = Counter(f"{PREFIX}generation_tokens", "Tokens of output.", registry=registry)
        self.queue_time = _latency("request_queue_time_seconds", "Seconds until a request was admitted.", registry)
        self.first_token = _latency(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", registry
        )
        self.between = _latency(
            "inter_token_latency_seconds", "Seconds between the messages with tokens of a request.", registry
        )
        self.per_token = _latency(
            "request_time_per_output_token_seconds",
            "Seconds for each token after the first message with tokens, by request.",
            registry,
        )
        self.duration = _latency(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", registry
        )
        self.accepted_by_drafter = Counter(
            f"{PREFIX}spec_decode_num_accepted_tokens_by_drafter",
            "Proposed tokens that were kept, by the drafter that proposed them, where a draft combines several.",
            ["drafter"],
            registry=registry,
        )
        self._drafters = CountedNames()
        self.fallbacks = Counter(
            f"{PREFIX}fallbacks", "Cases of plain decoding in place of speculation.", ["reason"], registry=registry
        )
        self.target_changes = Counter(
            f"{PREFIX}target_changes", "Changes of the target of a running request.", ["reason"], registry=registry
        )
        self.resumes = Counter(f"{PREFIX}resumes", "Requests resumed at an offset.", registry=registry)
        self.commit_time = Histogram(
            f"{PREFIX}commit_seconds", "Seconds of a commit to Redis.", buckets=STEP_BUCKETS_S, registry=registry
        )

    def record_accepted(self, drafter: str, num_tokens: int) -> None:
        """Count accepted tokens that a drafter proposed."""
        self.accepted_by_drafter.labels(self._drafters.counted(drafter)).inc(num_tokens)

    @contextmanager
    def request(self, span: Span = trace.INVALID_SPAN) -> Iterator["RequestTimes"]:
        """Count and time one request, which runs within the block; `span` of its trace ends with it."""
        times = RequestTimes(self, span)
        try:
            yield times
        except OutriderError as error:
            times.outcome, times.is_refused = error.reason, True
            raise
        except (asyncio.CancelledError, GeneratorExit):
            times.outcome = times.outcome or _CLIENT_GONE
            raise
        except BaseException:
            times.outcome, times.is_refused = _INTERNAL, True
            raise
        finally:
            times.record_end()


class RequestTimes:
    """Times and counts of one request: for the metrics, for its trace, and for its log record.

    Attributes:
        outcome: finish reason, or reason of the error; empty while it runs.
        is_refused: whether an error ended it.
    """

    def __init__(self, metrics: OrchestratorMetrics, span: Span) -> None:
        self.outcome = ""
        self.is_refused = False
        self._metrics = metrics
        self._span = span
        self._arrived = time.monotonic()
        self._first = 0.0
        self._last = 0.0
        self._num_later = 0
        self._counts: dict[str, int] = {"num_output_tokens": 0}

    def record_admitted(self, *, is_resumed: bool) -> None:
        """Record its admission; `is_resumed` where a client resumes a stream."""
        self._metrics.queue_time.observe(time.monotonic() - self._arrived)
        self._span.add_event("admitted", {"outrider.is_resumed": is_resumed})
        if is_resumed:
            self._metrics.resumes.inc()

    def record_begun(self, num_prompt_tokens: int) -> None:
        """Record that the request is a new one, with a prompt of so many tokens."""
        self._counts["num_prompt_tokens"] = num_prompt_tokens
        self._span.set_attribute("gen_ai.usage.input_tokens", num_prompt_tokens)
        self._metrics.prompt_tokens.inc(num_prompt_tokens)

    def record_event(self, event: generation_pb2.GenerateResponse) -> None:
        """Record an event that is sent to the client."""
        match event.WhichOneof("event"):
            case "delta":
                self._tokens(len(event.delta.token_ids), len(event.delta.origins))
            case "finished":
                reason = wire.finish_from_number(event.finished.finish_reason)
                self.outcome = reason.value if reason else ""

    def record_end(self) -> None:
        """Record its end."""
        metrics, duration_s = self._metrics, time.monotonic() - self._arrived
        outcome = self.outcome or _INTERNAL
        metrics.requests.labels(outcome).inc()
        metrics.duration.observe(duration_s)
        if self._num_later:
            metrics.per_token.observe((self._last - self._first) / self._num_later)
        num_output_tokens = self._counts["num_output_tokens"]
        self._span.set_attributes({"outrider.outcome": outcome, "gen_ai.usage.output_tokens": num_output_tokens})
        if self.is_refused:
            fail(self._span, outcome)
        self._span.end()
        _LOG.info("request ended", extra={"outcome": outcome, "duration_s": round(duration_s, 3), **self._counts})

    def _tokens(self, num: int, num_new: int) -> None:
        """Count tokens; replayed ones have no origin."""
        now = time.monotonic()
        self._metrics.generation_tokens.inc(num_new)
        self._counts["num_output_tokens"] += num_new
        if not num_new:
            return
        if self._first:
            self._metrics.between.observe(now - self._last)
            self._num_later += num
        else:
            self._first = now
            self._metrics.first_token.observe(now - self._arrived)
            self._span.add_event("first_token")
        self._last = now


class RequestStatistics:
    """Statistics of one request for its terminal event, since it was accepted or resumed here.

    Args:
        metrics: of the process, which also count fallbacks, and accepted tokens by drafter.
        rule: its acceptance rule.
    """

    def __init__(self, metrics: OrchestratorMetrics, rule: AcceptanceRule) -> None:
        self._metrics = metrics
        self._rule = rule
        self._started = time.monotonic()
        self._first_token_s: float | None = None
        self._target_time_s = 0.0
        self._wait_time_s = 0.0
        self._statistics = SpeculationStatistics()
        self._fallbacks: Counts[str] = Counts()
        self._accepted_by_drafter: Counts[str] = Counts()
        self._drafters = CountedNames()
        self._numerics: set[str] = set()
        self._feature_bytes = 0
        self._num_recomputed_tokens = 0
        self._num_cached_prompt_tokens: int | None = None
        self._num_proposed_nodes = 0
        self._num_hits = 0
        self._queue_time_s = 0.0
        self._num_expected_tokens = 0
        self._expected_time_s = 0.0
        self._drafter = ("", "")

    def record_verdict(self, verdict: target_pb2.Verdict, num_tokens: int) -> None:
        """Count a pass, of whose tokens `num_tokens` belong to the output."""
        num_accepted = min(verdict.num_accepted_tokens, num_tokens)
        self._statistics.record(verdict.num_draft_tokens, num_accepted, num_tokens)
        # The accepted tokens are a verdict's first ones.
        for drafter, num in Counts(filter(None, verdict.drafters[:num_accepted])).items():
            self._accepted_by_drafter[self._drafters.counted(drafter)] += num
            self._metrics.record_accepted(drafter, num)
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

    def record_fallback(self, reason: str) -> None:
        """Count a case of plain decoding in place of speculation."""
        self._fallbacks[reason] += 1
        self._metrics.fallbacks.labels(reason).inc()

    def record_cached(self, num_tokens: int) -> None:
        """Record the tokens up to the prompt's end that a target had in its KV cache; the first target counts."""
        if self._num_cached_prompt_tokens is None:
            self._num_cached_prompt_tokens = num_tokens

    def record_drafter(self, drafter: str, place: str) -> None:
        """Record which drafter proposes, and where it runs."""
        self._drafter = drafter, place

    def record_features(self, num_bytes: int) -> None:
        """Count features that a target sent for the draft."""
        self._feature_bytes += num_bytes

    def record_numerics(self, numerics: str) -> None:
        """Record the numerics of a target that takes part."""
        self._numerics.add(numerics)

    def message(self) -> generation_pb2.GenerationStatistics:
        """Return the statistics of a request that ends now."""
        duration_s = time.monotonic() - self._started
        first_token_s = self._first_token_s or 0.0
        statistics = self._statistics
        num_later = statistics.num_output_tokens - 1
        drafter, draft_at = self._drafter
        return generation_pb2.GenerationStatistics(
            drafter=drafter,
            draft_at=draft_at,
            num_drafts=statistics.num_drafts,
            num_draft_tokens=statistics.num_draft_tokens,
            num_accepted_tokens=statistics.num_accepted_tokens,
            num_accepted_tokens_per_pos=statistics.num_accepted_tokens_per_pos,
            num_accepted_tokens_by_drafter=self._accepted_by_drafter,
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
            num_cached_prompt_tokens=self._num_cached_prompt_tokens or 0,
            acceptance_rule=wire.rule_to_number(self._rule),
        )


def _latency(name: str, about: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(PREFIX + name, about, buckets=LATENCY_BUCKETS_S, registry=registry)
