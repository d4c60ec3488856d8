"""The target and the draft of one request: opened, connected to each other, replaced where they are lost."""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from typing import Final

from orchestrator.generation.request import RunningRequest, Services
from orchestrator.generation.silence import SilenceWatch
from orchestrator.generation.target_losses import TargetLosses
from orchestrator.metrics import RequestStatistics
from orchestrator.workers.target_session import TargetSession
from outrider.drafter_names import SUFFIX, has_suffix, includes
from outrider.errors import (
    ConstraintFailed,
    DataLoss,
    Fenced,
    InvalidArgument,
    ModelMismatch,
    OutriderError,
    RequestFailed,
    SessionNotFound,
    Unavailable,
)
from outrider.parameters import AT_SERVICE, AT_TARGET
from outrider.serving.frames import MAX_FRAME_BYTES_PER_MESSAGE
from outrider.v1 import generation_pb2, target_pb2, tokens_pb2
from outrider.workers.draft_session import DraftSession
from outrider.workers.links import WorkerLink

_LOG: Final = logging.getLogger(__name__)
_FINAL: Final = (ConstraintFailed, DataLoss, Fenced, InvalidArgument, ModelMismatch, SessionNotFound)
"""Errors that every other target would raise too."""
_OWN: Final = (InvalidArgument, RequestFailed)
"""Errors of a draft that the request causes, not the draft."""
_MAX_NOTICES: Final = 16
_FIRST_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 1.0
_STALL_S: Final = 300.0
"""Silence of a target that owes a verdict, after which another takes over; a long prompt's prefill takes minutes."""


