"""One Verify stream as the engine sees it: commands that came on it, and frames that leave on it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from outrider import wire
from outrider.errors import OutriderError, Overloaded
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.serving.frames import FrameOutbox
from outrider.tokens import Base, FeatureSpan
from outrider.v1 import target_pb2
from target_service.engine.results import RoundAbout, RoundResult
from target_service.engine.speculation import SpeculationTerms

_MAX_PENDING_FEATURE_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class OpenCommand:
    """What an `open` frame says; see VerifyOpen."""

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


class Stream:
    """The outgoing side of a Verify stream; its methods may be called from the engine's thread."""

    def __init__(self) -> None:
        self.outbox: FrameOutbox[target_pb2.VerifyResponseFrame, target_pb2.VerifyResponse] = FrameOutbox(
            lambda frames: target_pb2.VerifyResponse(frames=frames)
        )
        self._loop = asyncio.get_running_loop()
        self._held: list[target_pb2.VerifyResponseFrame] = []
        self._held_feature_bytes = 0

    @property
    def key(self) -> int:
        """Identity of the stream within the process, while it lives."""
        return id(self)

    def opened(self, handle: int, cached_len: int) -> None:
        """Answers `open`."""
        self._put(target_pb2.VerifyResponseFrame(handle=handle, opened=target_pb2.VerifyOpened(cached_len=cached_len)))

    def refused(self, handle: int, error: OutriderError) -> None:
        """Names an error of one session."""
        self._put(target_pb2.VerifyResponseFrame(handle=handle, refusal=wire.refusal_to_message(error)))

    def verdict(self, handle: int, base: Base, result: RoundResult, about: RoundAbout) -> None:
        """Sends, with the next `flush`, the outcome of a pass for one session.

        Args:
            handle: the session's.
            base: what the result continues.
            result: the outcome.
            about: what else there is to say of the round.
        """
        message = target_pb2.Verdict(
            base=wire.base_to_message(base),
            token_ids=result.token_ids,
            origins=[wire.origin_to_number(origin) for origin in result.origins],
            logprobs=[wire.logprobs_to_message(logprobs) for logprobs in result.logprobs],
            num_draft_tokens=result.num_draft_tokens,
            num_accepted_tokens=result.num_accepted,
            num_nodes=result.num_nodes,
            finish_reason=wire.finish_to_number(result.finish_reason),
            model_time_s=about.model_time_s,
            wait_time_s=about.wait_time_s,
            queue_time_s=about.queue_time_s,
            expected_time_s=about.expected_time_s,
            num_speculative_tokens=about.num_wanted,
            num_recomputed_tokens=about.num_recomputed,
            hit=about.hit,
            num_proposed_nodes=about.num_proposed,
            lookahead=about.lookahead,
        )
        self._held.append(target_pb2.VerifyResponseFrame(handle=handle, verdict=message))

    def features(self, handle: int, features: FeatureSpan) -> None:
        """Sends, with the next `flush`, features of one session."""
        frame = target_pb2.VerifyResponseFrame(handle=handle, features=wire.features_to_message(features))
        self._held.append(frame)
        self._held_feature_bytes += len(features.data)

    @property
    def has_room_for_features(self) -> bool:
        """Whether what waits to be sent is little enough for features, which can wait, to join it."""
        return self.outbox.pending_bytes + self._held_feature_bytes < _MAX_PENDING_FEATURE_BYTES

    def flush(self) -> None:
        """Sends the verdicts of a pass together: whoever gets them then handles them together too."""
        if self._held:
            self._put()

    def _put(self, *frames: target_pb2.VerifyResponseFrame) -> None:
        held, self._held, self._held_feature_bytes = self._held, [], 0
        try:
            self.outbox.put_threadsafe(*held, *frames)
        except Overloaded as error:
            # The caller does not read; it has the windows to prevent this. Its stream ends, its sessions are resumable.
            self._call(self.outbox.close, error)

    def _call(self, function: Callable[[OutriderError], None], error: OutriderError) -> None:
        self._loop.call_soon_threadsafe(function, error)
