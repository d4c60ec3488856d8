"""The target's engine: one thread that owns the model and all sessions, and runs pass after pass.

A pass takes every session that is ready (see `scheduling`): rounds whose proposal is whole, or whose wait for it is
over, and chunks of prompts. While any session is ready the engine does not wait for the others. Commands come from the
event loop through a queue; what the engine has to say goes out through each stream's `emit`.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import torch

from outrider.errors import Draining, Fenced, InvalidArgument, ModelUnsupported, OutriderError, Overloaded
from outrider.lm.model import LanguageModel
from outrider.policy import PassTimes, SpeculationPolicy
from outrider.randomness import KeyedSource
from outrider.tokens import Base, FeatureSpan, ProposalNode, ProposalTree, TokenSpan
from target_service.remote_blocks import RemoteBlocks
from target_service.restoring import Restoring, measure_prefill, num_measured_rows
from target_service.results import RoundResult
from target_service.rounds import Round, decide_all
from target_service.scheduling import Scheduler, Share
from target_service.sessions import FencingTokens, Request, Resident, Residents
from target_service.settings import TargetSettings
from target_service.stream import OpenCommand, Stream

_LOG: Final = logging.getLogger(__name__)
_MAX_LATE_TREES: Final = 8
_FLUSH_S: Final = 2.0
_MAX_FEATURE_BYTES: Final = 64 << 10
"""Of a frame: other sessions' frames go between the parts of a long prompt."""


@dataclass(slots=True)
class EngineLoad:
    """Counters that `GetLoad` reports; written by the engine's thread, read by any."""

    num_active_sessions: int = 0
    num_cached_sessions: int = 0
    num_preemptions: int = 0
    num_passes: int = 0
    num_tokens: int = 0
    model_time_s: float = 0.0
    num_stale_messages: int = 0
    num_invalid_proposals: int = 0
    feature_bytes: int = 0


