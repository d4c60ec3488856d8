"""The open requests of a target's engine, and the effects of commands on them."""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection
from typing import Final

from outrider.control.policy import WorkerStatistics
from outrider.errors import InvalidArgument, ModelUnsupported
from outrider.lm.model import KVCache, LanguageModel
from outrider.parameters import REPLAYABLE_RULES
from outrider.serving.spans import TRACER, context_of
from outrider.serving.unexpected import UnexpectedErrors
from outrider.speculation.randomness import KeyedSource
from outrider.tokens import TokenSpan
from target_service.engine.commands import (
    Open,
    Propose,
    RequestCommand,
    SendFeatures,
    Span,
    Speculate,
    SpeculationTerms,
    Window,
)
from target_service.engine.constraints import Constraints
from target_service.engine.counters import EngineLoad
from target_service.engine.features import FeatureSender
from target_service.engine.request import Request
from target_service.engine.results import Opened
from target_service.engine.sessions import Resident, Residents
from target_service.engine.speculation import Speculation
from target_service.engine.vocabulary import check_node, check_vocabulary
from target_service.settings import TargetSettings

_LOG: Final = logging.getLogger(__name__)


class Requests:
    """Opens, feeds and closes requests. All methods are called in the engine's thread.

    Args:
        model: the target.
        settings: limits and defaults.
        statistics: of speculation, over all requests.
        load: counters.
        features: sends the features that drafts request.
        restore: has a request's missing KV cache fetched, if that pays.
        constraints: of the requests.
        on_compiled: called, in any thread, with a request whose constraint is compiled.
        max_len: longest session, in tokens.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: TargetSettings,
        statistics: WorkerStatistics,
        load: EngineLoad,
        features: FeatureSender,
        restore: Callable[[Request], None],
        constraints: Constraints,
        on_compiled: Callable[[Request], None],
        max_len: int,
    ) -> None:
        self._model = model
        self._settings = settings
        self._statistics = statistics
        self._load = load
        self._features = features
        self._restore = restore
        self._constraints = constraints
        self._on_compiled = on_compiled
        self._max_len = max_len
        self._residents: Residents[KVCache] = Residents(settings.max_cached_sessions, settings.idle_ttl_s)
        self._requests: dict[int, Request] = {}
        self._unannounced: dict[int, tuple[Request, int]] = {}
        self._num_opened = 0
        self._unexpected = UnexpectedErrors()

    def __len__(self) -> int:
        """Return the number of open requests. From any thread."""
        return len(self._requests)

    @property
    def open_ones(self) -> Collection[Request]:
        """All open requests."""
        return self._requests.values()

    @property
    def num_residents(self) -> int:
        """Sessions whose tokens are here, whether a request runs on them or not."""
        return len(self._residents)

    def is_open(self, request: Request) -> bool:
        """Return whether a request has not been closed."""
        return request.number in self._requests

    def check(self, command: Open) -> None:
        """Raise `InvalidArgument` if a request cannot be opened as requested."""
        if command.rule not in REPLAYABLE_RULES:
            raise InvalidArgument(f"is {command.rule.value}, which this engine does not serve", "acceptance_rule")
        check_vocabulary(command, self._model.info.vocabulary_size)
        self._constraints.check(command.parameters)

    def open(self, command: Open) -> Request:
        """Begin a request, to be announced; raise `Overloaded` where too many constraints wait to be compiled."""
        # First, since it may be refused.
        grammar = self._constraints.begin(command.parameters)
        if command.feature_layers:
            # Before the cache is made, so that nothing is run twice. Wrong layers are refused once they are requested.
            with contextlib.suppress(ModelUnsupported):
                self._features.keep(command.feature_layers)
        resident = self._residents.take(command.session_id)
        if resident is None:
            resident = Resident(command.session_id, self._model.new_cache(command.cache_salt))
            self._residents.add(resident)
        cached_len = min(len(resident.token_ids), max(0, command.committed_len - 1))
        self._num_opened += 1
        request = Request(
            number=self._num_opened,
            handle=command.handle,
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
            prediction=command.prediction,
            span=TRACER.start_span(
                "verify",
                context_of(command.traceparent),
                attributes={"outrider.request_id": command.request_id, "outrider.cached_len": cached_len},
            ),
        )
        self._constraints.attach(request, grammar, functools.partial(self._on_compiled, request))
        self._requests[request.number] = request
        self._unannounced[request.number] = request, cached_len
        return request

    def announce(self) -> None:
        """Post `Opened` for the requests that are new, before the next pass.

        Requests that come together are announced together: whether drafts pay depends on how many there are.
        """
        for number in list(self._unannounced):
            self._announce(number)

    def _announce(self, number: int) -> None:
        if (opened := self._unannounced.pop(number, None)) is not None:
            request, cached_len = opened
            request.handle.stream.post(Opened(request.handle.number, cached_len, self._is_plain))

    @property
    def _is_plain(self) -> bool:
        guard = self._statistics.guard
        return self._settings.adaptive_speculation and not guard.allows_at(max(1, len(self._requests)))

    def apply(self, request: Request, command: RequestCommand) -> None:
        """Apply a command to an open request; see `TargetEngine`."""
        self._announce(request.number)
        match command:
            case Span(_, span):
                self.span(request, span)
            case Propose():
                self.propose(request, command)
            case Window(_, committed_len, window_end):
                request.resident.committed_len = max(request.resident.committed_len, committed_len)
                request.window_end = max(request.window_end, window_end)
            case Speculate(_, terms):
                self.speculate(request, terms)
            case SendFeatures(_, layers, start):
                self.send_features(request, layers, start)

    def span(self, request: Request, span: TokenSpan) -> None:
        """Add tokens to a request's session."""
        request.resident.apply(span, self._model.info.vocabulary_size, self._max_len)
        request.has_start = len(request.resident.token_ids) >= request.start_len
        request.resident.committed_len = max(request.resident.committed_len, min(span.end, request.start_len))
        request.speculation.restart(len(request.resident.token_ids))
        request.begin_round(time.monotonic())
        self._restore(request)

    def propose(self, request: Request, command: Propose) -> None:
        """Add nodes to the proposal ahead of a request's text."""
        part = command.part
        is_current = part.base.len >= request.prompt_len and not request.speculation.terms.own_draft
        if is_current:
            for node in part.nodes:
                check_node(node, self._model.info.vocabulary_size)
            is_current = request.speculation.receive(part, request.resident.token_ids, command.arrived)
        self._load.num_stale_messages += not is_current

    def speculate(self, request: Request, terms: SpeculationTerms) -> None:
        """Change how a request speculates."""
        request.speculation.change(terms)
        # Once a verdict has requested no proposal, the draft gets no request before the next one.
        if len(request.resident.token_ids) <= request.start_len:
            request.begin_round(time.monotonic())

    def send_features(self, request: Request, layers: tuple[int, ...], start: int) -> None:
        """Send a session's features, those that are cached now and those of later passes.

        Raises:
            ModelUnsupported: the model has none, or none of such layers.
        """
        request.feature_layers, request.features_len = (), start
        if not layers:
            return
        self._features.keep(layers)
        if not request.resident.cache.is_current:
            # No features were kept of its positions, so they are run again.
            request.resident.cache.release()
            request.resident.cache = self._model.new_cache(request.cache_salt)
            self._restore(request)
        request.feature_layers = layers
        self._features.send(request)
        request.handle.stream.flush()

    def refuse_proposal(self, request: Request, error: Exception) -> None:
        """Drop an invalid proposal: the session goes on without it."""
        self._load.num_invalid_proposals += 1
        _LOG.warning("proposal refused", extra={"problem": str(error), **request.log_fields})
        request.speculation.refuse(len(request.resident.token_ids))

    def refuse_features(self, request: Request, error: Exception) -> None:
        """Send no features: the session goes on, and its draft proposes nothing that needs them."""
        _LOG.warning("features refused", extra={"problem": str(error), **request.log_fields})
        request.feature_layers = ()

    def close(self, request: Request, committed_len: int | None, error: str = "") -> None:
        """Close a request, and keep its session for the next one; see `TargetEngine`."""
        self._announce(request.number)
        self._requests.pop(request.number, None)
        if request.constraint is not None:
            request.constraint.grammar.drop()
        request.end(error)
        resident = request.resident
        try:
            self._residents.suspend(resident, resident.committed_len if committed_len is None else committed_len)
        except Exception as problem:
            # A session that cannot be kept is forgotten, and takes no other's place.
            self._unexpected.log("a session could not be kept", problem, **request.log_fields)
            self._residents.drop(resident)

    def distrust(self, request: Request) -> None:
        """Drop the session of a request that failed."""
        self._residents.drop(request.resident)

    def forget(self, session_id: str) -> None:
        """Forget a session as soon as no request runs on it."""
        self._residents.forget(session_id)

    def expire(self) -> None:
        """Forget the sessions that have been idle for too long."""
        self._residents.expire()

    def next_expiry_s(self) -> float | None:
        """Return the seconds until there is a session to forget; None where none is idle."""
        return self._residents.next_expiry_s()