class WorkerPair:
    """The workers of a request: a target, and a draft where the request speculates and one is in rotation.

    Frames arrive by callbacks that never wait: tokens of a verdict go to the draft at once, a proposal to the target.

    Args:
        services: workers, settings, metrics.
        request: the request.
        statistics: of the request.

    Attributes:
        arrived: set when a verdict has arrived, or the target is lost.
    """

    def __init__(self, services: Services, request: RunningRequest, statistics: RequestStatistics) -> None:
        self.arrived = asyncio.Event()
        self._replicas, self._settings, self._window = services.replicas, services.settings, services.window
        self._target_changes = services.metrics.target_changes
        self._request = request
        self._tokens = request.tokens
        self._fencing_token = request.lease.fencing_token
        self._statistics = statistics
        # For log records of the tasks that read workers' streams.
        self._log_fields = request.log_fields
        self._verdicts: list[target_pb2.Verdict] = []
        self._notices: list[generation_pb2.Notice] = []
        self._target: TargetSession | None = None
        self._target_error: OutriderError | None = None
        self._failed_targets: list[str] = []
        self._failing_since: float | None = None
        self._losses = TargetLosses()
        self._opened_len = 0
        self._left: tuple[str, str] | None = None
        self._draft: DraftSession | None = None
        self._draft_retry_at = 0.0
        self._draft_has_proposed = False
        self._is_closed = False
        self._silence = SilenceWatch(_STALL_S, self._on_silence)
        self._placement = services.placement
        self._place = AT_SERVICE
        self._compares = False
        self._rounds_s = 0.0
        self._num_round_tokens = 0

    @property
    def replica(self) -> str:
        """Name of the target's replica; empty without a target."""
        return self._target.replica if self._target else ""

    @property
    def draft_is_ready(self) -> bool:
        """Whether a draft has opened the session."""
        return self._draft is not None and self._draft.is_ready

    def take_verdicts(self) -> list[target_pb2.Verdict]:
        """Return the verdicts that have arrived since the last call."""
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def take_notices(self) -> list[generation_pb2.Notice]:
        """Return what has happened to the workers since the last call."""
        notices, self._notices = self._notices, []
        return notices

    async def attach(self, committed_len: int) -> None:
        """Open the request on a target and a draft, where it has none; replace a target that is lost.

        Raises:
            OutriderError: the target's error, where every other target would raise it too, or none took over in time.
            Unavailable: no target came into rotation in time.
        """
        if self._target_error is not None:
            self._drop_target(self._target_error, committed_len)
        if self._target is None:
            await self._attach_target()
        self._attach_draft(committed_len)

    async def wait(self) -> None:
        """Return when something has arrived, or the target has stalled."""
        if self._verdicts or self._target_error is not None:
            return
        self.arrived.clear()
        self._silence.begin()
        await self.arrived.wait()
        self._silence.end()

    def cancel(self) -> None:
        """End the request after the verdicts that have arrived."""
        self._verdicts.append(target_pb2.Verdict(finish_reason=tokens_pb2.FINISH_REASON_CANCELLED))
        self.arrived.set()

    def move_window(self, committed_len: int) -> None:
        """Let the target run the window's length beyond the commit."""
        if self._target is not None:
            self._target.move_window(committed_len, self._window)

    def close(self, committed_len: int) -> None:
        """Close the sessions on both workers."""
        self._is_closed = True
        self._silence.close()
        if self._compares and self._target is not None:
            self._placement.observe(self._target.link.address, self._place, self._rounds_s, self._num_round_tokens)
        if self._draft is not None:
            self._draft.close()
        if self._target is not None:
            self._target.close(committed_len)

    # Callbacks of the sessions on the workers; in the event loop, they never wait.

    def _on_verdict(self, verdict: target_pb2.Verdict) -> None:
        base = verdict.base
        if self._is_closed or self._target_error is not None or base.fencing_token != self._fencing_token:
            return
        if base.len != self._tokens.end:
            # None of its later verdicts would fit either: without another target the stream would stall.
            problem = f"the target continues token {base.len}, the session has {self._tokens.end}"
            self._on_target_error(Unavailable(problem))
            return
        self._failing_since = None
        self._failed_targets.clear()
        self._observe_round(verdict)
        self._tokens.append(list(verdict.token_ids))
        self._verdicts.append(verdict)
        if verdict.num_recomputed_tokens:
            self._note(generation_pb2.NOTICE_KIND_TOKENS_RECOMPUTED, num_tokens=verdict.num_recomputed_tokens)
        if self._draft is not None and verdict.num_speculative_tokens and not verdict.finish_reason:
            known = self._tokens.since(self._draft.known_len)
            self._draft.advance(known, verdict.num_speculative_tokens, verdict.lookahead)
        self.arrived.set()

    def _observe_round(self, verdict: target_pb2.Verdict) -> None:
        """Count a round for the place where it drafted, but for the first, which runs the prompt."""
        if self._num_round_tokens or verdict.wait_time_s > 0:
            self._rounds_s += verdict.model_time_s + verdict.wait_time_s
        self._num_round_tokens += len(verdict.token_ids)
        if verdict.num_proposed_nodes:
            own = self._target.link.info if self._target_drafts and self._target else None
            other = self._draft.link.info if self._draft else None
            if (info := own or other) is not None:
                self._statistics.record_drafter(info.drafter, AT_TARGET if own else AT_SERVICE)

    def _on_silence(self) -> None:
        self._on_target_error(Unavailable(f"the target sent nothing for {_STALL_S:g} s"))

    def _on_target_error(self, error: OutriderError) -> None:
        self._target_error = error
        self.arrived.set()

    def _on_proposal(self, proposal: tokens_pb2.Proposal) -> None:
        if not self._draft_has_proposed and self._draft is not None:
            self._draft_has_proposed = True
            self._replicas.record_success(self._draft.link)
        if proposal.base.fencing_token != self._fencing_token:
            self._statistics.record_fallback("stale_proposal")
            return
        # Late ones are forwarded too: they show the target whether waiting would pay.
        if self._target is None:
            return
        if proposal.ByteSize() > MAX_FRAME_BYTES_PER_MESSAGE:
            # It could exceed the limit on messages, and so break the target's stream for all sessions.
            self._statistics.record_fallback("proposal_too_large")
            return
        self._target.propose(proposal)

    def _on_features(self, features: tokens_pb2.Features) -> None:
        self._statistics.record_features(len(features.data))
        if self._draft is not None:
            self._draft.forward(features)

    def _on_progress(self, cached_len: int) -> None:
        if self._request.reports:
            self._note(generation_pb2.NOTICE_KIND_PREFILL, num_tokens=cached_len)
            self.arrived.set()

    def _request_features(self, layers: Sequence[int], start: int) -> None:
        if self._target is not None:
            self._target.request_features(layers, start)

    def _on_draft_ready(self) -> None:
        if self._target is not None:
            self._target.speculate(self._speculation_settings())

    def _on_draft_lost(self, draft: DraftSession, error: OutriderError) -> None:
        address = draft.link.address
        self._statistics.record_fallback(f"draft_{error.reason.lower()}")
        self._note(generation_pb2.NOTICE_KIND_DRAFT_LOST, error.reason)
        self._request.span.add_event("draft_lost", {"server.address": address, "outrider.reason": error.reason})
        _LOG.info(
            "draft lost, continuing without", extra={**self._log_fields, "worker": address, "reason": error.reason}
        )
        self._draft = None
        self._draft_retry_at = time.monotonic() + self._settings.draft_retry_s
        if self._compares:
            # The target drafts on for itself, and what this request shows is no place's alone.
            self._place, self._compares = AT_TARGET, False
        if isinstance(error, _OWN):
            # Every other draft would fail too; and since the draft has not failed, other requests keep using it.
            self._draft_retry_at = math.inf
        elif not isinstance(error, Fenced):
            self._replicas.record_failure(draft.link)
        if self._target is not None:
            self._target.speculate(self._speculation_settings())

    def _note(self, kind: generation_pb2.NoticeKind.ValueType, reason: str = "", num_tokens: int = 0) -> None:
        # Without a reader of them, as between two commits of a slow stream, the latest few are enough.
        del self._notices[:-_MAX_NOTICES]
        self._notices.append(generation_pb2.Notice(kind=kind, reason=reason, num_tokens=num_tokens))

    # Opening and replacing workers.

    async def _attach_target(self) -> None:
        """Open the request on a target; after a failure the next call tries another one."""
        link = await self._replicas.target(self._request.record.target, self._failed_targets)
        num_failures = self._failed_targets.count(link.address)
        if num_failures:
            # It is the only one: retry with backoff.
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (num_failures - 1), _MAX_PAUSE_S))
        target = TargetSession(
            link,
            self._on_verdict,
            self._on_target_error,
            self._on_features,
            self._on_progress,
            self._tokens.read_from,
        )
        self._target, self._target_error, self._opened_len = target, None, self._tokens.end
        if self._has_constraint and not (link.info and link.info.grammar_library):
            # It would generate without it.
            self._target_error = Unavailable(f"{link.address} takes no constraints")
            return
        self._choose_place(link)
        layers = self._draft.feature_layers if self._draft else ()
        drafter = link.info.drafter if link.info and self._target_drafts else ""
        try:
            cached_len = await target.open(
                self._request.verify_open(self._speculation_settings(), self._window, layers, drafter)
            )
        except OutriderError as error:
            self._target_error = error
            return
        if self._left is not None and self._left[0] != link.address:
            self._target_changes.labels(self._left[1]).inc()
            self._note(generation_pb2.NOTICE_KIND_TARGET_REPLACED, self._left[1])
        self._left = None
        self._statistics.record_cached(min(cached_len, self._request.record.prompt_len))
        self._request.span.add_event("target", {"server.address": link.address})
        self._statistics.record_numerics(self._numerics_of(link))
        if self._draft is not None:
            self._draft.on_new_target()
            self._draft.restart(self._tokens.since(self._tokens.end - 1))

    def _numerics_of(self, link: WorkerLink) -> str:
        """Return what the text depends on at a target besides the request."""
        if link.info is None:
            return ""
        return f"{link.info.grammar_library} {link.info.numerics}" if self._has_constraint else link.info.numerics

    @property
    def _has_constraint(self) -> bool:
        return self._request.record.parameters.constraint is not None

    def _drop_target(self, error: OutriderError, committed_len: int) -> None:
        """Close a target; raise its error where no other target may continue, or none has for too long."""
        self._target_error = None
        if self._target is not None:
            # The first one, whichever others refuse before another target takes the request.
            self._left = self._left or (self._target.link.address, error.reason)
            self._failed_targets.append(self._target.link.address)
            lost, self._target = self._target, None
            lost.close(committed_len)
            num_output = self._tokens.end - self._opened_len
            self._losses.record(error, lost.incarnation, num_output, was_open=lost.was_lost)
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if isinstance(error, _FINAL) or now - self._failing_since > self._settings.failover_timeout_s:
            raise error
        self._request.span.add_event("target_lost", {"outrider.reason": error.reason})
        _LOG.warning("target lost, continuing on another", extra={"reason": error.reason})

    def _speculation_settings(self) -> target_pb2.SpeculationSettings:
        """Return the settings of speculation for the target; plain decoding while no draft is ready."""
        draft = self._draft if self._draft is not None and self._draft.is_ready else None
        choice = self._request.choice
        forced_tokens = choice.num_speculative_tokens > 0
        if draft is None and not self._target_drafts:
            return target_pb2.SpeculationSettings(forced_tokens=forced_tokens)
        return target_pb2.SpeculationSettings(
            num_speculative_tokens=choice.num_speculative_tokens,
            max_wait_s=choice.max_wait_s,
            lookahead=0 if draft is None or self._target_drafts else draft.lookahead,
            draft_min=choice.draft_min,
            own_draft=self._target_drafts,
            max_nodes=choice.max_nodes,
            draft_p_min=choice.draft_p_min,
            forced_tokens=forced_tokens,
        )

    def _choose_place(self, link: WorkerLink) -> None:
        """Choose where to draft beside a target: where the request says, else where it can, or where it is better."""
        choice, has_own = self._request.choice, self._has_fitting_drafter(link)
        self._rounds_s, self._num_round_tokens, self._compares = 0.0, 0, False
        if not choice.num_speculative_tokens or not has_own or choice.draft_at == AT_SERVICE:
            self._place = AT_SERVICE
        elif choice.draft_at == AT_TARGET or self._free_draft() is None:
            self._place = AT_TARGET
        elif self._request.prediction is not None and not choice.drafter:
            self._place = AT_SERVICE if link.info is None or not has_suffix(link.info.drafter) else AT_TARGET
        else:
            self._place, self._compares = self._placement.choose(link.address), True
        if self._place == AT_TARGET and self._draft is not None:
            self._draft.close()
            self._draft = None

    def _has_fitting_drafter(self, link: WorkerLink) -> bool:
        """Whether a target can draft for itself, with a drafter that the request accepts."""
        drafter = link.info.drafter if link.info is not None else ""
        return bool(drafter) and includes(drafter, self._request.choice.drafter)

    @property
    def _target_drafts(self) -> bool:
        """Whether the target drafts for itself."""
        return self._target is not None and self._place == AT_TARGET and self._has_fitting_drafter(self._target.link)

    def _free_draft(self) -> WorkerLink | None:
        """Return a draft for the request: one that uses its prediction, where it has one and names no other drafter."""
        drafter, rule = self._request.choice.drafter, self._request.record.rule
        if self._request.prediction is not None and not drafter and (link := self._replicas.draft(SUFFIX, rule)):
            return link
        return self._replicas.draft(drafter, rule)

    def _attach_draft(self, committed_len: int) -> None:
        """Open the session on a draft, where the request needs one and one is in rotation; without waiting."""
        choice = self._request.choice
        if not choice.num_speculative_tokens or self._draft or self._place == AT_TARGET:
            return
        if time.monotonic() < self._draft_retry_at:
            return
        self._draft_retry_at = time.monotonic() + self._settings.draft_retry_s
        link = self._free_draft()
        if link is None:
            self._statistics.record_fallback("no_draft")
            return
        draft = DraftSession(
            link,
            choice,
            self._on_proposal,
            self._on_draft_ready,
            self._on_draft_lost,
            self._request_features,
            self._tokens.read_from,
        )
        try:
            target = self._target.link.info if self._target else None
            is_idle = self._target is not None and self._target.is_plain
            message = self._request.draft_open(target, link.info.drafter if link.info else "")
            draft.open(message, committed_len, is_idle=is_idle)
        except Unavailable:
            self._statistics.record_fallback("no_draft")
            return
        self._draft, self._draft_has_proposed = draft, False
        self._request.span.add_event("draft", {"server.address": link.address})
