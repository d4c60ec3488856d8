"""What the store knows of a session."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Final

from outrider.errors import DataLoss, InvalidArgument
from outrider.parameters import MAX_SEED, AcceptanceRule, FinishReason, SamplingParameters

_MAX_COUNT: Final = 2**53 - 1
"""What Redis's scripts count exactly."""
_MAX_DIGITS: Final = 20
_MAX_TOKEN_ID: Final = 2**32 - 1


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
        return worker_key(self.tenant, self.session_id, self.created)

    @property
    def cache_salt(self) -> bytes:
        """Keeps tenants from sharing, and so from probing, each other's KV cache."""
        return hashlib.sha256(f"salt\0{self.tenant}".encode()).digest()

    def has_finished(self, request_id: str) -> bool:
        """Returns whether this is the latest request, and it has ended."""
        return self.request_id == request_id and self.finish_reason is not None

    @classmethod
    def from_hash(cls, fields: Mapping[bytes, bytes], tenant: str, session_id: str) -> "SessionRecord":
        """Returns the record of a Redis hash.

        Args:
            fields: of the hash.
            tenant: whose session it must be.
            session_id: which it must be.

        Raises:
            DataLoss: a field is missing, or is not what this class wrote there.
        """
        try:
            record = cls._parsed({name.decode(): value.decode() for name, value in fields.items()})
        except (LookupError, ValueError) as error:
            raise DataLoss("its record is damaged") from error
        is_in_order = record.prompt_start <= record.prompt_len <= record.committed_len
        if not is_in_order or (record.tenant, record.session_id) != (tenant, session_id):
            raise DataLoss("its record is damaged")
        return record

    @classmethod
    def _parsed(cls, text: Mapping[str, str]) -> "SessionRecord":
        """Returns the record of its fields; raises LookupError or ValueError where they are not those of `to_hash`."""
        finish_reason = FinishReason(text["finish_reason"]) if text["finish_reason"] else None
        if text["state"] != ("running" if finish_reason is None else "finished"):
            raise ValueError("state and finish_reason do not fit")
        if not text["request_id"]:
            raise ValueError("no request_id")
        return cls(
            tenant=text["tenant"],
            session_id=text["session_id"],
            created=_count(text["created"]),
            model=text["model"],
            tokenizer=text["tokenizer"],
            request_id=text["request_id"],
            request_fingerprint=text["request_fingerprint"],
            parameters=parameters_from_json(text["parameters"]).with_seed(_count(text["seed"], MAX_SEED)),
            rule=AcceptanceRule(text["rule"]),
            prompt_start=_count(text["prompt_start"]),
            prompt_len=_count(text["prompt_len"]),
            committed_len=_count(text["committed_len"]),
            fencing_token=_count(text["fencing_token"]),
            deadline=_count(text["deadline"]),
            finish_reason=finish_reason,
            cancelled=bool(("0", "1").index(text["cancelled"])),
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
class SessionEnd:
    """A session as a request finds it that would go on behind its end.

    Attributes:
        record: None where there is no session.
        last_token: of its log; None where that has none.
    """

    record: SessionRecord | None
    last_token: int | None

    @property
    def length(self) -> int:
        """Tokens of the session."""
        return self.record.committed_len if self.record is not None else 0

    def has_request(self, request_id: str) -> bool:
        """Returns whether this is the session's latest request."""
        return self.record is not None and self.record.request_id == request_id


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that may go on: under a lease, or, when it had finished before, as a replay of the log.

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


def worker_key(tenant: str, session_id: str, created: object) -> str:
    """Returns the name under which workers know a session whose first lease had the fencing token `created`."""
    return f"{session_tag(tenant, session_id)}.{created}"


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
    """Returns the parameters of `parameters_to_json`; raises ValueError for what that cannot have written."""
    try:
        values: dict[str, Any] = json.loads(text)
        biases = {_count(token_id, _MAX_TOKEN_ID): bias for token_id, bias in values["logit_bias"].items()}
        lists = {name: values[name] for name in ("stop", "stop_token_ids")}
        if any(type(value) is not list for value in lists.values()):
            raise ValueError("a stop condition has another type")
        tuples = {name: tuple(value) for name, value in lists.items()}
        parameters = SamplingParameters(**values | tuples | {"logit_bias": biases})
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError, InvalidArgument) as error:
        raise ValueError("no sampling parameters") from error
    _check_types(parameters)
    return parameters


def _check_types(parameters: SamplingParameters) -> None:
    """Raises ValueError where a value has a type that the workers' messages do not take."""
    for item in fields(parameters):
        value = getattr(parameters, item.name)
        kind = type(item.default)
        if kind is float:
            is_fit = type(value) in (float, int)
        elif item.default is None:
            is_fit = value is None or type(value) is int
        else:
            is_fit = kind is tuple or item.name == "logit_bias" or type(value) is kind
        if not is_fit:
            raise ValueError(f"{item.name} has another type")
    is_fit = all(type(token_id) is int and 0 <= token_id <= _MAX_TOKEN_ID for token_id in parameters.stop_token_ids)
    if not is_fit or not all(type(text) is str for text in parameters.stop):
        raise ValueError("a stop condition has another type")


def _count(text: str, most: int = _MAX_COUNT) -> int:
    """Returns a whole number from 0 to `most`; raises ValueError for anything else."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text) <= most):
        raise ValueError("no count")
    return int(text)
