"""A running request: its session, lease and tokens, and the messages that open it on workers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.trace import Span

from orchestrator.generation.placement import Placement
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.settings import OrchestratorSettings
from orchestrator.store.record import SessionRecord
from orchestrator.store.sessions import Lease
from orchestrator.store.store import SessionStore
from orchestrator.workers.replicas import Replicas
from outrider import wire
from outrider.drafter_names import has_suffix
from outrider.errors import Unavailable
from outrider.serving.spans import log_fields, traceparent_of
from outrider.speculation.prediction import Prediction
from outrider.tokens import TokenSpan
from outrider.v1 import draft_pb2, target_pb2, worker_pb2
from outrider.workers.draft_session import SpeculationChoice

# More tokens than a target decides while a commit is on its way to Redis and back, so that no pass waits for one; not
# more, because tokens that are not committed are recomputed after a failover.
_WINDOW: Final = 64


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of the process that all requests share.

    Attributes:
        store: the session store.
        replicas: all workers.
        settings: of the process.
        metrics: of the process.
        window: maximum number of uncommitted tokens of a session at the target, at least 1.
        placement: where requests draft.
    """

    store: SessionStore
    replicas: Replicas
    settings: OrchestratorSettings
    metrics: OrchestratorMetrics
    window: int = _WINDOW
    placement: Placement = field(default_factory=Placement)


class SessionTokens:
    """A session's tokens from some position on; earlier ones are read from the log on demand.

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
        """Add output."""
        self._token_ids += token_ids

    def since(self, start: int) -> TokenSpan:
        """Return the tokens in memory from a position on; the span begins later where earlier tokens are not there."""
        start = max(start, self._start)
        return TokenSpan(start, tuple(self._token_ids[start - self._start :]))

    def until(self, end: int) -> TokenSpan:
        """Return the tokens in memory before a position."""
        return TokenSpan(self._start, tuple(self._token_ids[: max(0, end - self._start)]))

    async def read_from(self, start: int) -> tuple[int, ...]:
        """Return all tokens from a position on."""
        missing = self._start
        if start < missing:
            record = self._record
            earlier = await self._store.read_tokens(record.tenant, record.session_id, start, missing)
            if len(earlier) != missing - start:
                raise Unavailable("the token log could not be read")
            # Another reader may have fetched some or all of it meanwhile.
            if start < self._start:
                self._token_ids = earlier[: self._start - start] + self._token_ids
                self._start = start
        return tuple(self._token_ids[start - self._start :])


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request under its lease.

    Attributes:
        record: the session, as it was when the lease was granted.
        lease: the lease.
        tokens: the session's tokens, the prompt included.
        choice: how it speculates.
        stop_token_ids: token ids at which it ends.
        reports: whether its stream has notices and statistics.
        span: of its trace.
        prediction: of its output, which has followed the committed tokens; None without one.
    """

    record: SessionRecord
    lease: Lease
    tokens: SessionTokens
    choice: SpeculationChoice
    stop_token_ids: tuple[int, ...]
    reports: bool
    span: Span
    prediction: Prediction | None = None

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields for log records of tasks that read a worker's stream, which do not have the request's context."""
        record = self.record
        ids = {"request_id": record.request_id, "session_id": record.session_id, "tenant": record.tenant}
        return {**ids, **log_fields(self.span)}

    def verify_open(
        self, speculation: target_pb2.SpeculationSettings, window: int, feature_layers: Sequence[int], drafter: str
    ) -> target_pb2.VerifyOpen:
        """Return the message that opens it on a target.

        Args:
            speculation: how it speculates there.
            window: uncommitted tokens, at most.
            feature_layers: layers whose features its draft takes.
            drafter: the target's own, where it drafts for the request; else empty.
        """
        return target_pb2.VerifyOpen(
            session_id=self.record.worker_key,
            fencing_token=self.lease.fencing_token,
            parameters=wire.parameters_to_message(self.record.parameters),
            acceptance_rule=wire.rule_to_number(self.record.rule),
            prompt_len=self.record.prompt_len,
            committed_len=self.tokens.end,
            stop_token_ids=self.stop_token_ids,
            speculation=speculation,
            window_end=self.tokens.end + window,
            cache_salt=self.record.cache_salt,
            feature_layers=feature_layers,
            request_id=self.record.request_id,
            traceparent=traceparent_of(self.span),
            prediction=self._predicted(drafter),
        )

    def draft_open(self, target: worker_pb2.GetInfoResponse | None, drafter: str) -> draft_pb2.DraftOpen:
        """Return the message that opens it on a draft.

        Args:
            target: the target that verifies.
            drafter: of the draft.
        """
        rule, parameters = self.record.rule, self.record.parameters
        if rule is not rule.for_drafts:
            # The target accepts a token with its probability, whatever the noise of a draft: likeliest tokens fit best.
            parameters = parameters.replace(temperature=0)
        return draft_pb2.DraftOpen(
            session_id=self.record.worker_key,
            fencing_token=self.lease.fencing_token,
            parameters=wire.parameters_to_message(parameters),
            acceptance_rule=wire.rule_to_number(rule.for_drafts),
            prompt_len=self.record.prompt_len,
            tokenizer_fingerprint=target.tokenizer_fingerprint if target else "",
            target_fingerprint=target.weights_fingerprint if target else "",
            stop_token_ids=self.stop_token_ids,
            cache_salt=self.record.cache_salt,
            draft_p_min=self.choice.draft_p_min,
            prediction=self._predicted(drafter),
            request_id=self.record.request_id,
            traceparent=traceparent_of(self.span),
        )

    def _predicted(self, drafter: str) -> Sequence[int]:
        """Return the prediction where a drafter uses it."""
        return self.prediction.token_ids if self.prediction is not None and has_suffix(drafter) else ()
