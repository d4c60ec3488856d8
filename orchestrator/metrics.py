"""Counters and histograms of an orchestrator: requests, their latencies, tokens, fallbacks to plain decoding."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import Span
from prometheus_client import CollectorRegistry, Counter, Histogram

from outrider import wire
from outrider.errors import OutriderError
from outrider.serving.metrics import LATENCY_BUCKETS_S, PREFIX, STEP_BUCKETS_S
from outrider.serving.spans import fail
from outrider.v1 import generation_pb2

_LOG: Final = logging.getLogger(__name__)
_CLIENT_GONE: Final = "client_gone"
_INTERNAL: Final = "INTERNAL"


class OrchestratorMetrics:
    """Counters and histograms of one orchestrator.

    Names and buckets follow vLLM's where both count the same, under our prefix.

    Args:
        registry: where they are told.

    Attributes:
        requests: those that have ended, by outcome.
        prompt_tokens: tokens of prompts.
        generation_tokens: tokens of output, each counted once.
        queue_time: seconds until a request was admitted.
        first_token: seconds from a request's arrival to its first token.
        between: seconds between a request's messages with tokens.
        per_token: seconds for each token after the first message, by request.
        duration: seconds from a request's arrival to its end.
        fallbacks: cases of plain decoding in place of speculation, by reason.
        target_changes: times that a request went on at another target, by the reason why it left the one before.
        resumes: requests that were taken up again at an offset.
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
        self.fallbacks = Counter(
            f"{PREFIX}fallbacks", "Cases of plain decoding in place of speculation.", ["reason"], registry=registry
        )
        self.target_changes = Counter(
            f"{PREFIX}target_changes", "Requests that went on at another target.", ["reason"], registry=registry
        )
        self.resumes = Counter(f"{PREFIX}resumes", "Requests taken up again at an offset.", registry=registry)
        self.commit_time = Histogram(
            f"{PREFIX}commit_seconds", "Seconds of a commit to Redis.", buckets=STEP_BUCKETS_S, registry=registry
        )

    @contextmanager
    def request(self, span: Span = trace.INVALID_SPAN) -> Iterator["RequestTimes"]:
        """Counts and times one request: the block is its life. `span` is of its trace, and ends with it."""
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
            times.end()


class RequestTimes:
    """When what happened to a request: for the metrics, for its trace, and for its line in the log.

    Attributes:
        outcome: how it ended; empty while it runs.
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

    def admitted(self, *, is_resumed: bool) -> None:
        """Notes that its turn has come; `is_resumed` where a client takes a stream up again."""
        self._metrics.queue_time.observe(time.monotonic() - self._arrived)
        self._span.add_event("admitted", {"outrider.is_resumed": is_resumed})
        if is_resumed:
            self._metrics.resumes.inc()

    def begun(self, num_prompt_tokens: int) -> None:
        """Notes that the request is a new one, with a prompt of so many tokens."""
        self._counts["num_prompt_tokens"] = num_prompt_tokens
        self._span.set_attribute("gen_ai.usage.input_tokens", num_prompt_tokens)
        self._metrics.prompt_tokens.inc(num_prompt_tokens)

    def event(self, event: generation_pb2.GenerateResponse) -> None:
        """Notes an event on its way to the client."""
        match event.WhichOneof("event"):
            case "delta":
                self._tokens(len(event.delta.token_ids), len(event.delta.origins))
            case "finished":
                reason = wire.finish_from_number(event.finished.finish_reason)
                self.outcome = reason.value if reason else ""

    def end(self) -> None:
        """Notes that it is over."""
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
        """Counts tokens; those that were only sent again have no origin."""
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


def _latency(name: str, about: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(PREFIX + name, about, buckets=LATENCY_BUCKETS_S, registry=registry)
