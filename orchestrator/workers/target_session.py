"""A request's session on a target: opened, sent its span, its verdicts received, closed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from outrider import wire
from outrider.errors import KVCacheMiss, OutriderError, Unavailable
from outrider.tokens import TokenSpan
from outrider.v1 import target_pb2, tokens_pb2
from outrider.workers.links import StreamHandle, WorkerLink

_LOG: Final = logging.getLogger(__name__)
_ANSWER_S: Final = 10.0
_WINDOW_PARTS: Final = 4
"""Moves of a window within its own length."""
_MAX_SPAN_LEN: Final = 16384
"""Tokens in one span frame, so that a frame stays far below the limit on messages."""


class TargetSession:
    """A request's session on a target.

    Args:
        link: the target.
        on_verdict: called with each verdict, in order.
        on_error: called once, with the error that ends the session on this target.
        on_features: called with features, in order, once they are requested.
        on_progress: called with the tokens of the session that are done, while a long prompt is run.
        tokens_from: reads the session's tokens from a position on, up to the end at the time of `open`.

    Attributes:
        link: as given.
        is_plain: whether the target decoded without drafts when it opened the request.
    """

    def __init__(
        self,
        link: WorkerLink,
        on_verdict: Callable[[target_pb2.Verdict], None],
        on_error: Callable[[OutriderError], None],
        on_features: Callable[[tokens_pb2.Features], None],
        on_progress: Callable[[int], None],
        tokens_from: Callable[[int], Awaitable[tuple[int, ...]]],
    ) -> None:
        self.link = link
        self._on_verdict = on_verdict
        self._on_error = on_error
        self._on_features = on_features
        self._on_progress = on_progress
        self._tokens_from = tokens_from
        self.is_plain = False
        self._opened: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._handle: StreamHandle | None = None
        self._replays: set[asyncio.Task[None]] = set()
        self._has_failed = False
        self._is_cut_off = False
        self._incarnation = link.info.incarnation if link.info else ""
        self._span_start = 0
        self._sent_len = 0

    @property
    def replica(self) -> str:
        """Name of the target's replica."""
        return self.link.info.replica if self.link.info else ""

    @property
    def incarnation(self) -> str:
        """Id of the process that the request was opened on."""
        return self._incarnation

    @property
    def was_lost(self) -> bool:
        """Whether the stream of the target broke while the request was open there."""
        return self._is_cut_off and self._opened.done() and self._opened.exception() is None

    async def open(self, message: target_pb2.VerifyOpen) -> int:
        """Open the request and send the tokens that the target lacks; generation starts.

        Returns:
            Tokens of the session that were in the target's KV cache.

        Raises:
            OutriderError: the target refuses, is lost, or does not answer in time.
        """
        self._handle = self.link.open(self)
        self._handle.send(open=message)
        self._sent_len = message.committed_len
        try:
            async with asyncio.timeout(_ANSWER_S):
                cached_len = await self._opened
        except TimeoutError:
            raise Unavailable(f"{self.link.address} did not answer within {_ANSWER_S:g} s") from None
        await self._send_span(cached_len)
        return cached_len

    def on_frame(self, frame: target_pb2.VerifyResponseFrame) -> None:
        """Handle a frame; see `Receiver`."""
        match frame.WhichOneof("frame"):
            case "verdict":
                self._on_verdict(frame.verdict)
            case "features":
                self._on_features(frame.features)
            case "progress":
                self._on_progress(frame.progress.cached_len)
            case "opened":
                self.is_plain = frame.opened.is_plain
                if not self._opened.done():
                    self._opened.set_result(frame.opened.cached_len)
            case "refusal":
                error = wire.refusal_from_message(frame.refusal)
                if not isinstance(error, KVCacheMiss):
                    self._fail(error)
                elif error.cached_len < self._span_start:
                    # Each replay begins earlier, so there is a last one. Any other miss is about a replaced span.
                    self._replay(error.cached_len)

    def on_lost(self, error: OutriderError) -> None:
        """Handle the loss of the stream; see `Receiver`."""
        self._is_cut_off = not self._has_failed
        self._fail(error)

    def propose(self, proposal: tokens_pb2.Proposal) -> None:
        """Forward a part of a proposal, unchanged."""
        if self._handle is not None:
            self._handle.send(proposal=proposal)

    def request_features(self, layers: Sequence[int], start: int) -> None:
        """Request the session's features from a position on."""
        if self._handle is not None:
            self._handle.send(features=target_pb2.FeatureRequest(layers=layers, start=start))

    def speculate(self, settings: target_pb2.SpeculationSettings) -> None:
        """Send the settings of speculation."""
        if self._handle is not None:
            self._handle.send(speculation=settings)

    def move_window(self, committed_len: int, window: int) -> None:
        """Send the committed length, `window` tokens beyond which the target may run; only a few times within a window.

        Until then the target keeps fewer tokens of an abandoned session than it could, which costs time only.
        """
        if self._handle is not None and committed_len - self._sent_len >= max(1, window // _WINDOW_PARTS):
            self._sent_len = committed_len
            message = target_pb2.VerifyWindow(committed_len=committed_len, window_end=committed_len + window)
            self._handle.send(window=message)

    def close(self, committed_len: int) -> None:
        """End the request on this target; its committed tokens stay cached there."""
        for replay in self._replays:
            replay.cancel()
        if self._handle is not None:
            self._handle.close(close=target_pb2.VerifyClose(committed_len=committed_len))
            self._handle = None

    async def _send_span(self, start: int) -> None:
        self._span_start = start
        token_ids = await self._tokens_from(start)
        for first in range(0, len(token_ids), _MAX_SPAN_LEN):
            span = TokenSpan(start + first, token_ids[first : first + _MAX_SPAN_LEN])
            if self._handle is not None:
                self._handle.send(span=wire.span_to_message(span))

    def _replay(self, cached_len: int) -> None:
        self._span_start = cached_len
        task = asyncio.create_task(self._send_span(cached_len))
        self._replays.add(task)
        task.add_done_callback(self._end_replay)

    def _end_replay(self, task: asyncio.Task[None]) -> None:
        self._replays.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, OutriderError):
            self._fail(error)
        elif error is not None:
            # Otherwise the target would wait for the span, and this session for the target, until the stall timeout.
            _LOG.error("a span could not be sent", exc_info=error, extra={"worker": self.link.address})
            self._fail(Unavailable(f"the span for {self.link.address} could not be read"))

    def _fail(self, error: OutriderError) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        if self._opened.done():
            self._on_error(error)
        else:
            self._opened.set_exception(error)
