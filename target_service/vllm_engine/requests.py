"""The open requests of the engine on vLLM, and the effects of commands on their sessions and proposals."""

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from outrider.control.policy import WorkerStatistics
from outrider.parameters import AcceptanceRule
from outrider.serving.spans import TRACER, context_of
from outrider.tokens import TokenSpan
from target_service.engine.commands import Open, Propose, SpeculationTerms
from target_service.engine.counters import EngineLoad
from target_service.engine.open_request import OpenRequest
from target_service.engine.results import Opened
from target_service.engine.sessions import Resident, Residents
from target_service.engine.speculation import Speculation
from target_service.engine.vocabulary import check_node
from target_service.settings import TargetSettings

_LOG: Final = logging.getLogger(__name__)


class TokensOnly:
    """The KV cache of a session whose keys and values are vLLM's: nothing of it is held here."""

    @property
    def cached_len(self) -> int:
        """0: a span that does not fit is sent again from the start."""
        return 0

    def truncate(self, length: int) -> None:
        """Do nothing; vLLM finds the tokens that are left by its prefix cache."""

    def release(self) -> None:
        """Do nothing; vLLM keeps the pages of a request that has ended until it needs them."""


@dataclass(slots=True, eq=False, kw_only=True)
class VllmRequest(OpenRequest[TokensOnly]):
    """A request of this engine; while it runs it is a request of vLLM too.

    Attributes:
        key: the name of vLLM's request in its outputs; empty while there is none.
        vllm_id: vLLM's own id of it.
        is_prefilling: whether vLLM has not output a token of it yet.
        num_run: tokens of a prompt that vLLM has run so far.
        num_entries: times that it has entered vLLM.
    """

    key: str = ""
    vllm_id: str = ""
    is_prefilling: bool = True
    num_run: int = 0
    num_entries: int = 0

    @property
    def is_inside(self) -> bool:
        """Whether it is a request of vLLM."""
        return bool(self.key)

    @property
    def may_enter(self) -> bool:
        """Whether it is to become a request of vLLM."""
        has_room = len(self.resident.token_ids) < self.window_end
        return self.has_start and has_room and not self.finished and not self.is_inside

    @property
    def may_decode(self) -> bool:
        """Whether it is decoded by vLLM, and its window has room for another token."""
        return self.is_inside and not self.is_prefilling and len(self.resident.token_ids) < self.window_end


class VllmRequests:
    """Opens, feeds and closes requests; none of them is a request of vLLM by this. In the engine's thread only.

    Args:
        settings: limits and defaults.
        statistics: of speculation, over all requests.
        load: counters.
        vocabulary_size: token ids are below it.
        max_len: longest session, in tokens.
        max_depth: most proposed tokens of a request that a step verifies.
    """

    def __init__(
        self,
        settings: TargetSettings,
        statistics: WorkerStatistics,
        load: EngineLoad,
        vocabulary_size: int,
        max_len: int,
        max_depth: int,
    ) -> None:
        self._settings = settings
        self._statistics = statistics
        self._load = load
        self._vocabulary_size = vocabulary_size
        self._max_len = max_len
        self._max_depth = max_depth
        self._residents: Residents[TokensOnly] = Residents(settings.max_cached_sessions, settings.idle_ttl_s)
        self._requests: dict[int, VllmRequest] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        """Return the number of open requests. From any thread."""
        return len(self._requests)

    @property
    def open_ones(self) -> Collection[VllmRequest]:
        """All open requests."""
        return self._requests.values()

    @property
    def num_residents(self) -> int:
        """Sessions whose tokens are here, whether a request runs on them or not."""
        return len(self._residents)

    def open(self, command: Open) -> VllmRequest:
        """Begin a request, and post `Opened`."""
        resident = self._residents.take(command.session_id)
        if resident is None:
            resident = Resident(command.session_id, TokensOnly())
            self._residents.add(resident)
        cached_len = min(len(resident.token_ids), max(0, command.committed_len - 1))
        self._num_opened += 1
        request = VllmRequest(
            number=self._num_opened,
            handle=command.handle,
            resident=resident,
            fencing_token=command.fencing_token,
            parameters=command.parameters,
            prompt_len=command.prompt_len,
            stop_token_ids=command.stop_token_ids,
            start_len=max(command.committed_len, 1),
            window_end=command.window_end,
            speculation=Speculation(
                self._bounded(command.speculation),
                AcceptanceRule.ENGINE,
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
        self._requests[request.number] = request
        command.handle.stream.post(Opened(command.handle.number, cached_len))
        return request

    def span(self, request: VllmRequest, span: TokenSpan) -> None:
        """Add tokens to a request's session; the request is none of vLLM now."""
        request.resident.apply(span, self._vocabulary_size, self._max_len)
        length = len(request.resident.token_ids)
        request.has_start = length >= request.start_len
        request.resident.committed_len = max(request.resident.committed_len, min(span.end, request.start_len))
        request.speculation.restart(length)
        request.begin_round(time.monotonic())

    def propose(self, request: VllmRequest, command: Propose) -> None:
        """Add nodes to the proposal ahead of a request's text."""
        part = command.part
        is_current = part.base.len >= request.prompt_len
        if is_current:
            for node in part.nodes:
                check_node(node, self._vocabulary_size)
            is_current = request.speculation.receive(part, request.resident.token_ids, command.arrived)
        self._load.num_stale_messages += not is_current

    def window(self, request: VllmRequest, committed_len: int, window_end: int) -> None:
        """Move a request's window."""
        request.resident.committed_len = max(request.resident.committed_len, committed_len)
        request.window_end = max(request.window_end, window_end)

    def speculate(self, request: VllmRequest, terms: SpeculationTerms) -> None:
        """Change how a request speculates."""
        request.speculation.change(self._bounded(terms))
        # Once a verdict has requested no proposal, the draft gets no request before the next one.
        if len(request.resident.token_ids) <= request.start_len:
            request.begin_round(time.monotonic())

    def refuse_proposal(self, request: VllmRequest, error: Exception) -> None:
        """Drop an invalid proposal: the session goes on without it."""
        self._load.num_invalid_proposals += 1
        _LOG.warning("proposal refused", extra={"problem": str(error), **request.log_fields})
        request.speculation.refuse(len(request.resident.token_ids))

    def close(self, request: VllmRequest, committed_len: int | None, error: str) -> None:
        """Close a request, and keep its session's tokens for the next one."""
        self._requests.pop(request.number, None)
        request.end(error)
        resident = request.resident
        self._residents.suspend(resident, resident.committed_len if committed_len is None else committed_len)

    def distrust(self, request: VllmRequest) -> None:
        """Drop the session of a request that failed."""
        self._residents.drop(request.resident)

    def forget(self, session_id: str) -> None:
        """Forget a session as soon as no request runs on it."""
        self._residents.forget(session_id)

    def expire(self) -> None:
        """Forget the idle sessions that have been idle for too long, or are too many."""
        self._residents.expire()

    def next_expiry_s(self) -> float | None:
        """Return the seconds until there is a session to forget; None where none is idle."""
        return self._residents.next_expiry_s()

    def _bounded(self, terms: SpeculationTerms) -> SpeculationTerms:
        """Return the terms with as many tokens as vLLM verifies, and without a draft of this process: it has none."""
        num = min(terms.num_speculative_tokens, self._max_depth)
        return SpeculationTerms(num, terms.max_wait_s, terms.lookahead, min(terms.draft_min, num))
