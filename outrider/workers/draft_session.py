"""A request's session on a draft; whatever fails there, the request continues by plain decoding."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from outrider import wire
from outrider.errors import KVCacheMiss, OutriderError, Unavailable
from outrider.tokens import Base, TokenSpan
from outrider.v1 import draft_pb2, tokens_pb2
from outrider.workers.links import StreamHandle, WorkerLink

_LOG: Final = logging.getLogger(__name__)
_ANSWER_S: Final = 10.0
"""How long a draft may take to open a session; without a bound, a draft that never does would never be replaced."""
_MAX_MISSES: Final = 3
"""Misses of the KV cache, or of features, without a proposal between them, after which a draft counts as broken."""
_MAX_PENDING_BYTES: Final = 16 << 20
"""Bytes of frames that may wait for a draft before features are dropped: it requests them once it has caught up."""


@dataclass(frozen=True, slots=True)
class SpeculationChoice:
    """How a request speculates, as chosen by the request, else by the settings.

    Attributes:
        num_speculative_tokens: longest main line of a round; 0 for plain decoding.
        drafter: required drafter; empty for any.
        draft_at: required place of the draft, `service` or `target`; empty for any.
        max_nodes: of a proposal; 0 leaves it to the draft.
        lookahead: nodes that the draft may propose ahead of the text; 0 where it waits for verdicts.
        draft_min: shortest main line that is verified.
        draft_p_min: probability below which the draft ends a branch; None leaves it to the draft.
        max_wait_s: longest wait of the target for a proposal, in seconds.
    """

    num_speculative_tokens: int
    drafter: str = ""
    draft_at: str = ""
    max_nodes: int = 0
    lookahead: int = 0
    draft_min: int = 0
    draft_p_min: float | None = None
    max_wait_s: float = 0.0


class DraftSession:
    """A request's session on a draft, which requests proposals and passes them on.

    Args:
        link: the draft.
        choice: how the request speculates.
        on_proposal: called with each part of a proposal as it arrives.
        on_ready: called once the draft has opened the session.
        on_lost: called once, with the error that ends drafting.
        request_features: requests the features of these layers from the target, from a position on.
        tokens_from: reads the session's tokens from a position on, up to its present end.
    """

    def __init__(
        self,
        link: WorkerLink,
        choice: SpeculationChoice,
        on_proposal: Callable[[tokens_pb2.Proposal], None],
        on_ready: Callable[[], None],
        on_lost: Callable[["DraftSession", OutriderError], None],
        request_features: Callable[[Sequence[int], int], None],
        tokens_from: Callable[[int], Awaitable[tuple[int, ...]]],
    ) -> None:
        self.link = link
        self.is_ready = False
        self._choice = choice
        self._num_requested = choice.num_speculative_tokens
        self._lookahead = self.lookahead
        self._on_proposal = on_proposal
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._request_features = request_features
        self._tokens_from = tokens_from
        self._handle: StreamHandle | None = None
        self._fencing_token = 0
        self._trusted_len = 0
        self._known_len = 0
        self._features_len = 0
        self._has_gap = False
        self._num_forwarded = 0
        self._num_misses = 0
        self._replay: asyncio.Task[None] | None = None
        self._restarts = False
        self._timeout: asyncio.TimerHandle | None = None

    def open(self, message: draft_pb2.DraftOpen, committed_len: int, *, is_idle: bool = False) -> None:
        """Open the session without waiting for the answer; raise `Unavailable` without a stream.

        Args:
            message: opens it.
            committed_len: committed tokens of the session.
            is_idle: whether the draft is told the session's tokens only, and requested nothing before `advance` does.
        """
        if is_idle:
            self._num_requested = 0
        self._fencing_token = message.fencing_token
        # Tokens that the draft has beyond the commit may come from an orchestrator that died before committing them.
        self._trusted_len = committed_len
        self._handle = self.link.open(self)
        self._handle.send(open=message)
        self._timeout = asyncio.get_running_loop().call_later(_ANSWER_S, self._on_timeout)

    @property
    def known_len(self) -> int:
        """Tokens of the session that the draft has been sent."""
        return self._known_len

    def advance(self, known: TokenSpan, num_speculative_tokens: int, lookahead: int) -> None:
        """Send the session's new tokens to the draft and request a proposal after them.

        Args:
            known: tokens up to the session's end, from a position at or before the end of the draft's tokens.
            num_speculative_tokens: longest main line that the target can verify.
            lookahead: nodes that the draft may propose ahead of them; 0 where it waits for the next verdict.
        """
        if not self.is_ready or self._replay is not None or self._handle is None:
            return
        self._num_requested = min(num_speculative_tokens, self._choice.num_speculative_tokens)
        self._lookahead = lookahead
        skipped = self._known_len - known.start
        if skipped < 0:
            self._catch_up(self._known_len)
            return
        self._send_advance(TokenSpan(self._known_len, known.token_ids[skipped:]))

    def restart(self, known: TokenSpan) -> None:
        """Request a new tree after the session's end, for a target that did not get the nodes of the one before.

        Args:
            known: tokens up to the session's end, the last one at least.
        """
        if self._replay is not None:
            self._restarts = True
        elif self.is_ready:
            # A span that only continues the draft's tokens would have it continue its tree: one of them is sent again.
            self._known_len = max(0, min(self._known_len, known.end) - 1)
            self.advance(known, self._num_requested, self._lookahead)

    def forward(self, features: tokens_pb2.Features) -> None:
        """Forward features of the target, except those that the draft has, or that follow a gap."""
        if self._handle is None:
            return
        if features.start != self._features_len or self.link.pending_bytes > _MAX_PENDING_BYTES:
            self._has_gap = self._has_gap or features.start >= self._features_len
            return
        self._features_len += len(features.data) // self._position_bytes
        self._num_forwarded += 1
        self._handle.send(features=features)

    def on_new_target(self) -> None:
        """Request the missing features from a target that has taken over."""
        if self._handle is not None and self.feature_layers:
            self._has_gap = False
            self._request_features(self.feature_layers, self._features_len)

    @property
    def lookahead(self) -> int:
        """Nodes that it may propose ahead of the text; 0 where it waits for verdicts, since features come with them."""
        return 0 if self.feature_layers else self._choice.lookahead

    @property
    def feature_layers(self) -> Sequence[int]:
        """Layers of the target whose features the draft takes as input; none for most drafts."""
        return self.link.info.feature_layers if self.link.info else ()

    @property
    def _position_bytes(self) -> int:
        return max(1, 2 * len(self.feature_layers) * (self.link.info.hidden_size if self.link.info else 0))

    def on_frame(self, frame: draft_pb2.DraftResponseFrame) -> None:
        """Handle a frame; see `Receiver`."""
        match frame.WhichOneof("frame"):
            case "proposal":
                self._num_misses = 0
                self._on_proposal(frame.proposal)
            case "opened":
                self._stop_timeout()
                if self.feature_layers:
                    self._features_len = min(frame.opened.features_len, self._trusted_len)
                    self._request_features(self.feature_layers, self._features_len)
                self._catch_up(min(frame.opened.cached_len, self._trusted_len))
            case "features_missing":
                self._miss_features(frame.features_missing)
            case "refusal":
                error = wire.refusal_from_message(frame.refusal)
                self._num_misses += 1
                if isinstance(error, KVCacheMiss) and self._num_misses <= _MAX_MISSES:
                    self._catch_up(min(error.cached_len, self._known_len))
                else:
                    self._lose(error)

    def on_lost(self, error: OutriderError) -> None:
        """Handle the loss of the stream; see `Receiver`."""
        self._lose(error)

    def close(self) -> None:
        """End drafting."""
        self.is_ready = False
        self._stop_timeout()
        if self._replay is not None:
            self._replay.cancel()
            self._replay = None
        if self._handle is not None:
            self._handle.close(close=draft_pb2.DraftClose())
            self._handle = None

    def _send_advance(self, span: TokenSpan) -> None:
        if self._handle is None or not span.token_ids:
            return
        self._known_len = span.end
        advance = draft_pb2.DraftAdvance(
            base=wire.base_to_message(Base(span.end, self._fencing_token)),
            span=wire.span_to_message(span),
            num_speculative_tokens=self._num_requested,
            max_nodes=self._choice.max_nodes,
            lookahead=self._lookahead,
        )
        self._handle.send(advance=advance)

    def _catch_up(self, start: int) -> None:
        """Send the session's tokens from a position on, which may have to be read from the log."""
        if self._replay is None:
            self._replay = asyncio.create_task(self._read_and_advance(start))

    async def _read_and_advance(self, start: int) -> None:
        try:
            span = TokenSpan(start, await self._tokens_from(start))
        except OutriderError as error:
            self._lose(error)
            return
        except Exception:
            _LOG.exception("a span could not be read", extra={"worker": self.link.address})
            self._lose(Unavailable(f"the span for {self.link.address} could not be read"))
            return
        finally:
            self._replay = None
        self._send_advance(span)
        if not self.is_ready:
            self.is_ready = True
            self._on_ready()
        if self._restarts:
            self._restarts = False
            self.restart(TokenSpan(span.end - 1, span.token_ids[-1:]))

    def _miss_features(self, missing: draft_pb2.FeaturesMissing) -> None:
        """Request features again that the draft has lost, or that were not forwarded."""
        start = missing.start
        if missing.num_frames < self._num_forwarded or (start == self._features_len and not self._has_gap):
            return  # they are on their way
        self._num_misses += start < self._features_len
        if self._num_misses > _MAX_MISSES:
            self._lose(Unavailable("the draft loses the features that it needs"))
        elif self.link.pending_bytes <= _MAX_PENDING_BYTES:
            self._features_len, self._has_gap = start, False
            self._request_features(self.feature_layers, start)

    def _stop_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def _on_timeout(self) -> None:
        self._lose(Unavailable(f"{self.link.address} did not answer within {_ANSWER_S:g} s"))

    def _lose(self, error: OutriderError) -> None:
        if self._handle is not None:
            self.close()
            self._on_lost(self, error)
