"""One request, from its lease to its terminal event; the flow is the one of docs/architecture.md.

Frames come in by callbacks that never wait: a verdict goes on to the draft at once, a proposal to the target. One
coroutine (`events`) takes the verdicts that have come, commits their tokens together, and only then emits them.
"""

import asyncio
import functools
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.trace import Span

from orchestrator.generation.renewal import LeaseRenewal
from orchestrator.generation.session_tokens import SessionTokens
from orchestrator.generation.tally import Tally
from orchestrator.generation.target_losses import TargetLosses
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.settings import OrchestratorSettings
from orchestrator.speculation import SpeculationChoice
from orchestrator.store.sessions import Committed, Lease, SessionRecord
from orchestrator.store.store import SessionLost, SessionStore
from orchestrator.text.output import OutputText
from orchestrator.workers.draft_session import DraftSession
from orchestrator.workers.replicas import Replicas
from orchestrator.workers.target_session import TargetSession
from outrider import wire
from outrider.errors import (
    DataLoss,
    Fenced,
    InvalidArgument,
    ModelMismatch,
    OutriderError,
    RequestFailed,
    SessionNotFound,
    Unavailable,
)
from outrider.parameters import FinishReason
from outrider.serving.frames import MAX_FRAME_BYTES_PER_MESSAGE
from outrider.serving.spans import log_fields, traceparent_of
from outrider.v1 import draft_pb2, generation_pb2, target_pb2, tokens_pb2

_LOG: Final = logging.getLogger(__name__)
_FINAL: Final = (DataLoss, Fenced, InvalidArgument, ModelMismatch, SessionNotFound)
"""Errors that another target would give too."""
_OWN: Final = (InvalidArgument, RequestFailed)
"""Errors of a draft that are about the request, and not about the draft."""
_FIRST_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 1.0
# More tokens than a target decides while a commit is on its way to Redis and back, so that none waits for it; no more,
# because whatever is not committed is computed again after a failover.
_WINDOW: Final = 64
_STALL_S: Final = 300.0
"""Silence of a target that owes a verdict, after which another one goes on; a long prompt's prefill takes minutes."""


@dataclass(frozen=True, slots=True)
class Services:
    """What every generation uses.

    Attributes:
        store: the session store.
        replicas: all workers.
        settings: of the process.
        metrics: of the process.
        window: uncommitted tokens that a target may run ahead, at least 1.
    """

    store: SessionStore
    replicas: Replicas
    settings: OrchestratorSettings
    metrics: OrchestratorMetrics
    window: int = _WINDOW


@dataclass(slots=True)
class _Batch:
    """Output that is committed and emitted together."""

    token_ids: list[int] = field(default_factory=list)
    origins: list[tokens_pb2.TokenOrigin.ValueType] = field(default_factory=list)
    logprobs: list[tokens_pb2.TokenLogprobs] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stopped: bool = False


