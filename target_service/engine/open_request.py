"""A request that runs on a resident session, in any engine that speculates, and sums over its rounds."""

from dataclasses import dataclass, field
from typing import Generic

from opentelemetry import trace

from outrider.parameters import SamplingParameters
from outrider.serving import spans
from outrider.tokens import Base
from target_service.engine.commands import Handle
from target_service.engine.results import RoundMetrics, RoundResult
from target_service.engine.sessions import CacheT, Resident
from target_service.engine.speculation import Speculation


@dataclass(slots=True)
class RoundSums:
    """Sums over the rounds of a request.

    Attributes:
        num_rounds: so far.
        num_output_tokens: tokens that they output.
        num_draft_tokens: tokens of verified main lines.
        num_accepted: proposed tokens that were kept.
        model_s: seconds of their passes.
        wait_s: seconds that they waited for proposals.
        queue_s: seconds that they were ready before their passes began.
    """

    num_rounds: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    model_s: float = 0.0
    wait_s: float = 0.0
    queue_s: float = 0.0

    @property
    def attributes(self) -> dict[str, int | float]:
        """The sums as attributes of a trace span."""
        return {
            "outrider.num_rounds": self.num_rounds,
            "gen_ai.usage.output_tokens": self.num_output_tokens,
            "outrider.num_draft_tokens": self.num_draft_tokens,
            "outrider.num_accepted": self.num_accepted,
            "outrider.model_s": self.model_s,
            "outrider.wait_s": self.wait_s,
            "outrider.queue_s": self.queue_s,
        }

    def add(self, result: RoundResult, metrics: RoundMetrics) -> None:
        """Add a round."""
        self.num_rounds += 1
        self.num_output_tokens += len(result.token_ids)
        self.num_draft_tokens += result.num_draft_tokens
        self.num_accepted += result.num_accepted
        self.model_s += metrics.model_time_s
        self.wait_s += metrics.wait_time_s
        self.queue_s += metrics.queue_time_s


@dataclass(slots=True, eq=False, kw_only=True)
class OpenRequest(Generic[CacheT]):
    """A request that runs on a resident session, from `open` to `close`.

    Attributes:
        number: grows with every request of this target.
        handle: its stream, and its handle on it.
        start_len: session length at which generation starts.
        cache_salt: see `Open`.
        speculation: its proposal, and its decisions about waiting.
        round_started: monotonic time of the last verdict.
        has_start: whether the caller's span has come, up to `start_len`. The tokens of a warm session are not enough:
            the span would take back what was output behind it.
        num_recomputed: see `RoundMetrics`.
        request_id: the orchestrator's id of the request, for logs.
        span: its trace span.
        sums: sums over its rounds.
    """

    number: int
    handle: Handle
    resident: Resident[CacheT]
    fencing_token: int
    parameters: SamplingParameters
    prompt_len: int
    stop_token_ids: frozenset[int]
    start_len: int
    window_end: int
    speculation: Speculation
    cache_salt: bytes = b""
    round_started: float = 0.0
    has_start: bool = False
    num_recomputed: int = 0
    finished: bool = False
    request_id: str = ""
    span: trace.Span = trace.INVALID_SPAN
    sums: RoundSums = field(default_factory=RoundSums)

    @property
    def base(self) -> Base:
        """The base that the next proposal and verdict continue."""
        return Base(len(self.resident.token_ids), self.fencing_token)

    @property
    def num_output(self) -> int:
        """Tokens of this request's output so far."""
        return len(self.resident.token_ids) - self.prompt_len

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of log records about the request."""
        ids = {"request_id": self.request_id, "session": self.resident.session_id}
        return {**ids, **spans.log_fields(self.span)}

    def end(self, error: str = "") -> None:
        """End its trace span; `error` is the reason where it failed."""
        self.span.set_attributes(self.sums.attributes)
        if error:
            spans.fail(self.span, error)
        self.span.end()

    @property
    def room(self) -> int:
        """Tokens that a round may output before the window or the request ends."""
        length = len(self.resident.token_ids)
        return min(self.window_end - length, self.parameters.max_tokens - self.num_output)

    def begin_round(self, now: float) -> None:
        """Begin a round, and decide how long it waits for a proposal."""
        self.round_started = now
        num_left = self.parameters.max_tokens - self.num_output
        self.speculation.begin(num_left, now)

    def is_ready(self, now: float) -> bool:
        """Return whether the round need not wait any longer."""
        return self.speculation.is_ready(len(self.resident.token_ids), now)
