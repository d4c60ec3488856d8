"""One request, from its lease to its terminal event; the flow is the one of docs/architecture.md.

Frames come in by callbacks that never wait: a verdict goes on to the draft at once, a proposal to the target. One
coroutine (`events`) takes the verdicts that have come, commits their tokens together, and only then emits them.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

from orchestrator.draft_session import DraftSession
from orchestrator.output import OutputText
from orchestrator.replicas import Replicas
from orchestrator.sessions import Lease, SessionRecord
from orchestrator.settings import OrchestratorSettings
from orchestrator.store import SessionStore
from orchestrator.target_session import TargetSession
from outrider import wire
from outrider.errors import Fenced, InvalidArgument, OutriderError, SessionNotFound, Unavailable
from outrider.parameters import FinishReason
from outrider.statistics import SpeculationStatistics
from outrider.tokens import TokenSpan
from outrider.v1 import draft_pb2, generation_pb2, target_pb2, tokens_pb2

_LOG: Final = logging.getLogger(__name__)
_MAX_FAILOVERS: Final = 8
_TRIAL_STRIDE: Final = 8
"""Tokens between the proposals that a session asks for while its target does not wait for them."""


@dataclass(frozen=True, slots=True)
class Services:
    """What every generation uses."""

    store: SessionStore
    replicas: Replicas
    settings: OrchestratorSettings


@dataclass(frozen=True, slots=True)
class SpeculationChoice:
    """How a request speculates: tokens per round (0 for none), and the drafter (empty for any)."""

    num_speculative_tokens: int
    drafter: str


@dataclass(slots=True)
class _Batch:
    """Output that is committed and emitted together."""

    token_ids: list[int] = field(default_factory=list)
    origins: list[tokens_pb2.TokenOrigin.ValueType] = field(default_factory=list)
    logprobs: list[tokens_pb2.TokenLogprobs] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stopped: bool = False


class SessionTokens:
    """A session's tokens from some position on; earlier ones are read from the log when they are needed.

    Args:
        store: has the log.
        record: the session.
        start: position of the first of `token_ids`.
        token_ids: tokens up to the session's end.
    """

    def __init__(self, store: SessionStore, record: SessionRecord, start: int, token_ids: list[int]) -> None:
        self._store = store
        self._record = record
        self._start = start
        self._token_ids = token_ids

    @property
    def end(self) -> int:
        """The session's length, uncommitted tokens included."""
        return self._start + len(self._token_ids)

    def append(self, token_ids: list[int]) -> None:
        """Adds output."""
        self._token_ids += token_ids

    def since(self, start: int) -> TokenSpan:
        """Returns what is at hand from a position on; begins later where earlier tokens are not at hand."""
        start = max(start, self._start)
        return TokenSpan(start, tuple(self._token_ids[start - self._start :]))

    async def read_from(self, start: int) -> tuple[int, ...]:
        """Returns all tokens from a position on."""
        if start < self._start:
            record = self._record
            earlier = await self._store.read_tokens(record.tenant, record.session_id, start, self._start)
            if len(earlier) != self._start - start:
                raise Unavailable("the token log could not be read")
            self._start, self._token_ids = start, earlier + self._token_ids
        return tuple(self._token_ids[start - self._start :])


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
    ) -> None:
        self._store, self._replicas, self._settings = services.store, services.replicas, services.settings
        self._record = record
        self._lease = lease
        self._tokens = tokens
        self._output = output
        self._choice = choice
        self._stop_token_ids = stop_token_ids
        self._committed_len = record.committed_len
        self._target: TargetSession | None = None
        self._target_error: OutriderError | None = None
        self._failed_targets: list[str] = []
        self._draft: DraftSession | None = None
        self._draft_retry_at = 0.0
        self._verdicts: list[target_pb2.Verdict] = []
        self._wake = asyncio.Event()
        self._is_over = False
        self._is_finished = False
        self._started = time.monotonic()
        self._first_token_s = 0.0
        self._target_time_s = 0.0
        self._wait_time_s = 0.0
        self._num_emitted = 0
        self._statistics = SpeculationStatistics()
        self._fallbacks: Counter[str] = Counter()

    async def events(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Yields deltas, then the terminal event.

        Raises:
            Fenced: somebody else continues the session.
            Unavailable: Redis or every target is out of reach; the session is resumable.
            OutriderError: what else ends the stream; the session is resumable.
        """
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

    def close(self) -> "asyncio.Task[None] | None":
        """Frees both workers; the task gives back the lease of a request that has not ended."""
        self._is_over = True
        if self._draft is not None:
            self._draft.close()
        if self._target is not None:
            self._target.close(self._committed_len)
        return None if self._is_finished else asyncio.create_task(self._release())

    async def _release(self) -> None:
        try:
            await self._store.release(self._lease)
        except OutriderError as error:
            # The lease ends by itself.
            _LOG.warning("lease not given back", extra={"reason": error.reason})

    # Commit before emit.

    async def _next_batch(self) -> _Batch | None:
        """Returns output to commit; None when there is none yet. Attaches targets, renews the lease."""
        if self._verdicts:
            return self._absorb()
        if self._target_error is not None:
            self._drop_target(self._target_error)
        if self._target is None:
            await self._attach_target()
        self._attach_draft()
        if not self._verdicts and not self._target_error:
            await self._wait()
        return None

    async def _wait(self) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(self._settings.lease_s / 3):
                await self._wake.wait()
        except TimeoutError:
            if await self._store.renew(self._lease):
                self._verdicts.append(_cancellation())

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
            self._count(verdict, num)
            batch.stopped = absorbed.stopped
            batch.finish_reason = (
                FinishReason.STOP if absorbed.stopped else wire.finish_from_number(verdict.finish_reason)
            )
            if batch.finish_reason is not None:
                break
        return batch

    async def _commit(self, batch: _Batch) -> None:
        if self._first_token_s == 0.0 and batch.token_ids:
            self._first_token_s = time.monotonic() - self._started
        replica = self._target.replica if self._target else ""
        committed = await self._store.append(
            self._lease, self._committed_len, batch.token_ids, batch.finish_reason, replica
        )
        self._committed_len = committed.length
        if committed.cancelled and batch.finish_reason is None:
            batch.finish_reason = FinishReason.CANCELLED
            await self._store.append(self._lease, self._committed_len, (), FinishReason.CANCELLED, replica)
        if self._target is not None and batch.finish_reason is None:
            self._target.move_window(self._committed_len, self._committed_len + self._settings.window)

    def _count(self, verdict: target_pb2.Verdict, num_tokens: int) -> None:
        if not verdict.token_ids:
            return
        num_accepted = min(verdict.num_accepted_tokens, num_tokens)
        self._statistics.record(verdict.num_draft_tokens, num_accepted, num_tokens)
        self._target_time_s += verdict.model_time_s
        self._wait_time_s += verdict.wait_time_s
        if self._draft is not None and self._draft.is_ready and verdict.num_nodes == 0:
            self._fallbacks["no_proposal"] += 1

    # What workers say; called in the event loop, never waits.

    def _on_verdict(self, verdict: target_pb2.Verdict) -> None:
        base = verdict.base
        if self._is_over or base.fencing_token != self._lease.fencing_token or base.len != self._tokens.end:
            return
        self._tokens.append(list(verdict.token_ids))
        self._verdicts.append(verdict)
        if self._draft is not None and not verdict.finish_reason:
            self._advance_draft(self._draft, awaited=verdict.awaits_proposal)
        self._wake.set()

    def _advance_draft(self, draft: DraftSession, *, awaited: bool) -> None:
        """Asks for a proposal where the target waits for it; else now and then, so that it learns when waiting pays."""
        if awaited or self._tokens.end - draft.known_len >= _TRIAL_STRIDE:
            draft.advance(self._tokens.since(draft.known_len))

    def _on_target_error(self, error: OutriderError) -> None:
        self._target_error = error
        self._wake.set()

    def _on_proposal(self, proposal: tokens_pb2.Proposal) -> None:
        # Late ones are forwarded too: the target learns from them whether waiting would pay.
        if self._target is not None and proposal.base.fencing_token == self._lease.fencing_token:
            self._target.propose(proposal)

    def _on_draft_ready(self) -> None:
        if self._target is not None:
            self._target.speculate(self._choice.num_speculative_tokens, self._settings.draft_max_wait_s)

    def _on_draft_lost(self, draft: DraftSession, error: OutriderError) -> None:
        self._fallbacks[f"draft_{error.reason.lower()}"] += 1
        self._replicas.rest(draft.link)
        self._draft = None
        self._draft_retry_at = time.monotonic() + self._settings.draft_retry_s
        if self._target is not None:
            self._target.speculate(0, 0.0)

    # Workers come and go.

    async def _attach_target(self) -> None:
        """Opens the request on a target; on a failure the next call tries another one."""
        link = await self._replicas.target(self._record.target, self._failed_targets)
        target = TargetSession(link, self._on_verdict, self._on_target_error, self._tokens.read_from)
        self._target, self._target_error = target, None
        try:
            await target.open(self._verify_open())
        except OutriderError as error:
            self._target_error = error

    def _drop_target(self, error: OutriderError) -> None:
        """Decides whether another target may go on; raises the error where none may."""
        self._target_error = None
        if self._target is not None:
            self._failed_targets.append(self._target.link.address)
            self._target.close(self._committed_len)
            self._target = None
        if isinstance(error, Fenced | InvalidArgument | SessionNotFound) or len(self._failed_targets) > _MAX_FAILOVERS:
            raise error
        _LOG.warning("target lost, going on elsewhere", extra={"reason": error.reason})

    def _verify_open(self) -> target_pb2.VerifyOpen:
        is_ready = self._draft is not None and self._draft.is_ready
        return target_pb2.VerifyOpen(
            session_id=self._record.worker_key,
            fencing_token=self._lease.fencing_token,
            parameters=wire.parameters_to_message(self._record.parameters),
            acceptance_rule=wire.rule_to_number(self._record.rule),
            prompt_len=self._record.prompt_len,
            committed_len=self._tokens.end,
            stop_token_ids=self._stop_token_ids,
            speculation=target_pb2.SpeculationSettings(
                num_speculative_tokens=self._choice.num_speculative_tokens if is_ready else 0,
                max_wait_s=self._settings.draft_max_wait_s,
            ),
            window_end=self._tokens.end + self._settings.window,
        )

    def _attach_draft(self) -> None:
        """Opens the session on a draft, if it is to have one, has none, and there is one; never waits."""
        if not self._choice.num_speculative_tokens or self._draft or time.monotonic() < self._draft_retry_at:
            return
        self._draft_retry_at = time.monotonic() + self._settings.draft_retry_s
        link = self._replicas.draft(self._choice.drafter)
        if link is None:
            self._fallbacks["no_draft"] += 1
            return
        draft = DraftSession(
            link,
            self._choice.num_speculative_tokens,
            self._on_proposal,
            self._on_draft_ready,
            self._on_draft_lost,
            self._tokens.read_from,
        )
        try:
            draft.open(self._draft_open(), self._committed_len)
        except Unavailable:
            self._fallbacks["no_draft"] += 1
            return
        self._draft = draft

    def _draft_open(self) -> draft_pb2.DraftOpen:
        target = self._target.link.info if self._target else None
        return draft_pb2.DraftOpen(
            session_id=self._record.worker_key,
            fencing_token=self._lease.fencing_token,
            parameters=wire.parameters_to_message(self._record.parameters),
            acceptance_rule=wire.rule_to_number(self._record.rule),
            prompt_len=self._record.prompt_len,
            tokenizer_fingerprint=target.tokenizer_fingerprint if target else "",
            stop_token_ids=self._stop_token_ids,
        )

    # What clients see.

    def _delta(self, batch: _Batch) -> generation_pb2.GenerateResponse:
        offset = self._committed_len - len(batch.token_ids) - self._record.prompt_len
        self._num_emitted += len(batch.token_ids)
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
        duration_s = time.monotonic() - self._started
        decoding_s = duration_s - self._first_token_s
        statistics = self._statistics
        return generation_pb2.GenerateResponse(
            finished=generation_pb2.Finished(
                finish_reason=wire.finish_to_number(batch.finish_reason),
                num_output_tokens=self._committed_len - self._record.prompt_len,
                text=self._output.finish(stopped=batch.stopped),
                statistics=generation_pb2.GenerationStatistics(
                    num_drafts=statistics.num_drafts,
                    num_draft_tokens=statistics.num_draft_tokens,
                    num_accepted_tokens=statistics.num_accepted_tokens,
                    num_accepted_tokens_per_pos=statistics.num_accepted_tokens_per_pos,
                    num_target_passes=statistics.num_target_passes,
                    time_to_first_token_s=self._first_token_s,
                    duration_s=duration_s,
                    target_time_s=self._target_time_s,
                    wait_time_s=self._wait_time_s,
                    num_fallbacks=self._fallbacks,
                    tokens_per_second=(self._num_emitted - 1) / decoding_s if self._num_emitted > 1 else 0.0,
                ),
            )
        )


def _cancellation() -> target_pb2.Verdict:
    return target_pb2.Verdict(finish_reason=tokens_pb2.FINISH_REASON_CANCELLED)
