"""The target's engine: one thread that owns the model and all sessions, and runs pass after pass.

A pass takes every session that is ready (see `scheduling`): rounds whose proposal is whole, or whose wait for it is
over, and chunks of prompts. It waits a little for sessions that are about to be ready where that pays. Commands come
from the event loop through a queue; what the engine has to say goes out through each stream's `emit`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

import torch

from outrider.errors import Draining, OutriderError
from outrider.experience import Experience
from outrider.lm.model import LanguageModel
from outrider.pass_times import PassTimes
from target_service.colocated import ColocatedDraft
from target_service.counters import EngineLoad
from target_service.features import FeatureSender
from target_service.remote_blocks import RemoteBlocks
from target_service.requests import Requests
from target_service.restoring import Restoring, measure_prefill, num_measured_rows
from target_service.results import RoundAbout, RoundResult
from target_service.rounds import Round, decide_all
from target_service.scheduling import Scheduler, Share
from target_service.sessions import Request
from target_service.settings import TargetSettings

_LOG: Final = logging.getLogger(__name__)
_FLUSH_S: Final = 2.0


class Engine:
    """Runs the model for all sessions of this process; see the module.

    Args:
        model: the target.
        settings: limits and defaults.
        blocks: its KV blocks in Redis; None where there are none.
        draft: drafts within this process; None where none does.
        on_failure: called, in the engine's thread, when an error that is no session's ends it.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: TargetSettings,
        blocks: RemoteBlocks | None = None,
        draft: ColocatedDraft | None = None,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        self._model = model
        self._blocks = blocks
        self._draft = draft
        self._settings = settings
        self._on_failure = on_failure
        self.on_pass: Callable[[float], object] = lambda seconds: None
        """Called, in the engine's thread, with the seconds of each pass; set it before `start`."""
        self.max_len = min(model.info.max_session_len, settings.max_session_len, model.kv_usage.max_len)
        """Longest session in tokens: what the model, the settings and the KV cache allow."""
        experience = Experience(PassTimes(model.info.pass_sizes))
        self._times = experience.times
        # What is verified is chosen by measured times, where it may be.
        times = self._times if settings.adaptive_speculation else PassTimes(model.info.pass_sizes)
        self._scheduler = Scheduler(
            settings.max_pass_rows, settings.prefill_chunk_len, settings.max_decode_slowdown, times
        )
        self._commands: deque[tuple[Callable[[], None], bool]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._restoring = None
        if blocks is not None:
            self._restoring = Restoring(
                blocks, self._scheduler.budget, self.submit, lambda request: self.requests.is_open(request)
            )
        self.load = EngineLoad()
        self._features = FeatureSender(model, self.load, self.max_len)
        self.requests = Requests(
            model,
            settings,
            experience,
            self.load,
            self._features,
            self._restore,
            self.max_len,
        )

    def start(self) -> None:
        """Starts the thread; before that measures what prompts take, where KV blocks are compared with it."""
        if self._blocks is not None:
            num_rows = num_measured_rows(self._blocks.block_len, min(self.max_len, self._settings.max_pass_rows))
            measure_prefill(self._model, self._scheduler.budget, num_rows)
            self._blocks.start()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the pass it is in."""
        self._stopping = True
        self.submit(lambda: None)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def busy_s(self) -> float:
        """Seconds that the pass, or whatever the thread does now, has taken; 0 while it waits. From any thread."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def submit(self, command: Callable[[], None], *, is_gentle: bool = False) -> None:
        """Has the engine's thread run a command before its next pass. From any thread.

        A gentle one, which ends no request and changes no tokens, is also run before a pass's verdicts are given.
        """
        with self._wake:
            self._commands.append((command, is_gentle))
            self._wake.notify()

    @property
    def drafter(self) -> str:
        """Name of the drafter of this process; empty where there is none."""
        return self._draft.kind if self._draft is not None else ""

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self.requests.is_draining

    @property
    def num_requests(self) -> int:
        """Requests that are open now."""
        return len(self.requests)

    @property
    def blocks(self) -> RemoteBlocks | None:
        """Its KV blocks in Redis."""
        return self._blocks

    def flush_blocks(self) -> None:
        """Returns when all KV blocks that wait are written, or after a second or two. From any thread."""
        if self._blocks is not None:
            self._blocks.flush(_FLUSH_S)

    def drain(self) -> Future[None]:
        """Refuses new requests from now on; the future is done once none is open. From any thread."""
        self.requests.is_draining = True
        self.submit(self.requests.notice_idle)
        return self.requests.idle

    # What follows runs in the engine's thread only.

    def hand_over(self) -> None:
        """Refuses what still runs, so that it goes on at another target, which finds its KV blocks."""
        self.flush_blocks()
        self.requests.refuse_all(Draining("this target is shutting down"))

    def _restore(self, request: Request) -> None:
        if self._restoring is not None:
            self._restoring.begin(request)

    def _run(self) -> None:
        try:
            self._turn_until_stopped()
        except Exception:
            _LOG.exception("the engine failed")
            self._on_failure()

    def _turn_until_stopped(self) -> None:
        while not self._stopping:
            self._busy_since = time.monotonic()
            self._run_commands()
            self.requests.expire()
            if self._draft is not None:
                self._draft.step(self.requests.open_ones)
                if self._draft.is_busy:
                    # A pass now would be one without the sessions that are being drafted for, and they would have
                    # the next one for themselves: two passes for what one does.
                    continue
            shares = self._scheduler.shares(self.requests.open_ones, time.monotonic())
            if shares:
                self._run_pass(shares)
            else:
                self._sleep()
        # Streams that were cut at the end still have requests to end.
        self._run_commands()

    def _run_commands(self, *, only_gentle: bool = False) -> None:
        while True:
            with self._wake:
                if not self._commands or (only_gentle and not self._commands[0][1]):
                    return
                command, _ = self._commands.popleft()
            command()

    def _sleep(self) -> None:
        """Waits for a command, for the first wait for a proposal to be over, or for a session to get too old."""
        self._note_waiting()
        now = time.monotonic()
        until = self._scheduler.next_time(self.requests.open_ones, now)
        waits = (None if until is None else max(0.0, until - now), self.requests.next_expiry_s())
        timeout = min((wait_s for wait_s in waits if wait_s is not None), default=None)
        self._busy_since = None
        with self._wake:
            if not self._commands and not self._stopping:
                self._wake.wait(timeout)

    def _run_pass(self, shares: list[Share]) -> None:
        expected_s = self._expected_s(shares)
        started = time.perf_counter()
        try:
            outputs = self._model.forward([share.step for share in shares])
        except Exception as error:
            self._fail(shares, error)
            return
        duration_s = time.perf_counter() - started
        self._account(shares, duration_s)
        self.on_pass(duration_s)
        self._run_commands(only_gentle=True)
        judged = [(share, logits) for share, logits in zip(shares, outputs, strict=True) if share.step.wants_logits]
        results = self._judge(judged)
        for share, result in results:
            self._conclude(share, result, duration_s, expected_s)
        for share in shares:
            if not share.step.wants_logits:
                self._features.send(share.request)
                share.request.round_started = time.monotonic()
        for stream in {share.request.stream.key: share.request.stream for share in shares}.values():
            stream.flush()
        if self._restoring is not None:
            self._restoring.write_behind()

    def _judge(self, judged: list[tuple[Share, torch.Tensor]]) -> list[tuple[Share, RoundResult]]:
        """Returns the results of all shares together; where that fails, of those that do not fail by themselves."""
        if not judged:
            return []
        try:
            rounds, first = [], 0
            for share, logits in judged:
                rounds.append(Round(share.request, first, share.tree))
                first += len(logits)
            results = decide_all(rounds, torch.cat([logits for _, logits in judged]), self.max_len)
            return list(zip((share for share, _ in judged), results, strict=True))
        except ValueError as error:
            if len(judged) == 1:
                self._fail([judged[0][0]], error)
                return []
        return [result for one in judged for result in self._judge([one])]

    def _expected_s(self, shares: Sequence[Share]) -> float:
        """Returns what a pass and all around it is expected to take; 0 where prompts take part, or nothing is known."""
        if not self._times.known or any(share.is_prefill for share in shares):
            return 0.0
        num_rows = sum(share.step.num_rows for share in shares)
        return self._times.round_s(num_rows, speculates=any(share.request.speculation.waits for share in shares))

    def _conclude(self, share: Share, result: RoundResult, duration_s: float, expected_s: float) -> None:
        """Applies a round's result to the session, and sends the verdict."""
        request, resident = share.request, share.request.resident
        base = request.base
        resident.cache.keep(result.kept_path)
        resident.token_ids += result.token_ids
        request.finished = result.finish_reason is not None
        speculation = request.speculation
        waited = speculation.waits
        now = time.monotonic()
        if not share.is_prefill:
            rest_s = speculation.lasted_s(now) - share.wait_s - share.queue_s - duration_s
            speculation.observe(result.num_accepted, result.num_draft_tokens, result.num_nodes, share.wait_s, rest_s)
        expected_s += speculation.expected_wait_s if expected_s else 0.0
        hit = speculation.advance(result.token_ids)
        request.begin_round(now)
        speculation.note_verdict(len(resident.token_ids), now)
        # Before the verdict, so that its answer need not wait for them.
        self._features.send(request)
        about = RoundAbout(
            model_time_s=duration_s,
            wait_time_s=share.wait_s,
            queue_time_s=share.queue_s,
            expected_time_s=expected_s,
            num_recomputed=request.num_recomputed,
            hit=hit,
            num_proposed=speculation.num_proposed,
            num_wanted=speculation.num_wanted,
            lookahead_nodes=speculation.terms.lookahead_nodes if speculation.wants_draft else 0,
        )
        self.load.note_round(result, about, waited=waited, does_without=speculation.does_without)
        if not request.sums.num_rounds:
            request.span.add_event("first_token")
        request.sums.add(result, about)
        request.num_recomputed = speculation.num_proposed = 0
        request.stream.verdict(request.handle, base, result, about)

    def _account(self, shares: list[Share], duration_s: float) -> None:
        load = self.load
        load.num_passes += 1
        load.model_time_s += duration_s
        load.num_tokens += sum(share.step.num_rows for share in shares)
        load.num_active_sessions = len(self.requests)
        load.num_preemptions = self._scheduler.num_preemptions
        for share in shares:
            share.request.num_recomputed += share.num_recomputed
        prefill = [(share.step.num_rows, share.step.span.start) for share in shares if share.is_prefill]
        num_decode = sum(share.step.num_rows for share in shares if not share.is_prefill)
        self._scheduler.budget.observe(num_decode, prefill, duration_s)
        if not prefill:
            self._times.observe(duration_s, num_decode)
        self._times.num_sessions = max(1, len(self.requests) - len(prefill))
        self._note_waiting()

    def _note_waiting(self) -> None:
        self.load.num_cached_sessions = self.requests.num_residents
        self.load.note_waiting(request.num_uncached for request in self.requests.open_ones if not request.finished)

    def _fail(self, shares: list[Share], error: Exception) -> None:
        """Ends the requests of a pass that failed, whose caches can no longer be trusted; the process lives on."""
        about = {"request_ids": [share.request.request_id for share in shares]}
        _LOG.error("a pass failed", exc_info=error, extra=about)
        for share in shares:
            self.requests.abandon(share.request, OutriderError("the pass failed"))
