"""The requests that are open at a target, and what the frames of their callers do to them."""

import contextlib
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Final

from outrider.control.policy import WorkerStatistics
from outrider.errors import Draining, Fenced, InvalidArgument, ModelUnsupported, OutriderError, Overloaded
from outrider.lm.model import LanguageModel
from outrider.serving.spans import TRACER, context_of
from outrider.serving.unexpected import UnexpectedErrors
from outrider.speculation.randomness import KeyedSource
from outrider.tokens import ProposalNode, ProposalPart, TokenSpan
from target_service.engine.counters import EngineLoad
from target_service.engine.features import FeatureSender
from target_service.engine.sessions import FencingTokens, Request, Resident, Residents
from target_service.engine.speculation import Speculation, SpeculationTerms
from target_service.engine.stream import OpenCommand, Stream
from target_service.settings import TargetSettings

_LOG: Final = logging.getLogger(__name__)
_STREAM_ENDED: Final = "STREAM_ENDED"


class Requests:
    """Opens, feeds and ends requests. All methods run in the engine's thread, but for what is said to be for any.

    Args:
        model: the target.
        settings: limits and defaults.
        statistics: of speculation, over all sessions.
        load: counts.
        features: sends what drafts ask for.
        restore: has what is missing of a request's KV cache fetched, if that pays.
        max_len: longest session, in tokens.

    Attributes:
        max_len: as given.
        is_draining: whether new requests are refused. From any thread.
        idle: done once none is open and none will be. For any thread.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: TargetSettings,
        statistics: WorkerStatistics,
        load: EngineLoad,
        features: FeatureSender,
        restore: Callable[[Request], None],
        max_len: int,
    ) -> None:
        self._model = model
        self._settings = settings
        self._statistics = statistics
        self._load = load
        self._features = features
        self._restore = restore
        self.max_len = max_len
        self._residents = Residents(settings.max_cached_sessions, settings.idle_ttl_s)
        self._fencing = FencingTokens()
        self._requests: dict[tuple[int, int], Request] = {}
        self._num_opened = 0
        self._unexpected = UnexpectedErrors()
        self.is_draining = False
        self.idle: Future[None] = Future()

    def __len__(self) -> int:
        """Requests that are open now. For any thread."""
        return len(self._requests)

    @property
    def open_ones(self) -> Collection[Request]:
        """All that are open."""
        return self._requests.values()

    @property
    def num_residents(self) -> int:
        """Sessions whose tokens are here, generating or not."""
        return len(self._residents)

    def at(self, stream: Stream, handle: int) -> Request | None:
        """Returns the request that is open there, if one is."""
        return self._requests.get((stream.key, handle))

    def is_open(self, request: Request) -> bool:
        """Returns whether a request has not ended."""
        return self._requests.get((request.stream.key, request.handle)) is request

    def open(self, stream: Stream, handle: int, command: OpenCommand) -> None:
        """Begins a request; answers on the stream."""
        if self.is_draining:
            raise Draining("this target is shutting down")
        if (stream.key, handle) in self._requests:
            raise InvalidArgument(f"handle {handle} is open already", "handle")
        if len(self._requests) >= self._settings.max_sessions:
            raise Overloaded(f"{len(self._requests)} sessions are generating, the limit", retry_after_s=1.0)
        command.parameters.check_vocabulary(self._model.info.vocabulary_size)
        self._check_stops(command)
        self._fencing.check(command.session_id, command.fencing_token)
        if command.feature_layers:
            # Before the cache is made, so that nothing is run twice. When they are asked for, wrong ones are refused.
            with contextlib.suppress(ModelUnsupported):
                self._features.keep(command.feature_layers)
        resident = self._take_over(command.session_id, command.cache_salt)
        cached_len = min(len(resident.token_ids), max(0, command.committed_len - 1))
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
            speculation=Speculation(
                command.speculation,
                command.rule,
                self._statistics,
                adapts=self._settings.adaptive_speculation,
            ),
            cache_salt=command.cache_salt,
            request_id=command.request_id,
            span=TRACER.start_span(
                "verify",
                context_of(command.traceparent),
                attributes={"outrider.request_id": command.request_id, "outrider.cached_len": cached_len},
            ),
        )
        stream.opened(handle, cached_len)

    def span(self, stream: Stream, handle: int, span: TokenSpan) -> None:
        """Adds tokens to a request's session."""
        request = self._request(stream, handle)
        if request is None:
            return
        request.resident.apply(span, self._model.info.vocabulary_size, self.max_len)
        request.has_start = len(request.resident.token_ids) >= request.start_len
        request.resident.committed_len = max(request.resident.committed_len, min(span.end, request.start_len))
        request.speculation.restart(len(request.resident.token_ids))
        request.begin_round(time.monotonic())
        self._restore(request)

    def propose(self, stream: Stream, handle: int, part: ProposalPart, arrived: float) -> None:
        """Adds nodes, which came at a monotonic time, to what has been proposed ahead of a request's text."""
        request = self._request(stream, handle)
        if request is None:
            return
        is_current = part.base.fencing_token == request.fencing_token and part.base.len >= request.prompt_len
        is_current = is_current and not request.speculation.terms.own_draft
        if is_current:
            for node in part.nodes:
                self._check_node(node)
            is_current = request.speculation.receive(part, request.resident.token_ids, arrived)
        self._load.num_stale_messages += not is_current

    def refuse_proposal(self, stream: Stream, handle: int, error: Exception) -> None:
        """Drops an invalid proposal: the session goes on without it."""
        self._load.num_invalid_proposals += 1
        request = self._request(stream, handle)
        _LOG.warning("proposal refused", extra={"problem": str(error), **_log_fields(request)})
        if request is not None:
            request.speculation.refuse(len(request.resident.token_ids))

    def window(self, stream: Stream, handle: int, committed_len: int, window_end: int) -> None:
        """Moves the window."""
        request = self._request(stream, handle)
        if request is not None:
            request.resident.committed_len = max(request.resident.committed_len, committed_len)
            request.window_end = max(request.window_end, window_end)

    def speculate(self, stream: Stream, handle: int, terms: SpeculationTerms) -> None:
        """Changes what rounds wait for."""
        request = self._request(stream, handle)
        if request is not None:
            request.speculation.change(terms)
            # Once a verdict has said that nothing is awaited, nobody is asked before the next one.
            if len(request.resident.token_ids) <= request.start_len:
                request.begin_round(time.monotonic())

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
        self._features.keep(layers)
        if not request.resident.cache.is_current:
            # Of what was run before nothing has been kept; it is run again.
            request.resident.cache.release()
            request.resident.cache = self._model.new_cache(request.cache_salt)
            self._restore(request)
        request.feature_layers = layers
        self._features.send(request)
        stream.flush()

    def refuse_features(self, stream: Stream, handle: int, error: Exception) -> None:
        """Sends no features: the session goes on, with whatever its draft makes of that."""
        request = self._request(stream, handle)
        _LOG.warning("features refused", extra={"problem": str(error), **_log_fields(request)})
        if request is not None:
            request.feature_layers = ()

    def close(self, stream: Stream, handle: int, committed_len: int) -> None:
        """Ends a request; its session stays resident up to what is committed."""
        request = self._requests.pop((stream.key, handle), None)
        if request is None:
            return
        request.end()
        self._rest(request, committed_len)
        self.notice_idle()

    def close_stream(self, stream: Stream) -> None:
        """Ends all requests of a stream that has ended."""
        for key in [key for key in self._requests if key[0] == stream.key]:
            request = self._requests.pop(key)
            request.end(_STREAM_ENDED)
            self._rest(request, request.resident.committed_len)
        self.notice_idle()

    def refuse(self, stream: Stream, handle: int, error: OutriderError) -> None:
        """Ends a request with an error, named on the stream. After KV_CACHE_MISS it stays open for an earlier span."""
        if error.reason != "KV_CACHE_MISS":
            request = self._requests.pop((stream.key, handle), None)
            if request is not None:
                request.end(error.reason)
                self._rest(request, request.resident.committed_len)
            self.notice_idle()
        stream.refused(handle, error)

    def refuse_all(self, error: OutriderError) -> None:
        """Ends all requests with an error."""
        for request in list(self._requests.values()):
            self.refuse(request.stream, request.handle, error)

    def distrust(self, request: Request) -> None:
        """Gives up the session of a request that failed; what is left to do is to refuse it."""
        self._residents.drop(request.resident)

    def forget(self, session_id: str) -> None:
        """Forgets a session, as soon as no request runs on it."""
        self._residents.forget(session_id)

    def expire(self) -> None:
        """Forgets the sessions that have been idle for too long."""
        self._residents.expire()

    def next_expiry_s(self) -> float | None:
        """Returns the seconds until there is one to forget; None where none is idle."""
        return self._residents.next_expiry_s()

    def notice_idle(self) -> None:
        """Completes `idle` where a drain has nothing to wait for any more."""
        if self.is_draining and not self._requests and not self.idle.done():
            self.idle.set_result(None)

    def _take_over(self, session_id: str, salt: bytes) -> Resident:
        """Returns the session's resident; a request that still runs on it is fenced off."""
        for request in [item for item in self._requests.values() if item.resident.session_id == session_id]:
            stream = request.stream
            self.refuse(stream, request.handle, Fenced("a newer request took the session over"))
        resident = self._residents.take(session_id)
        if resident is None:
            resident = Resident(session_id, self._model.new_cache(salt))
            self._residents.add(resident)
        return resident

    def _request(self, stream: Stream, handle: int) -> Request | None:
        request = self.at(stream, handle)
        if request is None:
            self._load.num_stale_messages += 1
        return request

    def _rest(self, request: Request, length: int) -> None:
        """Keeps a session for the next request; one that cannot be kept is forgotten, and costs no other its place."""
        try:
            self._residents.rest(request.resident, length)
        except Exception as error:
            self._unexpected.log("a session could not be kept", error, **request.log_fields)
            self._residents.drop(request.resident)

    def _check_stops(self, command: OpenCommand) -> None:
        largest, size = max(command.stop_token_ids, default=0), self._model.info.vocabulary_size
        if largest >= size:
            raise InvalidArgument(f"stop_token_ids has token id {largest}, the vocabulary has {size}", "stop_token_ids")

    def _check_node(self, node: ProposalNode) -> None:
        law = node.draft_distribution
        token_ids = (node.token_id, *(law.token_ids if law else ()))
        if max(token_ids) >= self._model.info.vocabulary_size:
            raise InvalidArgument("token_id is outside the vocabulary", "proposal")


def _log_fields(request: Request | None) -> dict[str, str]:
    return request.log_fields if request is not None else {}