class Engine:
    """Runs the model for all sessions of this process; see the module.

    Args:
        model: the target.
        settings: limits and defaults.
        blocks: its KV blocks in Redis; None where there are none.
        on_failure: called, in the engine's thread, when an error that is no session's ends it.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: TargetSettings,
        blocks: RemoteBlocks | None = None,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        self._model = model
        self._blocks = blocks
        self._settings = settings
        self._on_failure = on_failure
        self.max_len = min(model.info.max_session_len, settings.max_session_len, model.kv_usage.max_len)
        """Longest session in tokens: what the model, the settings and the KV cache allow."""
        self._residents = Residents(settings.max_cached_sessions)
        self._scheduler = Scheduler(settings.max_pass_rows, settings.prefill_chunk_len, settings.max_decode_slowdown)
        self._num_opened = 0
        self._fencing = FencingTokens()
        self._requests: dict[tuple[int, int], Request] = {}
        self._times = PassTimes()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._draining = False
        self._idle: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._restoring = None
        if blocks is not None:
            self._restoring = Restoring(blocks, self._scheduler.budget, self.submit, self._is_open)
        self.load = EngineLoad()

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

    def submit(self, command: Callable[[], None]) -> None:
        """Has the engine's thread run a command before its next pass. From any thread."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    @property
    def num_requests(self) -> int:
        """Requests that are open now."""
        return len(self._requests)

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
        self._draining = True
        self.submit(self._notice_idle)
        return self._idle

    # What follows runs in the engine's thread only.

    def hand_over(self) -> None:
        """Refuses what still runs, so that it goes on at another target, which finds its KV blocks."""
        self.flush_blocks()
        for request in list(self._requests.values()):
            self.refuse(request.stream, request.handle, Draining("this target is shutting down"))

    def open(self, stream: Stream, handle: int, command: OpenCommand) -> None:
        """Begins a request; answers on the stream."""
        if self._draining:
            raise Draining("this target is shutting down")
        if (stream.key, handle) in self._requests:
            raise InvalidArgument(f"handle {handle} is open already", "handle")
        if len(self._requests) >= self._settings.max_sessions:
            raise Overloaded(f"{len(self._requests)} sessions are generating, the limit", retry_after_s=1.0)
        command.parameters.check_vocabulary(self._model.info.vocabulary_size)
        self._fencing.check(command.session_id, command.fencing_token)
        if command.feature_layers and self._model.features is not None:
            # Before the cache is made, so that nothing is run twice. When they are asked for, wrong ones are refused.
            with contextlib.suppress(ModelUnsupported):
                self._model.features.keep(command.feature_layers)
        resident = self._take_over(command.session_id, command.cache_salt)
        self._num_opened += 1
        self._requests[stream.key, handle] = Request(
            number=self._num_opened,
            stream=stream,
            handle=handle,
            resident=resident,
            fencing_token=command.fencing_token,
            parameters=command.parameters,
            rule=command.rule,
            prompt_len=command.prompt_len,
            stop_token_ids=command.stop_token_ids,
            start_len=max(command.committed_len, 1),
            window_end=command.window_end,
            source=KeyedSource(command.parameters.seed or 0),
            policy=SpeculationPolicy.create(
                command.max_wait_s, self._times, adapts=self._settings.adaptive_speculation
            ),
            num_speculative_tokens=command.num_speculative_tokens,
            cache_salt=command.cache_salt,
        )
        stream.opened(handle, min(len(resident.token_ids), max(0, command.committed_len - 1)))

    def span(self, stream: Stream, handle: int, span: TokenSpan) -> None:
        """Adds tokens to a request's session."""
        request = self._request(stream, handle)
        if request is None:
            return
        request.resident.apply(span, self._model.info.vocabulary_size, self.max_len)
        request.has_start = len(request.resident.token_ids) >= request.start_len
        request.resident.committed_len = max(request.resident.committed_len, min(span.end, request.start_len))
        request.begin_round(time.monotonic())
        if self._restoring is not None:
            self._restoring.begin(request)

    def propose(
        self, stream: Stream, handle: int, base: Base, first: int, nodes: Sequence[ProposalNode], done: bool
    ) -> None:
        """Adds nodes to the proposal under the current base; late ones only inform the policy."""
        request = self._request(stream, handle)
        if request is None:
            return
        tree = request.tree if base == request.base else self._late_tree(request, base)
        if tree is None or first != len(tree) + 1:
            self.load.num_stale_messages += 1
            return
        for node in nodes:
            self._check_node(node, len(tree))
            tree.append(node)
        if base == request.base:
            request.tree_complete = request.tree_complete or done

    def refuse_proposal(self, stream: Stream, handle: int, error: Exception) -> None:
        """Drops an invalid proposal: the session goes on without it."""
        _LOG.warning("proposal refused", extra={"problem": str(error)})
        self.load.num_invalid_proposals += 1
        request = self._request(stream, handle)
        if request is not None:
            request.tree = ProposalTree()
            request.tree_complete = True

    def window(self, stream: Stream, handle: int, committed_len: int, window_end: int) -> None:
        """Moves the window."""
        request = self._request(stream, handle)
        if request is not None:
            request.resident.committed_len = max(request.resident.committed_len, committed_len)
            request.window_end = max(request.window_end, window_end)

    def speculate(self, stream: Stream, handle: int, num_speculative_tokens: int, max_wait_s: float) -> None:
        """Changes what a round waits for."""
        request = self._request(stream, handle)
        if request is None:
            return
        request.num_speculative_tokens = num_speculative_tokens
        request.policy.max_wait_s = max_wait_s
        if num_speculative_tokens == 0:
            request.wait_until = 0.0

    def give_features(self, stream: Stream, handle: int, layers: tuple[int, ...], start: int) -> None:
        """Sends a session's features, of what is cached now and of what will be.

        Raises:
            ModelUnsupported: the model has none, or none of such layers.
        """
        request = self._request(stream, handle)
        if request is None:
            return
        request.feature_layers, request.features_len = (), start
        if not layers:
            return
        if self._model.features is None:
            raise ModelUnsupported("the target has no features to give")
        self._model.features.keep(layers)
        if not request.resident.cache.is_current:
            # Of what was run before nothing has been kept; it is run again.
            request.resident.cache.release()
            request.resident.cache = self._model.new_cache(request.cache_salt)
            if self._restoring is not None:
                self._restoring.begin(request)
        request.feature_layers = layers
        self._send_features(request)
        stream.flush()

    def refuse_features(self, stream: Stream, handle: int, error: Exception) -> None:
        """Sends no features: the session goes on, with whatever its draft makes of that."""
        _LOG.warning("features refused", extra={"problem": str(error)})
        if (request := self._request(stream, handle)) is not None:
            request.feature_layers = ()

    def close(self, stream: Stream, handle: int, committed_len: int, *, drop: bool) -> None:
        """Ends a request; its session stays resident up to what is committed, unless dropped."""
        request = self._requests.pop((stream.key, handle), None)
        if request is None:
            return
        request.resident.rest(committed_len)
        if drop:
            self._residents.drop(request.resident.session_id)
        self._residents.evict(self._busy())
        self._notice_idle()

    def close_stream(self, stream: Stream) -> None:
        """Ends all requests of a stream that has ended."""
        for key in [key for key in self._requests if key[0] == stream.key]:
            request = self._requests.pop(key)
            request.resident.rest(request.resident.committed_len)
        self._residents.evict(self._busy())
        self._notice_idle()

    def refuse(self, stream: Stream, handle: int, error: OutriderError) -> None:
        """Ends a request with an error, named on the stream. After KV_CACHE_MISS it stays open for an earlier span."""
        if error.reason != "KV_CACHE_MISS":
            request = self._requests.pop((stream.key, handle), None)
            if request is not None:
                request.resident.rest(request.resident.committed_len)
            self._notice_idle()
        stream.refused(handle, error)

    def _take_over(self, session_id: str, salt: bytes) -> Resident:
        """Returns the session's resident; a request that still runs on it is fenced off."""
        resident = self._residents.get(session_id)
        if resident is None:
            resident = Resident(session_id, self._model.new_cache(salt))
            self._residents.add(resident)
            self._residents.evict(self._busy() | {session_id})
        for request in [item for item in self._requests.values() if item.resident is resident]:
            stream = request.stream
            self.refuse(stream, request.handle, Fenced("a newer request took the session over"))
        return resident

    def _notice_idle(self) -> None:
        if self._draining and not self._requests and not self._idle.done():
            self._idle.set_result(None)

    def _request(self, stream: Stream, handle: int) -> Request | None:
        request = self._requests.get((stream.key, handle))
        if request is None:
            self.load.num_stale_messages += 1
        return request

    def _is_open(self, request: Request) -> bool:
        return self._requests.get((request.stream.key, request.handle)) is request

    def _busy(self) -> set[str]:
        return {request.resident.session_id for request in self._requests.values()}

    def _check_node(self, node: ProposalNode, num_nodes: int) -> None:
        law = node.draft_distribution
        token_ids = (node.token_id, *(law.token_ids if law else ()))
        if max(token_ids) >= self._model.info.vocabulary_size:
            raise InvalidArgument("token_id is outside the vocabulary", "proposal")
        if num_nodes >= self._settings.max_proposal_nodes:
            raise InvalidArgument(f"more than {self._settings.max_proposal_nodes} nodes", "proposal")

    def _late_tree(self, request: Request, base: Base) -> ProposalTree | None:
        known = len(request.resident.token_ids)
        if base.fencing_token != request.fencing_token or not request.prompt_len <= base.len < known:
            return None
        self.load.num_stale_messages += 1
        if base.len not in request.late_trees and len(request.late_trees) >= _MAX_LATE_TREES:
            request.late_trees.popitem(last=False)
        return request.late_trees.setdefault(base.len, ProposalTree())

    def _run(self) -> None:
        try:
            self._turn_until_stopped()
        except Exception:
            _LOG.exception("the engine failed")
            self._on_failure()

    def _turn_until_stopped(self) -> None:
        while not self._stopping:
            self._run_commands()
            shares = self._scheduler.shares(self._requests.values(), time.monotonic())
            if shares:
                self._run_pass(shares)
            else:
                self._sleep()

    def _run_commands(self) -> None:
        while True:
            with self._wake:
                if not self._commands:
                    return
                command = self._commands.popleft()
            command()

    def _sleep(self) -> None:
        """Waits for a command, or for the first wait for a proposal to be over."""
        waiting = [request.wait_until for request in self._requests.values() if request.can_run]
        timeout = max(0.0, min(waiting) - time.monotonic()) if waiting else None
        with self._wake:
            if not self._commands and not self._stopping:
                self._wake.wait(timeout)

    def _run_pass(self, shares: list[Share]) -> None:
        started = time.perf_counter()
        try:
            outputs = self._model.forward([share.step for share in shares])
        except Exception as error:
            self._fail(shares, error)
            return
        duration_s = time.perf_counter() - started
        self._account(shares, duration_s)
        judged = [(share, logits) for share, logits in zip(shares, outputs, strict=True) if share.step.wants_logits]
        results = self._judge(judged)
        for share, result in results:
            self._conclude(share, result, duration_s)
        for share in shares:
            if not share.step.wants_logits:
                self._send_features(share.request)
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

    def _conclude(self, share: Share, result: RoundResult, duration_s: float) -> None:
        """Applies a round's result to the session, and sends the verdict."""
        request, resident = share.request, share.request.resident
        base = request.base
        resident.cache.keep(result.kept_path)
        resident.token_ids += result.token_ids
        self._send_features(request)
        request.finished = result.finish_reason is not None
        self._inform_policy(share, result)
        request.begin_round(time.monotonic())
        awaits = request.wait_until > request.round_started
        num_recomputed, request.num_recomputed = request.num_recomputed, 0
        times_s = (duration_s, share.wait_s)
        request.stream.verdict(
            request.handle, base, result, times_s, awaits_proposal=awaits, num_recomputed=num_recomputed
        )

    def _send_features(self, request: Request) -> None:
        """Sends what a session's draft has not been sent yet, in parts; what there is no room for waits for a pass."""
        source, layers, cache = self._model.features, request.feature_layers, request.resident.cache
        if source is None or not layers:
            return
        most = max(1, _MAX_FEATURE_BYTES // (2 * self._model.info.hidden_size * len(layers)))
        while request.features_len < cache.cached_len and request.stream.has_room_for_features:
            end = min(cache.cached_len, request.features_len + most)
            rows = source.read(cache, layers, request.features_len, end)
            data = rows.cpu().view(torch.uint8).numpy().tobytes()
            request.stream.features(request.handle, FeatureSpan(request.features_len, data))
            request.features_len = end
            self.load.feature_bytes += len(data)

    def _inform_policy(self, share: Share, result: RoundResult) -> None:
        request, policy = share.request, share.request.policy
        if share.is_prefill or not request.num_speculative_tokens:
            return
        if share.waited or share.tree:
            policy.observe_round(result.num_accepted, share.wait_s, len(share.tree))
        else:
            policy.observe_plain()
        known = request.resident.token_ids
        for base_len, tree in list(request.late_trees.items()):
            if len(known) >= base_len + request.num_speculative_tokens:
                policy.observe_late(_num_matching(tree, known[base_len:]))
                del request.late_trees[base_len]

    def _account(self, shares: list[Share], duration_s: float) -> None:
        load = self.load
        load.num_passes += 1
        load.model_time_s += duration_s
        load.num_tokens += sum(share.step.num_rows for share in shares)
        load.num_active_sessions = len(self._requests)
        load.num_cached_sessions = len(self._residents)
        load.num_preemptions = self._scheduler.num_preemptions
        for share in shares:
            share.request.num_recomputed += share.num_recomputed
        prefill = [(share.step.num_rows, share.step.span.start) for share in shares if share.is_prefill]
        num_decode = sum(share.step.num_rows for share in shares if not share.is_prefill)
        self._scheduler.budget.observe(num_decode, prefill, duration_s)
        if not prefill:
            self._times.observe(duration_s, num_decode)
        self._times.num_sessions = max(1, len(self._requests) - len(prefill))

    def _fail(self, shares: list[Share], error: Exception) -> None:
        """Ends the requests of a pass that failed, whose caches can no longer be trusted; the process lives on."""
        _LOG.error("a pass failed", exc_info=error)
        for share in shares:
            request = share.request
            self._residents.drop(request.resident.session_id)
            self.refuse(request.stream, request.handle, OutriderError("the pass failed"))


def _num_matching(tree: ProposalTree, token_ids: Sequence[int]) -> int:
    """Returns how many of the tokens the tree has as a branch."""
    number, depth = 0, 0
    for token_id in token_ids:
        child = tree.child(number, token_id)
        if child is None:
            break
        number, depth = child, depth + 1
    return depth
