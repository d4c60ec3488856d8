"""What the store knows of a session."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from outrider.parameters import AcceptanceRule, FinishReason, SamplingParameters


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as Redis holds it.

    Attributes:
        tenant: whose it is.
        session_id: as the client names it.
        created: fencing token of its first lease; tells it from an earlier session of the same name.
        model: fingerprint of the target's model.
        tokenizer: fingerprint of the target's tokenizer.
        request_id: the latest request.
        request_fingerprint: hash of everything that the client asked for with it.
        parameters: of the latest request, seed included.
        rule: acceptance rule of the latest request.
        prompt_start: session length before the latest request's prompt.
        prompt_len: session length where the latest request's output begins.
        committed_len: tokens in the log.
        fencing_token: of the latest lease.
        deadline: when that lease ends, microseconds of Redis's clock; 0 when it was given back.
        finish_reason: why the latest request ended; None while it has not.
        cancelled: whether the latest request was told to end.
        target: replica whose KV cache was warm last, a hint.
    """

    tenant: str
    session_id: str
    created: int
    model: str
    tokenizer: str
    request_id: str
    request_fingerprint: str
    parameters: SamplingParameters
    rule: AcceptanceRule
    prompt_start: int
    prompt_len: int
    committed_len: int
    fencing_token: int
    deadline: int
    finish_reason: FinishReason | None
    cancelled: bool
    target: str

    @property
    def worker_key(self) -> str:
        """The name under which workers know the session: unique over tenants, and over sessions of the same name."""
        return f"{session_tag(self.tenant, self.session_id)}.{self.created}"

    @property
    def cache_salt(self) -> bytes:
        """Keeps tenants from sharing, and so from probing, each other's KV cache."""
        return hashlib.sha256(f"salt\0{self.tenant}".encode()).digest()

    @classmethod
    def from_hash(cls, fields: Mapping[bytes, bytes]) -> "SessionRecord":
        """Returns the record of a Redis hash."""
        text = {name.decode(): value.decode() for name, value in fields.items()}
        return cls(
            tenant=text["tenant"],
            session_id=text["session_id"],
            created=int(text["created"]),
            model=text["model"],
            tokenizer=text["tokenizer"],
            request_id=text["request_id"],
            request_fingerprint=text["request_fingerprint"],
            parameters=parameters_from_json(text["parameters"]).with_seed(int(text["seed"])),
            rule=AcceptanceRule(text["rule"]),
            prompt_start=int(text["prompt_start"]),
            prompt_len=int(text["prompt_len"]),
            committed_len=int(text["committed_len"]),
            fencing_token=int(text["fencing_token"]),
            deadline=int(text["deadline"]),
            finish_reason=FinishReason(text["finish_reason"]) if text["finish_reason"] else None,
            cancelled=text["cancelled"] == "1",
            target=text["target"],
        )

    def to_hash(self) -> dict[str, str | int]:
        """Returns the fields of the Redis hash that do not change while the request runs."""
        return {
            "tenant": self.tenant,
            "session_id": self.session_id,
            "created": self.created,
            "model": self.model,
            "tokenizer": self.tokenizer,
            "request_id": self.request_id,
            "request_fingerprint": self.request_fingerprint,
            "parameters": parameters_to_json(self.parameters),
            "seed": str(self.parameters.seed),
            "rule": self.rule.value,
            "prompt_start": self.prompt_start,
            "prompt_len": self.prompt_len,
            "cancelled": "0",
            "owner": "",
            "target": self.target,
        }


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to change a session, until a higher fencing token exists."""

    tenant: str
    session_id: str
    fencing_token: int


class BeginOutcome(Enum):
    """How a request began."""

    NEW = "new"
    CONTINUED = "continued"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that may go on: under a lease, or, when it had finished before, as a replay of the log."""

    outcome: BeginOutcome
    record: SessionRecord
    lease: Lease | None


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What `SessionStore.begin` needs of a request.

    Attributes:
        tenant: whose it is.
        session_id: the session.
        request_id: makes it idempotent.
        fingerprint: hash of everything the client asked for; the same id with another one is refused.
        model: fingerprint of the target's model.
        tokenizer: fingerprint of the target's tokenizer.
        parameters: seed included.
        rule: acceptance rule.
        prompt: token ids to add to the session.
        expected_len: session length the prompt was made for; None for any.
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
    """The answer to a commit: the committed length, and whether the request was told to end."""

    length: int
    cancelled: bool


def session_tag(tenant: str, session_id: str) -> str:
    """Returns what stands for a session in the keys of Redis, and at workers: no other pair of ids has the same."""
    # With the length in front, no other pair has the same text.
    return hashlib.sha256(f"{len(tenant)}:{tenant}{session_id}".encode()).hexdigest()


def derived_session_id(tenant: str, request_id: str) -> str:
    """Returns the session of a request that names none: the same for every repetition of the request."""
    return hashlib.sha256(f"{tenant}\0{request_id}".encode()).hexdigest()[:32]


def parameters_to_json(parameters: SamplingParameters) -> str:
    """Returns the parameters as JSON."""
    return json.dumps(parameters.as_dict(), sort_keys=True)


def parameters_from_json(text: str) -> SamplingParameters:
    """Returns the parameters of `parameters_to_json`."""
    values: dict[str, Any] = json.loads(text)
    values["logit_bias"] = {int(token_id): bias for token_id, bias in values["logit_bias"].items()}
    return SamplingParameters(**values | {name: tuple(values[name]) for name in ("stop", "stop_token_ids")})
