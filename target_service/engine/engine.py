"""The target's engine: one thread that owns the model and all sessions, and runs pass after pass.

A pass takes every session that is ready (see `scheduling`): rounds whose proposal is whole, or whose wait for it is
over, and chunks of prompts. It waits a little for sessions that are about to be ready where that pays. Commands come
from the event loop through an `Inbox`, and those of a turn take a bounded time; what the engine has to say goes out
through each stream's outbox.

Any exception that one session causes ends that session, and nothing else (see `passes`): only a model that runs no pass
any more ends the engine.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, NamedTuple

from outrider.control.pass_times import PassTimes
from outrider.control.policy import WorkerStatistics
from outrider.errors import Draining, InvalidArgument, OutriderError
from outrider.lm.model import LanguageModel
from outrider.serving.inbox import Inbox, ReadBudget
from outrider.serving.unexpected import UnexpectedErrors
from target_service.engine.colocated import ColocatedDraft
from target_service.engine.counters import EngineLoad
from target_service.engine.features import FeatureSender
from target_service.engine.frames import OPTIONAL
from target_service.engine.pass_budget import PassBudget
from target_service.engine.passes import Passes
from target_service.engine.probe import EngineFailed, probe
from target_service.engine.requests import Requests
from target_service.engine.restoring import Restoring, measure_passes
from target_service.engine.scheduling import MAX_PASS_ROWS, PREFILL_CHUNK_LEN, Scheduler, Share
from target_service.engine.sessions import Request
from target_service.engine.stream import Stream
from target_service.kv_blocks.remote_blocks import RemoteBlocks
from target_service.settings import TargetSettings

_LOG: Final = logging.getLogger(__name__)
_FLUSH_S: Final = 2.0


class _Command(NamedTuple):
    """What is to be done in the engine's thread.

    Attributes:
        run: does it.
        is_gentle: whether it ends no request and changes no tokens; then it also runs before a pass's verdicts are
            given.
    """

    run: Callable[[], None]
    is_gentle: bool = False


class Engine:
    """Runs the model for all sessions of this process; see the module.

    Args:
        model: the target.
        settings: limits and defaults.
        blocks: its KV blocks in Redis; None where there are none.
        draft: drafts within this process; None where none does.
        on_failure: called, in the engine's thread, when the model runs no pass any more.
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
        self.max_len = min(model.info.max_session_len, settings.max_session_len, model.kv_usage.max_len)
        """Longest session in tokens: what the model, the settings and the KV cache allow."""
        statistics = WorkerStatistics(PassTimes(model.info.padded_sizes))
        self._times = statistics.times
        # What is verified is chosen by measured times, where it may be.
        times = self._times if settings.adaptive_speculation else PassTimes(model.info.padded_sizes)
        budget = PassBudget(settings.max_decode_slowdown, self._times)
        self._scheduler = Scheduler(MAX_PASS_ROWS, PREFILL_CHUNK_LEN, budget, times)
        self._inbox: Inbox[_Command] = Inbox()
        self._unexpected = UnexpectedErrors()
        self._stopping = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._restoring = None
        if blocks is not None:
            self._restoring = Restoring(
                model, blocks, self._times, self.submit, lambda request: self.requests.is_open(request)
            )
        self.load = EngineLoad()
        self._features = FeatureSender(model, self.load, self.max_len)
        self.requests = Requests(
            model,
            settings,
            statistics,
            self.load,
            self._features,
            self._restore,
            self.max_len,
        )
        self._passes = Passes(
            model,
            self._scheduler,
            self._times,
            self.requests,
            self._features,
            self._restoring,
            self.load,
            lambda: self._run_commands(_is_gentle),
        )

    def start(self) -> None:
        """Starts the thread; before that measures passes, where restoring KV blocks is compared with them."""
        if self._blocks is not None:
            measure_passes(self._model, self._times, MAX_PASS_ROWS, self.max_len)
            self._blocks.start()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the pass it is in."""
        self._stopping = True
        self.submit(lambda: None)
        self._thread.join()

    def watch(self, on_pass: Callable[[float], object]) -> None:
        """Has `on_pass` called, in the engine's thread, with the seconds of each pass. Before `start`."""
        self._passes.on_pass = on_pass

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def busy_s(self) -> float:
        """Seconds that the pass, or whatever the thread does now, has taken; 0 while it waits. From any thread."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def submit(self, run: Callable[[], None], stream: Stream | None = None) -> None:
        """Has the engine's thread do something before its next pass. From any thread.

        Args:
            run: does it.
            stream: whose frames it comes behind; None for what belongs to no stream.
        """
        self._inbox.put_now(stream, _Command(run))

    async def offer(self, stream: Stream, run: Callable[[], None], num_bytes: int, *, is_gentle: bool) -> None:
        """Has the engine's thread do what a frame asks for; waits while too much of its stream waits.

        Args:
            stream: that it came on.
            run: does it.
            num_bytes: of the frame.
            is_gentle: whether it ends no request and changes no tokens.
        """
        await self._inbox.put(stream, _Command(run, is_gentle), num_bytes)

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

    def refuse(self, stream: Stream, handle: int, kind: str, error: OutriderError) -> None:
        """Refuses a frame of a kind; one without which the session goes on ends nothing."""
        match kind:
            case "proposal":
                self.requests.refuse_proposal(stream, handle, error)
            case "features":
                self.requests.refuse_features(stream, handle, error)
            case _:
                self.requests.refuse(stream, handle, error)

    def run_frame(self, stream: Stream, handle: int, kind: str, command: Callable[[], None]) -> None:
        """Does what a frame asks for; an error ends the session that it concerns, and nothing else."""
        try:
            command()
        except OutriderError as error:
            self.refuse(stream, handle, kind, error)
        except ValueError as error:
            self.refuse(stream, handle, kind, InvalidArgument(str(error), "frame"))
        except Exception as error:
            request = self.requests.at(stream, handle)
            if request is not None and kind not in OPTIONAL:
                self._passes.fail(request, error)
            else:
                self.refuse(stream, handle, kind, self._unexpected.named("the frame failed", error))

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
                self._step_draft(self._draft)
                if self._draft.is_busy:
                    # A pass now would be one without the sessions that are being drafted for, and they would have
                    # the next one for themselves: two passes for what one does.
                    continue
            shares = self._shares(time.monotonic())
            if shares:
                self._passes.run(shares)
            else:
                self._sleep()
        # Streams that were cut at the end still have requests to end.
        self._inbox.read(self._run_command)

    def _run_commands(self, is_wanted: Callable[[_Command], bool] | None = None) -> None:
        budget = ReadBudget.beside(self._passes.last_s, len(self.requests))
        self._inbox.read(self._run_command, budget, is_wanted)

    def _run_command(self, command: _Command) -> None:
        try:
            command.run()
        except EngineFailed:
            raise
        except Exception as error:
            # What a frame does to a session has been seen to by `run_frame`.
            self._unexpected.log("a command failed", error)
            probe(self._model)

    def _step_draft(self, draft: ColocatedDraft) -> None:
        try:
            draft.step(self.requests.open_ones)
        except Exception as error:
            draft.reset(self.requests.open_ones, error)

    def _sleep(self) -> None:
        """Waits for a command, for the first wait for a proposal to be over, or for a session to get too old."""
        self._passes.note_waiting()
        now = time.monotonic()
        until = self._scheduler.next_time(self.requests.open_ones, now)
        waits = (None if until is None else max(0.0, until - now), self.requests.next_expiry_s())
        timeout_s = min((wait_s for wait_s in waits if wait_s is not None), default=None)
        self._busy_since = None
        if not self._stopping:
            self._inbox.wait(timeout_s)

    def _shares(self, now: float) -> list[Share]:
        """Returns the shares of the next pass; a session that cannot be planned for fails alone."""
        try:
            return self._scheduler.shares(self.requests.open_ones, now)
        except Exception as error:
            self._unexpected.log("a pass could not be planned", error)
        for request in sorted(self.requests.open_ones, key=lambda item: item.round_started):
            try:
                shares = self._scheduler.shares([request], now)
            except Exception as error:
                self._passes.fail(request, error)
                continue
            if shares:
                return shares
        return []


def _is_gentle(command: _Command) -> bool:
    return command.is_gentle