class Generation:
    """Runs one request under its lease.

    Args:
        services: store, workers, settings.
        record: the session, as it was when the lease was granted.
        lease: the lease.
        tokens: the session's tokens, the prompt included.
        output: the output's text, which has absorbed what is committed already.
        choice: how to speculate.
        stop_token_ids: token ids at which the request ends.
        span: of the request's trace.
    """

    def __init__(
        self,
        services: Services,
        record: SessionRecord,
        lease: Lease,
        tokens: SessionTokens,
        output: OutputText,
        choice: SpeculationChoice,
        stop_token_ids: tuple[int, ...],
        span: Span,
    ) -> None:
        self._store, self._replicas, self._settings = services.store, services.replicas, services.settings
        self._window = services.window
        self._metrics = services.metrics
        self._record = record
        self._lease = lease
        self._tokens = tokens
        self._output = output
        self._choice = choice
        self._stop_token_ids = stop_token_ids
        self._span = span
        # For what is logged where a worker's stream is read: there the request's own fields are not known.
        ids = {"request_id": record.request_id, "session_id": record.session_id, "tenant": record.tenant}
        self._ids = {**ids, **log_fields(span)}
        self._committed_len = record.committed_len
        self._target: TargetSession | None = None
        self._target_error: OutriderError | None = None
        self._failed_targets: list[str] = []
        self._failing_since: float | None = None
        self._losses = TargetLosses()
        self._opened_len = 0
        self._left: tuple[str, str] | None = None
        self._draft: DraftSession | None = None
        self._draft_retry_at = 0.0
        self._draft_is_proved = False
        self._verdicts: list[target_pb2.Verdict] = []
        self._wake = asyncio.Event()
        self._is_over = False
        self._is_finished = False
        self._tally = Tally(services.metrics)
        self._end: OutriderError | None = None
        self._renewal = LeaseRenewal(self._store, lease, self._settings.lease_s / 3, self.cancel, self._on_lease_lost)

    async def events(self) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yields deltas, then the terminal event.

        Raises:
            Fenced: somebody else continues the session.
            Unavailable: Redis or every target is out of reach; the session is resumable.
            OutriderError: what else ends the stream; the session is resumable.
        """
        self._renewal.start()
        while not self._is_finished:
            batch = await self._next_batch()
            if batch is None:
                continue
            await self._commit(batch)
            if batch.token_ids:
                yield self._delta(batch)
            if batch.finish_reason is not None:
                self._is_finished = True
                yield self._finished(batch)

    @property
    def request_id(self) -> str:
        """The request."""
        return self._record.request_id

    def cancel(self) -> None:
        """Ends the request behind what has come so far; its stream gets the terminal event."""
        self._verdicts.append(target_pb2.Verdict(finish_reason=tokens_pb2.FINISH_REASON_CANCELLED))
        self._wake.set()

    def close(self) -> "asyncio.Task[None] | None":
        """Frees both workers; the task gives back the lease of a request that has not ended."""
        self._is_over = True
        self._renewal.stop()
        if self._draft is not None:
            self._draft.close()
        if self._target is not None:
            self._target.close(self._committed_len)
        return None if self._is_finished else asyncio.create_task(self._release())

    async def _release(self) -> None:
        try:
            async with self._renewal.turn:
                await self._store.release(self._lease)
        except OutriderError as error:
            # The lease ends by itself.
            _LOG.warning("lease not given back", extra={"reason": error.reason})

    # Commit before emit.

    async def _next_batch(self) -> _Batch | None:
        """Returns output to commit; None when there is none yet. Attaches targets and drafts."""
        if self._end is not None:
            raise self._end
        if self._verdicts:
            return self._absorb()
        if self._target_error is not None:
            self._drop_target(self._target_error)
        if self._target is None:
            await self._attach_target()
        self._attach_draft()
        if not self._verdicts and not self._target_error and not self._end:
            await self._wait()
        return None

    async def _wait(self) -> None:
        """Returns when something has come, or is overdue."""
        self._wake.clear()
        try:
            async with asyncio.timeout(_STALL_S):
                await self._wake.wait()
        except TimeoutError:
            self._on_target_error(Unavailable(f"the target gave nothing for {_STALL_S:g} s"))

    def _absorb(self) -> _Batch:
        verdicts, self._verdicts = self._verdicts, []
        batch = _Batch()
        for verdict in verdicts:
            absorbed = self._output.absorb(verdict.token_ids)
            num = absorbed.num_tokens
            batch.token_ids += verdict.token_ids[:num]
            batch.origins += verdict.origins[:num]
            batch.logprobs += verdict.logprobs[:num]
            batch.text += absorbed.text
            if num:
                self._tally.verdict(verdict, num)
            if num and self._draft is not None and self._draft.is_ready and verdict.num_nodes == 0:
                self._tally.fallback("no_proposal")
            batch.stopped = absorbed.stopped
            batch.finish_reason = (
                FinishReason.STOP if absorbed.stopped else wire.finish_from_number(verdict.finish_reason)
            )
            if batch.finish_reason is not None:
                break
        return batch

    async def _commit(self, batch: _Batch) -> None:
        replica = self._target.replica if self._target else ""
        async with self._renewal.turn:
            if batch.finish_reason is not None:
                self._renewal.stop()
            committed = await self._append(batch.token_ids, batch.finish_reason, replica)
            if committed.cancelled and batch.finish_reason is None:
                self._renewal.stop()
                batch.finish_reason = FinishReason.CANCELLED
                await self._append([], FinishReason.CANCELLED, replica)
        if self._target is not None and batch.finish_reason is None:
            self._target.move_window(self._committed_len, self._window)

    async def _append(self, token_ids: list[int], reason: FinishReason | None, replica: str) -> Committed:
        append = functools.partial(self._store.append, self._lease, self._committed_len, token_ids, reason, replica)
        try:
            try:
                with self._metrics.commit_time.time():
                    committed = await append()
            except DataLoss as error:
                await self._restore(error)
                committed = await append()
        except SessionNotFound as error:
            self._end = error
            raise
        self._committed_len = committed.length
        self._renewal.committed()
        return committed

    async def _restore(self, error: DataLoss) -> None:
        """Writes the session again where the server has lost it, or its last writes."""
        if isinstance(error, SessionLost) and time.monotonic() - self._renewal.renewed_s > self._settings.session_ttl_s:
            raise SessionNotFound("the session expired") from error
        known = self._tokens.until(self._committed_len)
        await self._store.restore(self._record, self._lease, known.start, known.token_ids)
        self._tally.fallback("session_restored")
        self._span.add_event("session_restored")
        _LOG.warning("the session store had lost a session, which was written again")

    # What workers say; called in the event loop, never waits.

    def _on_verdict(self, verdict: target_pb2.Verdict) -> None:
        base = verdict.base
        if self._is_over or self._target_error is not None or base.fencing_token != self._lease.fencing_token:
            return
        if base.len != self._tokens.end:
            # None of its later ones would fit either: without another target the stream would stand still.
            problem = f"the target continues token {base.len}, the session has {self._tokens.end}"
            self._on_target_error(Unavailable(problem))
            return
        self._failing_since = None
        self._failed_targets.clear()
        self._tokens.append(list(verdict.token_ids))
        self._verdicts.append(verdict)
        if self._draft is not None and verdict.num_speculative_tokens and not verdict.finish_reason:
            known = self._tokens.since(self._draft.known_len)
            self._draft.advance(known, verdict.num_speculative_tokens, verdict.lookahead)
        self._wake.set()

    def _on_lease_lost(self, error: OutriderError) -> None:
        self._end = error
        self._wake.set()

    def _on_target_error(self, error: OutriderError) -> None:
        self._target_error = error
        self._wake.set()

    def _on_proposal(self, proposal: tokens_pb2.Proposal) -> None:
        if not self._draft_is_proved and self._draft is not None:
            self._draft_is_proved = True
            self._replicas.proved(self._draft.link)
        if proposal.base.fencing_token != self._lease.fencing_token:
            self._tally.fallback("stale_proposal")
            return
        # Late ones are forwarded too: the target learns from them whether waiting would pay.
        if self._target is None:
            return
        if proposal.ByteSize() > MAX_FRAME_BYTES_PER_MESSAGE:
            # It could break the limit on messages, and with it the target's stream for all sessions.
            self._tally.fallback("proposal_too_large")
            return
        self._target.propose(proposal)

    def _on_features(self, features: tokens_pb2.Features) -> None:
        self._tally.features(len(features.data))
        if self._draft is not None:
            self._draft.give(features)

    def _ask_features(self, layers: Sequence[int], start: int) -> None:
        if self._target is not None:
            self._target.request_features(layers, start)

    def _on_draft_ready(self) -> None:
        if self._target is not None:
            self._target.speculate(self._speculation_settings())

    def _on_draft_lost(self, draft: DraftSession, error: OutriderError) -> None:
        self._tally.fallback(f"draft_{error.reason.lower()}")
        self._span.add_event("draft_lost", {"server.address": draft.link.address, "outrider.reason": error.reason})
        about = {**self._ids, "worker": draft.link.address, "reason": error.reason}
        _LOG.info("draft lost, going on without", extra=about)
        self._draft = None
        self._draft_retry_at = time.monotonic() + self._settings.draft_retry_s
        if isinstance(error, _OWN):
            # No other draft would do better; and the draft has not failed, so others go on with it.
            self._draft_retry_at = math.inf
        elif not isinstance(error, Fenced):
            self._replicas.failed(draft.link)
        if self._target is not None:
            self._target.speculate(self._speculation_settings())

    # Workers come and go.

    async def _attach_target(self) -> None:
        """Opens the request on a target; on a failure the next call tries another one."""
        link = await self._replicas.target(self._record.target, self._failed_targets)
        num_failures = self._failed_targets.count(link.address)
        if num_failures:
            # No other one is there; it is not worth asking as fast as it refuses.
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (num_failures - 1), _MAX_PAUSE_S))
        target = TargetSession(link, self._on_verdict, self._on_target_error, self._on_features, self._tokens.read_from)
        self._target, self._target_error, self._opened_len = target, None, self._tokens.end
        try:
            await target.open(self._verify_open())
        except OutriderError as error:
            self._target_error = error
            return
        if self._left is not None and self._left[0] != link.address:
            self._metrics.target_changes.labels(self._left[1]).inc()
        self._left = None
        self._span.add_event("target", {"server.address": link.address})
        self._tally.target(link.info.numerics if link.info else "")
        if self._draft is not None:
            self._draft.on_new_target()
            self._draft.repeat(self._tokens.since(self._tokens.end - 1))

    def _drop_target(self, error: OutriderError) -> None:
        """Decides whether another target may go on; raises the error where none may, or none has for too long."""
        self._target_error = None
        if self._target is not None:
            # The first one, whoever else refuses before another takes the request.
            self._left = self._left or (self._target.link.address, error.reason)
            self._failed_targets.append(self._target.link.address)
            lost, self._target = self._target, None
            lost.close(self._committed_len)
            num_output = self._tokens.end - self._opened_len
            self._losses.note(error, lost.incarnation, num_output, was_open=lost.was_lost)
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if isinstance(error, _FINAL) or now - self._failing_since > self._settings.failover_timeout_s:
            raise error
        self._span.add_event("target_lost", {"outrider.reason": error.reason})
        _LOG.warning("target lost, going on elsewhere", extra={"reason": error.reason})

    def _verify_open(self) -> target_pb2.VerifyOpen:
        return target_pb2.VerifyOpen(
            session_id=self._record.worker_key,
            fencing_token=self._lease.fencing_token,
            parameters=wire.parameters_to_message(self._record.parameters),
            acceptance_rule=wire.rule_to_number(self._record.rule),
            prompt_len=self._record.prompt_len,
            committed_len=self._tokens.end,
            stop_token_ids=self._stop_token_ids,
            speculation=self._speculation_settings(),
            window_end=self._tokens.end + self._window,
            cache_salt=self._record.cache_salt,
            feature_layers=self._draft.feature_layers if self._draft else (),
            request_id=self._record.request_id,
            traceparent=traceparent_of(self._span),
        )

    def _speculation_settings(self) -> target_pb2.SpeculationSettings:
        """Returns what a round waits for; nothing while no draft is ready."""
        draft = self._draft if self._draft is not None and self._draft.is_ready else None
        if draft is None and not self._target_drafts:
            return target_pb2.SpeculationSettings()
        return target_pb2.SpeculationSettings(
            num_speculative_tokens=self._choice.num_speculative_tokens,
            max_wait_s=self._choice.max_wait_s,
            lookahead=0 if draft is None or self._target_drafts else draft.lookahead,
            draft_min=self._choice.draft_min,
            own_draft=self._target_drafts,
        )

    @property
    def _target_drafts(self) -> bool:
        """Whether the target drafts for itself, as the request wants it."""
        info = self._target.link.info if self._target else None
        return info is not None and bool(info.drafter) and self._choice.drafter in ("", info.drafter)

    def _attach_draft(self) -> None:
        """Opens the session on a draft, if it is to have one, has none, and there is one; never waits."""
        if not self._choice.num_speculative_tokens or self._draft or self._target_drafts:
            return
        if time.monotonic() < self._draft_retry_at:
            return
        self._draft_retry_at = time.monotonic() + self._settings.draft_retry_s
        link = self._replicas.draft(self._choice.drafter, self._record.rule)
        if link is None:
            self._tally.fallback("no_draft")
            return
        draft = DraftSession(
            link,
            self._choice,
            self._on_proposal,
            self._on_draft_ready,
            self._on_draft_lost,
            self._ask_features,
            self._tokens.read_from,
        )
        try:
            draft.open(self._draft_open(), self._committed_len)
        except Unavailable:
            self._tally.fallback("no_draft")
            return
        self._draft, self._draft_is_proved = draft, False
        self._span.add_event("draft", {"server.address": link.address})

    def _draft_open(self) -> draft_pb2.DraftOpen:
        target = self._target.link.info if self._target else None
        return draft_pb2.DraftOpen(
            session_id=self._record.worker_key,
            fencing_token=self._lease.fencing_token,
            parameters=wire.parameters_to_message(self._record.parameters),
            acceptance_rule=wire.rule_to_number(self._record.rule),
            prompt_len=self._record.prompt_len,
            tokenizer_fingerprint=target.tokenizer_fingerprint if target else "",
            target_fingerprint=target.weights_fingerprint if target else "",
            stop_token_ids=self._stop_token_ids,
            cache_salt=self._record.cache_salt,
            draft_p_min=self._choice.draft_p_min,
            request_id=self._record.request_id,
            traceparent=traceparent_of(self._span),
        )

    # What clients see.

    def _delta(self, batch: _Batch) -> generation_pb2.GenerateResponse:
        offset = self._committed_len - len(batch.token_ids) - self._record.prompt_len
        return generation_pb2.GenerateResponse(
            delta=generation_pb2.Delta(
                offset=offset,
                token_ids=batch.token_ids,
                text=batch.text,
                origins=batch.origins,
                logprobs=batch.logprobs,
            )
        )

    def _finished(self, batch: _Batch) -> generation_pb2.GenerateResponse:
        return generation_pb2.GenerateResponse(
            finished=generation_pb2.Finished(
                finish_reason=wire.finish_to_number(batch.finish_reason),
                num_output_tokens=self._committed_len - self._record.prompt_len,
                text=self._output.finish(stopped=batch.stopped),
                statistics=self._tally.message(),
            )
        )
