"""Results that a target's engine posts to the streams of its requests."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from outrider.errors import OutriderError
from outrider.parameters import FinishReason
from outrider.tokens import Base, FeatureSpan, TokenLogprobs, TokenOrigin


@dataclass(frozen=True, slots=True)
class RoundMetrics:
    """Times and counts of a round; see the Verdict message.

    Attributes:
        model_time_s: seconds of its pass, for all sessions.
        wait_time_s: seconds that it waited for a proposal.
        queue_time_s: seconds that it was ready before its pass began.
        expected_time_s: seconds that the controller expected the round to take; 0 where it had nothing to go by.
        num_recomputed: output tokens that were run again before it.
        hit: whether the last token was among the nodes that had arrived.
        num_proposed: nodes that arrived since the last verdict.
        num_wanted: length of the main line that the draft should propose now; 0 where it should not.
        lookahead: nodes that the draft should hold ahead of the text, at most.
    """

    model_time_s: float
    wait_time_s: float
    queue_time_s: float
    expected_time_s: float
    num_recomputed: int
    hit: bool
    num_proposed: int
    num_wanted: int
    lookahead: int


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Output of a round, cut where the request ends.

    Attributes:
        token_ids: output tokens.
        origins: whether each was accepted, recovered or a bonus.
        kept_path: accepted nodes whose KV stays; the last output token has none yet.
        logprobs: of each output token, where requested.
        num_draft_tokens: main-line length that was verified.
        num_accepted: proposed tokens among the output.
        num_nodes: nodes verified.
        finish_reason: why the request ends with the last token; None where it goes on.
        drafters: of each output token the drafter that proposed it, empty for the target's own; no element where no
            node names one.
    """

    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    kept_path: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    num_draft_tokens: int
    num_accepted: int
    num_nodes: int
    finish_reason: FinishReason | None
    drafters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Opened:
    """A request is open; its span has to start at `cached_len` or before.

    Attributes:
        handle: of the request.
        cached_len: see above.
        is_plain: whether the target decodes without drafts for now.
    """

    handle: int
    cached_len: int
    is_plain: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """A round of a request was verified; its output continues `base`."""

    handle: int
    base: Base
    result: RoundResult
    metrics: RoundMetrics


@dataclass(frozen=True, slots=True)
class Progress:
    """A part of a request's prompt was run, and more is left; `cached_len` tokens of its session are done."""

    handle: int
    cached_len: int


@dataclass(frozen=True, slots=True)
class Features:
    """Features of the target for the draft of a request."""

    handle: int
    features: FeatureSpan


@dataclass(frozen=True, slots=True)
class Refused:
    """A request has ended with an error; after KV_CACHE_MISS it stays open for an earlier span."""

    handle: int
    error: OutriderError


Result: TypeAlias = Opened | Progress | Verdict | Features | Refused


class ResultStream(Protocol):
    """The destination of results. Its methods are called in the engine's thread and never wait."""

    @property
    def has_room_for_features(self) -> bool:
        """Whether few enough bytes are pending for features, which can wait, to be added."""

    def post(self, result: Result) -> None:
        """Send a result now, behind those that are held."""

    def hold(self, result: Result) -> None:
        """Send a result with the next `flush` or `post`."""

    def flush(self) -> None:
        """Send the results that are held, together: the receiver then handles them together too."""
