"""The `TargetEngine` on vLLM: it admits requests, chooses the lines that a step verifies, steps, and posts verdicts.

A round waits for its proposal as in the own engine (`target_service.engine.speculation`), and is kept out of vLLM's
steps until then; so is a request whose window is closed. Where nothing may run the thread sleeps.

vLLM cannot be continued after a step that raised: any exception of a step ends the process, and its sessions go on at
other targets. A request that vLLM refuses, or ends with an error, ends alone.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from outrider.control.pass_times import PassTimes
from outrider.control.policy import WorkerStatistics
from outrider.errors import InvalidArgument, ModelUnsupported, OutriderError
from outrider.lm.pages import KVUsage
from outrider.parameters import FinishReason
from outrider.serving.session_failures import EngineFailed
from target_service.engine.batch_delay import BatchDelay
from target_service.engine.commands import (
    Open,
    Propose,
    RequestCommand,
    SendFeatures,
    Span,
    Speculate,
    Window,
)
from target_service.engine.conclusion import RoundTimes, conclude
from target_service.engine.counters import EngineLoad
from target_service.engine.identity import KVBlockUsage
from target_service.engine.interface import EngineHost
from target_service.engine.results import Progress, RoundResult
from target_service.engine.vocabulary import check_vocabulary
from target_service.settings import TargetSettings
from target_service.vllm_engine.embedded import EmbeddedVllm
from target_service.vllm_engine.entrance import Entrance
from target_service.vllm_engine.parameters import check_parameters
from target_service.vllm_engine.plan import StepPlan, plan_step
from target_service.vllm_engine.requests import VllmRequest, VllmRequests
from target_service.vllm_engine.rounds import round_result
from target_service.vllm_engine.steps import Scheduled, StepSource

_BLOCKED_S: Final = 0.05
"""Seconds until vLLM is stepped again that had no memory for any request, if no command comes before."""
_NOTHING: Final = RoundResult((), (), (), (), 0, 0, 0, FinishReason.LENGTH)


class VllmEngine:
    """See the module.

    Args:
        vllm: vLLM in this process, whose scheduler has `source`.
        source: what engine and scheduler exchange.
        settings: limits and defaults.

    Attributes:
        host: the frontend, once it has attached itself.
        load: counters.
        requests: those that are open.
    """

    host: EngineHost[VllmRequest]

    def __init__(self, vllm: EmbeddedVllm, source: StepSource, settings: TargetSettings) -> None:
        self._vllm = vllm
        self._source = source
        self.load = EngineLoad()
        statistics = WorkerStatistics(PassTimes())
        self._times = statistics.times
        # The tokens to verify are chosen by measured times, unless speculation does not adapt.
        self._choice_times = self._times if settings.adaptive_speculation else PassTimes()
        self._delay = BatchDelay(self._choice_times)
        self.requests = VllmRequests(
            settings, statistics, self.load, vllm.vocabulary_size, vllm.max_len, vllm.num_speculative_tokens
        )
        self._entrance = Entrance(vllm, source)
        self._on_pass: Callable[[float], object] = lambda seconds: None
        self._last_s = 0.0
        self._is_blocked = False
        self._kv_usage = vllm.kv_usage()

    def attach(self, host: EngineHost[VllmRequest]) -> None:
        """Take the host; called once, before `start`."""
        self.host = host

    def start(self) -> None:
        """Run vLLM's kernels once, so that no request waits for what they compile.

        Raises:
            ModelUnsupported: they fail.
        """
        try:
            self._entrance.warm_up()
        except EngineFailed as error:
            raise ModelUnsupported(f"vLLM cannot run this model: {error.__cause__ or error}") from error

    def watch(self, on_pass: Callable[[float], object]) -> None:
        """Have `on_pass` called, in the engine's thread, with the seconds of each step. Before `start`."""
        self._on_pass = on_pass

    @property
    def num_requests(self) -> int:
        """Requests that are open now. From any thread."""
        return len(self.requests)

    @property
    def kv_usage(self) -> KVUsage:
        """Occupancy of vLLM's KV cache after the last turn. From any thread."""
        return self._kv_usage

    @property
    def block_usage(self) -> KVBlockUsage | None:
        """None: blocks of vLLM's KV cache are not kept in Redis."""
        return None

    def flush(self) -> None:
        """Do nothing: nothing is written behind."""

    # The following methods are called in the loop's thread; see `TargetEngine` and `SteppedEngine`.

    def check(self, command: Open) -> None:
        """Raise `InvalidArgument` if a request cannot be opened as requested; change nothing."""
        check_parameters(command, speculates=self._vllm.num_speculative_tokens > 0)
        check_vocabulary(command, self._vllm.vocabulary_size)

    def open(self, command: Open) -> VllmRequest:
        """Begin a request, and post `Opened`."""
        return self.requests.open(command)

    def apply(self, request: VllmRequest, command: RequestCommand) -> None:
        """Apply a command to an open request."""
        match command:
            case Span(_, span):
                # It may truncate the text that vLLM has.
                self._entrance.leave(request)
                self.requests.span(request, span)
            case Propose():
                self.requests.propose(request, command)
            case Window(_, committed_len, window_end):
                self.requests.window(request, committed_len, window_end)
            case Speculate(_, terms):
                self.requests.speculate(request, terms)
            case SendFeatures(_, layers, _):
                if layers:
                    raise ModelUnsupported("a target on vLLM has no features")

    def refuse_proposal(self, request: VllmRequest, error: OutriderError) -> None:
        """Drop an invalid proposal; the request goes on without it."""
        self.requests.refuse_proposal(request, error)

    def refuse_features(self, request: VllmRequest, error: OutriderError) -> None:
        """Send no features; the request goes on."""

    def close(self, request: VllmRequest, committed_len: int | None, error: str = "") -> None:
        """Close a request, also within vLLM, and keep its session's tokens."""
        self._entrance.leave(request)
        self.requests.close(request, committed_len, error)

    def distrust(self, request: VllmRequest) -> None:
        """Drop the session of a request that failed."""
        self._entrance.leave(request)
        self.requests.distrust(request)

    def forget(self, session_id: str) -> None:
        """Forget a session as soon as no request runs on it."""
        self.requests.forget(session_id)

    @property
    def step_s(self) -> float:
        """Seconds of the last step."""
        return self._last_s

    def expire(self) -> None:
        """Forget the sessions that have been idle for too long."""
        self.requests.expire()

    def step(self) -> bool:
        """Run a step of vLLM if any request may take part; return whether one ran."""
        self._admit()
        now = time.monotonic()
        plan = plan_step(
            self.requests.open_ones, self._delay, self._choice_times, self._vllm.max_rows, self._vllm.max_len, now
        )
        if plan is None:
            self._is_blocked = False
            return False
        self._run(plan)
        # vLLM may have no memory for any of them, while requests whose windows are closed hold it.
        self._is_blocked = not self._source.scheduled
        return not self._is_blocked

    def publish(self) -> None:
        """Record how many sessions are here, how many tokens wait to be run, and the KV cache's occupancy."""
        self.load.num_cached_sessions = self.requests.num_residents
        self.load.record_waiting(
            len(request.resident.token_ids) - request.num_run if request.is_prefilling else 1
            for request in self.requests.open_ones
            if not request.finished
        )
        self._kv_usage = self._vllm.kv_usage()

    def wait_s(self) -> float | None:
        """Return the seconds until a wait for a proposal is over, or a session too old; None where there is neither."""
        if self._is_blocked:
            return _BLOCKED_S
        now = time.monotonic()
        until = self._delay.next_time((item for item in self.requests.open_ones if item.may_decode), now)
        waits = (None if until is None else max(0.0, until - now), self.requests.next_expiry_s())
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def probe(self) -> None:
        """Run one token; raise `EngineFailed` if vLLM runs no step any more."""
        self._entrance.probe()

    def _admit(self) -> None:
        """Let the requests enter vLLM whose text is complete; one that vLLM refuses ends alone."""
        for request in [request for request in self.requests.open_ones if request.may_enter]:
            num_left = request.parameters.max_tokens - request.num_output
            if min(num_left, self._vllm.max_len - len(request.resident.token_ids)) <= 0:
                self._conclude(request, _NOTHING, RoundTimes(0.0, 0.0, 0.0, 0.0, is_prefill=True))
                request.handle.stream.flush()
                continue
            try:
                self._entrance.enter(request)
            except ValueError as error:
                self.host.fail_request(request, InvalidArgument(str(error), "parameters"))
            except Exception as error:
                self.host.fail_request(request, error)

    def _run(self, plan: StepPlan) -> None:
        source = self._source
        source.lines, source.held = plan.lines, plan.held
        started = time.perf_counter()
        try:
            outputs = self._vllm.llm.step()
            for vllm_id, token_ids in source.resumed.items():
                self._vllm.set_output(vllm_id, token_ids)
            source.resumed.clear()
        except Exception as error:
            raise EngineFailed("a step of vLLM failed") from error
        duration_s = time.perf_counter() - started
        running = {request.key: request for request in plan.running}
        parts = {request.key: source.scheduled[request.vllm_id] for request in plan.running if self._took_part(request)}
        self._account(running, parts, duration_s)
        self._on_pass(duration_s)
        self.host.apply_gentle()
        for output in outputs:
            request = running.pop(output.request_id, None)
            if request is not None:
                self._take(request, output, parts.get(output.request_id), plan, duration_s)
        self._report_progress([running[key] for key in parts if key in running], parts)
        for stream in dict.fromkeys(request.handle.stream for request in plan.running):
            stream.flush()

    def _took_part(self, request: VllmRequest) -> bool:
        return request.vllm_id in self._source.scheduled

    def _take(
        self,
        request: VllmRequest,
        output: Any,
        part: Scheduled | None,
        plan: StepPlan,
        duration_s: float,
    ) -> None:
        """Conclude the round of a request that got tokens; one that fails, in the step or before it, ends alone."""
        completion = output.outputs[0]
        is_prefill = request.is_prefilling or part is None or part.is_admitted
        request.is_prefilling = False
        if output.finished:
            self._entrance.forget(request)
        try:
            proposal = part.proposal if part else ()
            drafters = request.speculation.drafters(proposal)
            result = round_result(completion, proposal, request.parameters.logprobs, drafters)
            wait_s, queue_s = plan.delays.get(request.number, (0.0, 0.0))
            self._conclude(request, result, RoundTimes(duration_s, wait_s, queue_s, plan.expected_s, is_prefill))
        except Exception as error:
            self.host.fail_request(request, error)

    def _conclude(self, request: VllmRequest, result: RoundResult, times: RoundTimes) -> None:
        verdict, failure = conclude(request, result, times, self.load)
        request.handle.stream.hold(verdict)
        if failure is not None:
            raise failure

    def _report_progress(self, requests: Sequence[VllmRequest], parts: dict[str, Scheduled]) -> None:
        for request in requests:
            part = parts[request.key]
            request.num_run = part.start + part.num_rows
            request.round_started = time.monotonic()
            if request.is_prefilling:
                request.handle.stream.hold(Progress(request.handle.number, request.num_run))

    def _account(self, running: dict[str, VllmRequest], parts: dict[str, Scheduled], duration_s: float) -> None:
        load = self.load
        load.num_passes += 1
        load.model_time_s += duration_s
        load.num_tokens += sum(part.num_rows for part in parts.values())
        load.num_active_sessions = len(self.requests)
        load.num_preemptions += self._source.num_preempted
        prompts, num_decode = [], 0
        for key, part in parts.items():
            request = running[key]
            if part.is_admitted:
                # The last token of a text has never been run.
                request.num_recomputed += max(0, part.num_tokens - 1 - max(part.start, request.prompt_len))
            if request.is_prefilling or part.is_admitted:
                prompts.append((part.num_rows, part.start))
            else:
                num_decode += part.num_rows
        if parts:
            self._times.observe(duration_s, num_decode, prompts)
        self._times.num_sessions = max(1, len(self.requests) - len(prompts))
        self._last_s = duration_s
