"""What goes from streams to the engine, and what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from outrider.drafters.drafter import DraftTerms
from outrider.errors import OutriderError
from outrider.tokens import Base, FeatureSpan, ProposalPart, TokenSpan


@dataclass(frozen=True, slots=True)
class Opened:
    """A session is open; `known_len` of its tokens are here, and the first span starts there or before.

    Of its features those from position `features_len` on are wanted.
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
    """A session's proposal waits for features from position `start` on, after so many frames of them."""

    handle: int
    start: int
    num_frames: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A session cannot go on as asked."""

    handle: int
    error: OutriderError


Reply: TypeAlias = Opened | Proposed | FeaturesMissing | Refused


class ReplyStream(Protocol):
    """Where replies go; both methods may be called from any thread and never wait."""

    def post(self, replies: Sequence[Reply]) -> None:
        """Sends replies, in order; drops them where nobody reads any more."""

    def end(self) -> None:
        """Ends the stream after what was posted."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A session's place on a stream."""

    stream: ReplyStream
    handle: int


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Begins drafting for a session."""

    seat: Seat
    session_id: str
    fencing_token: int
    terms: DraftTerms
    request_id: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class AdvanceSession:
    """Commits a span and asks for the proposal that continues it; `base.len == span.end`."""

    seat: Seat
    base: Base
    span: TokenSpan
    num_speculative_tokens: int
    max_nodes: int = 0
    lookahead: int = 0


@dataclass(frozen=True, slots=True)
class GiveFeatures:
    """Hands features of the target to a session."""

    seat: Seat
    features: FeatureSpan


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Ends drafting for a session."""

    seat: Seat


@dataclass(frozen=True, slots=True)
class EndStream:
    """Ends drafting for every session of a stream, and the stream."""

    stream: ReplyStream


@dataclass(frozen=True, slots=True)
class BeginDrain:
    """Opens no more sessions from now on."""


@dataclass(frozen=True, slots=True)
class ForgetSession:
    """Forgets a session, as soon as it is open nowhere. Only the stream of its seat means anything."""

    seat: Seat
    session_id: str


SessionCommand: TypeAlias = OpenSession | AdvanceSession | GiveFeatures | CloseSession | ForgetSession
Command: TypeAlias = SessionCommand | EndStream | BeginDrain
