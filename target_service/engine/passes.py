"""Runs passes over the shares that the scheduler made, judges their proposals, and holds the verdicts for streams.

Any exception that one session causes ends that session, and nothing else. A pass that fails is run again in halves,
down to the session that fails alone; before that one is refused a probe shows whether the model runs at all. So no
session is blamed for a device that fails, and no process ends because of a session.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from outrider.control.pass_times import PassTimes
from outrider.control.policy import WorkerStatistics
from outrider.lm.model import LanguageModel, joined
from outrider.serving.unexpected import UnexpectedErrors
from target_service.engine.conclusion import RoundTimes, conclude
from target_service.engine.counters import EngineLoad
from target_service.engine.features import FeatureSender
from target_service.engine.interface import EngineHost
from target_service.engine.request import Request
from target_service.engine.requests import Requests
from target_service.engine.restoring import Restoring
from target_service.engine.results import Progress, RoundResult
from target_service.engine.rounds import Round, decide_all
from target_service.engine.scheduling import Scheduler, Share, prepared_again

_LEAST_DECODING: Final = 0.75
"""Of the open sessions, so many have to decode in a pass that shows the times of this number of sessions."""


class Passes:
    """Runs passes; see the module. All methods are called in the engine's thread.

    Args:
        model: the target.
        scheduler: makes their shares.
        statistics: of speculation; its times and guards observe each pass.
        requests: those that are open.
        features: sends the features that drafts request.
        restoring: writes the pages that passes complete; None where nothing is written.
        load: counters.
        max_len: longest session, in tokens.

    Attributes:
        host: applies gentle commands, and ends requests that fail.
        on_pass: called with the seconds of each pass.
        last_s: seconds that the last pass took.
    """

    host: EngineHost[Request]

    def __init__(
        self,
        model: LanguageModel,
        scheduler: Scheduler,
        statistics: WorkerStatistics,
        requests: Requests,
        features: FeatureSender,
        restoring: Restoring | None,
        load: EngineLoad,
        max_len: int,
    ) -> None:
        self._model = model
        self._scheduler = scheduler
        self._times: PassTimes = statistics.times
        self._statistics = statistics
        self._requests = requests
        self._features = features
        self._restoring = restoring
        self._load = load
        self._max_len = max_len
        self._unexpected = UnexpectedErrors()
        self.on_pass: Callable[[float], object] = lambda seconds: None
        self.last_s = 0.0
        self._num_sessions = 1
        self._num_tokens: dict[int, int] = {}

    def run(self, shares: list[Share]) -> None:
        """Run a pass over the shares, and send the verdicts.

        Raises:
            EngineFailed: the model runs no pass any more.
        """
        expected_s = self._expected_s(shares)
        started = time.perf_counter()
        try:
            outputs = self._model.forward([share.step for share in shares])
        except Exception as error:
            self._divide(shares, error)
            return
        duration_s = time.perf_counter() - started
        self._account(shares, duration_s)
        self.on_pass(duration_s)
        self.host.apply_gentle()
        judged = [(share, logits) for share, logits in zip(shares, outputs, strict=True) if share.step.wants_logits]
        for share, result in self._judge(judged):
            if not share.is_prefill:
                self._num_tokens[share.request.number] = len(result.token_ids)
            try:
                self._conclude(share, result, duration_s, expected_s)
            except Exception as error:
                self.host.fail_request(share.request, error)
        self._observe_times(shares)
        for share in shares:
            if not share.step.wants_logits:
                self._go_on(share.request)
        for stream in dict.fromkeys(share.request.handle.stream for share in shares):
            stream.flush()
        self._write_behind()

    def _observe_times(self, shares: Sequence[Share]) -> None:
        prompts = [(share.step.num_rows, share.step.span.start) for share in shares if share.is_prefill]
        prompts_s = sum(self._times.prefill_s(*prompt) for prompt in prompts)
        shows_times = len(self._num_tokens) >= _LEAST_DECODING * self._num_sessions and math.isfinite(prompts_s)
        now, terms = time.monotonic(), [share.request.speculation.terms for share in shares]
        for own_draft in (False, True):
            can_speculate = any(item.num_speculative_tokens and item.own_draft is own_draft for item in terms)
            guard = self._statistics.guard_of(own_draft=own_draft)
            guard.observe(now, self._num_tokens, counts=can_speculate and shows_times, prompts_s=prompts_s)

    def _divide(self, shares: list[Share], error: Exception) -> None:
        """Run the halves of a pass that failed; the session that fails alone ends alone."""
        if len(shares) == 1:
            self.host.fail_request(shares[0].request, error)
            return
        request_ids = [share.request.request_id for share in shares]
        self._unexpected.log("a pass failed, and is run again in halves", error, request_ids=request_ids)
        again = prepared_again(shares)
        middle = len(again) // 2
        for part in (again[:middle], again[middle:]):
            if part:
                self.run(part)

    def _go_on(self, request: Request) -> None:
        """Conclude a part of a prompt."""
        try:
            self._features.send(request)
            request.handle.stream.hold(Progress(request.handle.number, request.resident.cache.cached_len))
        except Exception as error:
            self.host.fail_request(request, error)
        request.round_started = time.monotonic()

    def _write_behind(self) -> None:
        """Have the pages that the pass completed written; a failure costs the blocks, and no session."""
        if self._restoring is None:
            return
        try:
            self._restoring.write_behind()
        except Exception as error:
            self._unexpected.log("KV blocks could not be written", error)

    def _judge(self, judged: list[tuple[Share, torch.Tensor]]) -> list[tuple[Share, RoundResult]]:
        """Return the results of all shares together; where that fails, of those that do not fail by themselves."""
        if not judged:
            return []
        try:
            rounds, first = [], 0
            for share, logits in judged:
                rounds.append(Round(share.request, first, share.tree, share.masks))
                first += len(logits)
            results = decide_all(rounds, joined([logits for _, logits in judged]), self._max_len)
            return list(zip((share for share, _ in judged), results, strict=True))
        except Exception as error:
            if len(judged) == 1:
                self.host.fail_request(judged[0][0].request, error)
                return []
        middle = len(judged) // 2
        return self._judge(judged[:middle]) + self._judge(judged[middle:])

    def _expected_s(self, shares: Sequence[Share]) -> float:
        """Return the seconds that a round of this pass is expected to take; 0 with prompts in it, or no measurement."""
        if not self._times.known or any(share.is_prefill for share in shares):
            return 0.0
        num_rows = sum(share.step.num_rows for share in shares)
        return self._times.round_s(num_rows, speculates=any(share.request.speculation.waits for share in shares))

    def _conclude(self, share: Share, result: RoundResult, duration_s: float, expected_s: float) -> None:
        """Apply a round's result to the session, and hold the verdict for its stream."""
        request = share.request
        request.resident.cache.keep(result.kept_path)
        times = RoundTimes(duration_s, share.wait_s, share.queue_s, expected_s, share.is_prefill)
        verdict, failure = conclude(request, result, times, self._load)
        # Before the verdict, so that the next proposal need not wait for them.
        self._features.send(request)
        request.handle.stream.hold(verdict)
        if failure is not None:
            raise failure

    def _account(self, shares: list[Share], duration_s: float) -> None:
        load = self._load
        load.num_passes += 1
        load.model_time_s += duration_s
        load.num_tokens += sum(share.step.num_rows for share in shares)
        load.num_active_sessions = len(self._requests)
        load.num_preemptions = self._scheduler.num_preemptions
        for share in shares:
            share.request.num_recomputed += share.num_recomputed
        prefill = [(share.step.num_rows, share.step.span.start) for share in shares if share.is_prefill]
        num_decode = sum(share.step.num_rows for share in shares if not share.is_prefill)
        self._times.observe(duration_s, num_decode, prefill)
        self.last_s = duration_s
        self._count_sessions(shares)

    def _count_sessions(self, shares: list[Share]) -> None:
        """Have the next rounds be planned for the sessions that there are; before they begin."""
        taking_part = {share.request.number: not share.is_prefill for share in shares}
        unfinished = [request for request in self._requests.open_ones if not request.finished]
        # Those that decode have one token to run.
        decoding = [item for item in unfinished if taking_part.get(item.number, item.num_uncached == 1)]
        self._num_tokens = {request.number: 0 for request in decoding}
        self._num_sessions = max(1, len(unfinished))
        self._times.num_sessions = max(1, len(decoding))
        for own_draft in (False, True):
            self._statistics.guard_of(own_draft=own_draft).count(self._num_sessions)
