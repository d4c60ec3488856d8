"""Commands from streams to a target's engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from outrider.errors import OutriderError
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.serving.stream_handle import StreamHandle
from outrider.tokens import ProposalPart, TokenSpan
from target_service.engine.results import ResultStream

Handle: TypeAlias = StreamHandle[ResultStream]


@dataclass(frozen=True, slots=True)
class SpeculationTerms:
    """How a request speculates, as its caller set it; see SpeculationSettings.

    Attributes:
        num_speculative_tokens: longest main line that a round verifies; 0 for plain decoding.
        max_wait_s: longest wait for a proposal, in seconds.
        lookahead: most nodes that its draft may hold ahead of the text; 0 where it waits for verdicts.
        draft_min: shortest main line that is verified.
        own_draft: whether this process drafts.
        max_nodes: most nodes of a proposal of this process; 0 leaves it to the drafter.
        p_min: probability below which the drafter of this process ends a branch; None leaves it to the drafter.
        forced_tokens: whether tokens that the constraint forces are a proposal, with a draft or without.
    """

    num_speculative_tokens: int = 0
    max_wait_s: float = 0.0
    lookahead: int = 0
    draft_min: int = 0
    own_draft: bool = False
    max_nodes: int = 0
    p_min: float | None = None
    forced_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Open:
    """Begin a request; see VerifyOpen."""

    handle: Handle
    session_id: str
    fencing_token: int
    parameters: SamplingParameters
    rule: AcceptanceRule
    prompt_len: int
    committed_len: int
    window_end: int
    stop_token_ids: frozenset[int]
    speculation: SpeculationTerms
    cache_salt: bytes = b""
    feature_layers: tuple[int, ...] = ()
    request_id: str = ""
    traceparent: str = ""
    prediction: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """Truncate the session to the span's start and append it."""

    handle: Handle
    span: TokenSpan


@dataclass(frozen=True, slots=True)
class Propose:
    """Add nodes to the proposal ahead of the text; they arrived at the monotonic time `arrived`."""

    handle: Handle
    part: ProposalPart
    arrived: float


@dataclass(frozen=True, slots=True)
class Window:
    """Move the window of tokens that may be output."""

    handle: Handle
    committed_len: int
    window_end: int


@dataclass(frozen=True, slots=True)
class Speculate:
    """Change how the request speculates."""

    handle: Handle
    terms: SpeculationTerms


@dataclass(frozen=True, slots=True)
class SendFeatures:
    """Send features of these layers from position `start` on, now and after each pass; no layers end that."""

    handle: Handle
    layers: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Close:
    """End a request; its session is kept up to `committed_len`."""

    handle: Handle
    committed_len: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget a session as soon as no request runs on it; of the handle only the stream is read."""

    handle: Handle
    session_id: str


@dataclass(frozen=True, slots=True)
class InvalidFrame:
    """Refuse a frame that could not be read; `kind` is the name of its content."""

    handle: Handle
    kind: str
    error: OutriderError


@dataclass(frozen=True, slots=True)
class EndStream:
    """End all requests of a stream that has ended."""

    stream: ResultStream


RequestCommand: TypeAlias = Span | Propose | Window | Speculate | SendFeatures
"""Commands for a request that is open."""
FrameCommand: TypeAlias = Open | RequestCommand | Close | Forget | InvalidFrame
Command: TypeAlias = FrameCommand | EndStream


def is_gentle(command: Command) -> bool:
    """Return whether a command ends no request and changes no tokens.

    Such commands are applied also between a pass and its verdicts, so that these are decided with newer proposals.
    """
    match command:
        case Propose() | Window() | InvalidFrame(kind="proposal"):
            return True
        case _:
            return False


def is_optional(command: Command) -> bool:
    """Return whether a session goes on without a command: a wrong one is dropped, and ends nothing."""
    match command:
        case Propose() | SendFeatures() | InvalidFrame(kind="proposal" | "features"):
            return True
        case _:
            return False
