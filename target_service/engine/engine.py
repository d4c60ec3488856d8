"""The target's engine: it owns the model and all sessions, and runs pass after pass.

A pass takes every session that is ready (see `scheduling`): rounds whose proposal is complete or whose wait for it is
over, and chunks of prompts. It is delayed a little for sessions that are about to be ready where that pays. Results go
to the stream of each request.

Any exception that one session causes ends that session, and nothing else (see `passes`): only a model that runs no pass
any more ends the engine.
"""

import functools
import time
from collections.abc import Callable
from typing import Final

from outrider.control.pass_times import PassTimes
from outrider.control.policy import WorkerStatistics
from outrider.errors import OutriderError, Overloaded
from outrider.grammar.compiler import GrammarCompiler
from outrider.lm.model import LanguageModel
from outrider.lm.pages import KVUsage
from outrider.serving.unexpected import UnexpectedErrors
from target_service.engine.colocated import ColocatedDraft
from target_service.engine.commands import Open, RequestCommand
from target_service.engine.constraints import Constraints
from target_service.engine.counters import EngineLoad
from target_service.engine.features import FeatureSender
from target_service.engine.identity import KVBlockUsage
from target_service.engine.interface import EngineHost
from target_service.engine.pass_budget import PassBudget
from target_service.engine.passes import Passes
from target_service.engine.probe import probe
from target_service.engine.request import Request
from target_service.engine.requests import Requests
from target_service.engine.restoring import Restoring, measure_passes
from target_service.engine.scheduling import MAX_PASS_ROWS, PREFILL_CHUNK_LEN, Scheduler, Share
from target_service.kv_blocks.remote_blocks import RemoteBlocks
from target_service.settings import TargetSettings

_FLUSH_S: Final = 2.0


