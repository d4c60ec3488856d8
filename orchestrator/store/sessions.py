"""Arguments and results of the session store: leases, new requests, commits."""

from dataclasses import dataclass
from enum import Enum

from orchestrator.store.record import SessionRecord
from outrider.parameters import AcceptanceRule, SamplingParameters


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to change a session, until a higher fencing token exists.

    Attributes:
        tenant: owner of the session.
        session_id: the session.
        fencing_token: of the lease.
        ttl_ms: milliseconds for which the session is kept after its last change.
    """

    tenant: str
    session_id: str
    fencing_token: int
    ttl_ms: int


class BeginOutcome(Enum):
    """How a request began."""

    NEW = "new"
    CONTINUED = "continued"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The end of a session, which a request may continue.

    Attributes:
        record: None where there is no session.
        last_token: of its log; None for an empty log.
    """

    record: SessionRecord | None
    last_token: int | None

    @property
    def length(self) -> int:
        """Tokens of the session."""
        return self.record.committed_len if self.record is not None else 0

    def has_request(self, request_id: str) -> bool:
        """Return whether this is the session's latest request."""
        return self.record is not None and self.record.request_id == request_id


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that has begun: under a lease, or, where it had finished before, as a replay of the log.

    Attributes:
        outcome: how it began.
        record: the session.
        lease: None for a request that had finished.
        token_ids: of the log, from the request's prompt on.
    """

    outcome: BeginOutcome
    record: SessionRecord
    lease: Lease | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """The argument of `SessionStore.begin`.

    Attributes:
        tenant: owner of the session.
        session_id: the session.
        request_id: makes the request idempotent.
        fingerprint: hash of all fields of the client's request; the same id with another hash is refused.
        model: fingerprint of the target's model.
        tokenizer: fingerprint of the target's tokenizer.
        parameters: seed included.
        rule: acceptance rule.
        prompt: token ids to add to the session.
        expected_len: session length that the prompt was encoded for; None for any.
        takes_over: whether a live lease on the same request is taken over.
        must_exist: whether the request is a resumption, so that nothing new may begin.
        max_len: longest session, in tokens.
    """

    tenant: str
    session_id: str
    request_id: str
    fingerprint: str
    model: str
    tokenizer: str
    parameters: SamplingParameters
    rule: AcceptanceRule
    prompt: tuple[int, ...]
    expected_len: int | None
    takes_over: bool
    must_exist: bool
    max_len: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of a commit: the committed length, and whether the request was cancelled."""

    length: int
    cancelled: bool
