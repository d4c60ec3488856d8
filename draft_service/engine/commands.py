"""Commands from streams to the draft's engine, and the replies that it posts to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from outrider.drafters.drafter import DraftTerms
from outrider.errors import OutriderError
from outrider.serving.stream_handle import StreamHandle
from outrider.tokens import Base, FeatureSpan, ProposalPart, TokenSpan


@dataclass(frozen=True, slots=True)
class Opened:
    """A session is open.

    Attributes:
        handle: the session's.
        known_len: tokens of the session that are here; the first span starts there or before.
        features_len: position from which on features are to be sent.
    """

    handle: int
    known_len: int
    features_len: int = 0


@dataclass(frozen=True, slots=True)
class Proposed:
    """Nodes were drafted for a session."""

    handle: int
    part: ProposalPart


@dataclass(frozen=True, slots=True)
class FeaturesMissing:
    """A proposal waits for features from position `start` on; `num_frames` frames of them have come."""

    handle: int
    start: int
    num_frames: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A command, or drafting for its session, was refused with an error."""

    handle: int
    error: OutriderError


Reply: TypeAlias = Opened | Proposed | FeaturesMissing | Refused


class ReplyStream(Protocol):
    """The destination of replies; both methods may be called from any thread and never wait."""

    def post(self, replies: Sequence[Reply]) -> None:
        """Send replies, in order; drop them once the stream has ended."""

    def end(self) -> None:
        """End the stream after the replies that were posted."""


Handle: TypeAlias = StreamHandle[ReplyStream]


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Begin drafting for a session."""

    handle: Handle
    session_id: str
    fencing_token: int
    terms: DraftTerms
    request_id: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class AdvanceSession:
    """Commit a span and request the proposal that continues it; `base.len == span.end`."""

    handle: Handle
    base: Base
    span: TokenSpan
    num_speculative_tokens: int
    max_nodes: int = 0
    lookahead: int = 0


@dataclass(frozen=True, slots=True)
class GiveFeatures:
    """Hand features of the target to a session."""

    handle: Handle
    features: FeatureSpan


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End drafting for a session."""

    handle: Handle


@dataclass(frozen=True, slots=True)
class ForgetSession:
    """Forget a session as soon as no stream has it open; of the handle only the stream is read."""

    handle: Handle
    session_id: str


@dataclass(frozen=True, slots=True)
class EndStream:
    """End drafting for every session of a stream, and the stream."""

    stream: ReplyStream


SessionCommand: TypeAlias = OpenSession | AdvanceSession | GiveFeatures | CloseSession | ForgetSession
Command: TypeAlias = SessionCommand | EndStream