class Engine:
    """A `TargetEngine` that runs a `LanguageModel` for all sessions of this process; see the module.

    Args:
        model: the target.
        settings: limits and defaults.
        blocks: its KV blocks in Redis; None where there are none.
        draft: drafts within this process; None where none does.
        compiler: of constraints; None where the model has no tokenizer.

    Attributes:
        host: the frontend, once it has attached itself.
        max_len: longest session in tokens that the model, the settings and the KV cache allow.
        load: counters.
        requests: those that are open.
        blocks: as given.
    """

    host: EngineHost[Request]

    def __init__(
        self,
        model: LanguageModel,
        settings: TargetSettings,
        blocks: RemoteBlocks | None = None,
        draft: ColocatedDraft | None = None,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        self._model = model
        self._draft = draft
        self._unexpected = UnexpectedErrors()
        self.blocks = blocks
        self.load = EngineLoad()
        self.max_len = min(model.info.max_session_len, settings.max_session_len, model.kv_usage.max_len)
        statistics = WorkerStatistics(PassTimes(model.info.padded_sizes))
        self._times = statistics.times
        # The nodes to verify are chosen by measured times, unless speculation does not adapt.
        times = self._times if settings.adaptive_speculation else PassTimes(model.info.padded_sizes)
        budget = PassBudget(settings.max_decode_slowdown, self._times)
        constraints = Constraints(compiler, model.info.vocabulary_size, model.info.eos_token_ids)
        self._scheduler = Scheduler(MAX_PASS_ROWS, PREFILL_CHUNK_LEN, budget, times, constraints)
        self._restoring = None
        if blocks is not None:
            self._restoring = Restoring(
                model,
                blocks,
                self._times,
                lambda fn: self.host.run_in_engine(fn),
                lambda request: self.requests.is_open(request),
            )
        features = FeatureSender(model, self.load, self.max_len)
        self.requests = Requests(
            model,
            settings,
            statistics,
            self.load,
            features,
            self._restore,
            constraints,
            lambda request: self.host.run_in_engine(functools.partial(self._follow, request)),
            self.max_len,
        )
        self._passes = Passes(
            model,
            self._scheduler,
            statistics,
            self.requests,
            features,
            self._restoring,
            self.load,
            self.max_len,
        )

    def attach(self, host: EngineHost[Request]) -> None:
        """Take the host; called once, before `start`."""
        self.host = host
        self._passes.host = host

    def start(self) -> None:
        """Measure passes where restoring KV blocks is compared with them, and start writing blocks."""
        if self.blocks is not None:
            measure_passes(self._model, self._times, MAX_PASS_ROWS, self.max_len)
            self.blocks.start()

    def watch(self, on_pass: Callable[[float], object]) -> None:
        """Have `on_pass` called, in the engine's thread, with the seconds of each pass. Before `start`."""
        self._passes.on_pass = on_pass

    @property
    def drafter(self) -> str:
        """Name of the drafter of this process; empty where there is none."""
        return self._draft.kind if self._draft is not None else ""

    @property
    def num_requests(self) -> int:
        """Requests that are open now. From any thread."""
        return len(self.requests)

    @property
    def kv_usage(self) -> KVUsage:
        """Occupancy of the KV cache."""
        return self._model.kv_usage

    @property
    def block_usage(self) -> KVBlockUsage | None:
        """KV blocks in Redis; None where there are none."""
        if (blocks := self.blocks) is None:
            return None
        return KVBlockUsage(blocks.counters, blocks.costs.bytes_per_s, blocks.block_len)

    def flush(self) -> None:
        """Return when all KV blocks that wait are written, or after a second or two. From any thread."""
        if self.blocks is not None:
            self.blocks.flush(_FLUSH_S)

    # The following methods are called in the loop's thread; see `TargetEngine` and `SteppedEngine`.

    def check(self, command: Open) -> None:
        """Raise `InvalidArgument` if a request cannot be opened as requested; change nothing."""
        self.requests.check(command)

    def open(self, command: Open) -> Request:
        """Begin a request; `Opened` is posted before the next step, or before anything else of the request."""
        return self.requests.open(command)

    def apply(self, request: Request, command: RequestCommand) -> None:
        """Apply a command to an open request."""
        self.requests.apply(request, command)

    def refuse_proposal(self, request: Request, error: OutriderError) -> None:
        """Drop an invalid proposal; the request goes on without it."""
        self.requests.refuse_proposal(request, error)

    def refuse_features(self, request: Request, error: OutriderError) -> None:
        """Send no features; the request goes on."""
        self.requests.refuse_features(request, error)

    def close(self, request: Request, committed_len: int | None, error: str = "") -> None:
        """Close a request, and keep its session."""
        self.requests.close(request, committed_len, error)

    def distrust(self, request: Request) -> None:
        """Drop the session of a request that failed."""
        self.requests.distrust(request)

    def forget(self, session_id: str) -> None:
        """Forget a session as soon as no request runs on it."""
        self.requests.forget(session_id)
        if self._draft is not None:
            self._draft.forget(session_id)

    @property
    def step_s(self) -> float:
        """Seconds of the last pass."""
        return self._passes.last_s

    def expire(self) -> None:
        """Forget the sessions that have been idle for too long; end requests whose constraint takes too long."""
        self.requests.expire()
        now = time.monotonic()
        for request, until in self._compiling():
            if now >= until:
                # It was checked to take less of a core: this machine is busy, and another target may be free.
                self.host.fail_request(request, Overloaded("the constraint is not compiled within its time"))

    def step(self) -> bool:
        """Run a step of this process's draft, then a pass if any session is ready; return whether anything was run."""
        self.requests.announce()
        if self._draft is not None:
            self._step_draft(self._draft)
            if self._draft.is_busy:
                # A pass now would leave out the sessions that are being drafted for, and they would need a pass of
                # their own after it.
                return True
        shares = self._shares(time.monotonic())
        if shares:
            self._passes.run(shares)
        return bool(shares)

    def publish(self) -> None:
        """Record how many sessions are here, and how many tokens wait to be run."""
        self.load.num_cached_sessions = self.requests.num_residents
        waiting = (request.num_uncached for request in self.requests.open_ones if not request.finished)
        self.load.record_waiting(waiting)

    def wait_s(self) -> float | None:
        """Return the seconds until a wait for a proposal is over, or a session too old; None where there is neither."""
        now = time.monotonic()
        until = self._scheduler.next_time(self.requests.open_ones, now)
        compile_until = min((until for _, until in self._compiling()), default=None)
        ends = [max(0.0, end - now) for end in (until, compile_until) if end is not None]
        waits = (*ends, self.requests.next_expiry_s())
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def probe(self) -> None:
        """Run one token; raise `EngineFailed` if the model runs no pass any more."""
        probe(self._model)

    def _compiling(self) -> list[tuple[Request, float]]:
        """Return the requests that wait for their constraint, and until when each does."""
        constrained = [(request, request.constraint) for request in self.requests.open_ones if request.constraint]
        return [(request, own.compile_until) for request, own in constrained if not own.is_ready]

    def _follow(self, request: Request) -> None:
        """Go on with a request whose constraint is compiled."""
        if not self.requests.is_open(request):
            return
        try:
            request.begin_round(time.monotonic())
        except Exception as error:
            self.host.fail_request(request, error)

    def _restore(self, request: Request) -> None:
        if self._restoring is not None:
            self._restoring.begin(request)

    def _step_draft(self, draft: ColocatedDraft) -> None:
        try:
            draft.step(self.requests.open_ones)
        except Exception as error:
            draft.reset(self.requests.open_ones, error)

    def _shares(self, now: float) -> list[Share]:
        """Return the shares of the next pass; a session that cannot be planned for fails alone."""
        try:
            return self._scheduler.shares(self.requests.open_ones, now)
        except Exception as error:
            self._unexpected.log("a pass could not be planned", error)
        for request in sorted(self.requests.open_ones, key=lambda item: item.round_started):
            try:
                shares = self._scheduler.shares([request], now)
            except Exception as error:
                self.host.fail_request(request, error)
                continue
            if shares:
                return shares
        return []
