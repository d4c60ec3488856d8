"""The record of a session, as Redis holds it: its hash, its keys, its token log in bytes."""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from outrider.constraint import Constraint
from outrider.errors import DataLoss, InvalidArgument
from outrider.parameters import MAX_SEED, AcceptanceRule, FinishReason, SamplingParameters
from outrider.tenants import cache_salt

_MAX_COUNT: Final = 2**53 - 1
"""The largest integer that Redis's scripts count exactly."""
_MAX_DIGITS: Final = 20
_MAX_TOKEN_ID: Final = 2**32 - 1
TOKEN_BYTES: Final = 4
"""Bytes of a token in the log."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as Redis holds it.

    Attributes:
        tenant: its owner.
        session_id: the client's name for it.
        created: fencing token of its first lease; distinguishes it from an earlier session of the same name.
        model: fingerprint of the target's model.
        tokenizer: fingerprint of the target's tokenizer.
        request_id: the latest request.
        request_fingerprint: hash of all fields of the client's request.
        parameters: of the latest request, seed included.
        rule: acceptance rule of the latest request.
        begun: when the latest request began, microseconds of Redis's clock.
        prompt_start: session length before the latest request's prompt.
        prompt_len: session length where the latest request's output begins.
        committed_len: tokens in the log.
        fencing_token: of the latest lease.
        deadline: when that lease ends, microseconds of Redis's clock; 0 when it was released.
        finish_reason: why the latest request ended; None while it has not.
        cancelled: whether the latest request was cancelled.
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
    begun: int
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
        """The session's name at workers: unique over tenants, and over sessions of the same name."""
        return worker_key(self.tenant, self.session_id, self.created)

    @property
    def cache_salt(self) -> bytes:
        """Salt that keeps tenants from sharing, and so from probing, each other's KV cache."""
        return cache_salt(self.tenant)

    def has_finished(self, request_id: str) -> bool:
        """Return whether this is the latest request, and it has ended."""
        return self.request_id == request_id and self.finish_reason is not None

    @classmethod
    def from_hash(cls, fields: Mapping[bytes, bytes], tenant: str, session_id: str) -> "SessionRecord":
        """Return the record of a Redis hash.

        Args:
            fields: of the hash.
            tenant: the tenant that the record must have.
            session_id: the session id that the record must have.

        Raises:
            DataLoss: a field is missing, or has a value that this class does not write.
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
        """Return the record of its fields; raise LookupError or ValueError for others than those of `to_hash`."""
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
            begun=_count(text["begun"]),
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
        """Return the fields of the Redis hash that do not change while the request runs."""
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
            "begun": self.begun,
            "prompt_start": self.prompt_start,
            "prompt_len": self.prompt_len,
            "cancelled": "0",
            "owner": "",
            "target": self.target,
        }


def worker_key(tenant: str, session_id: str, created: object) -> str:
    """Return the name of a session at workers; `created` is the fencing token of its first lease."""
    return f"{session_tag(tenant, session_id)}.{created}"


def session_tag(tenant: str, session_id: str) -> str:
    """Return the hash of a session's ids for keys of Redis and for workers; no other pair of ids has the same."""
    # The length in front makes the text unique to the pair.
    return hashlib.sha256(f"{len(tenant)}:{tenant}{session_id}".encode()).hexdigest()


def redis_keys(tenant: str, session_id: str) -> tuple[str, str, str]:
    """Return the keys of a session: its hash, its token log, the mark that it was deleted; in one hash slot."""
    tag = session_tag(tenant, session_id)
    return f"outrider:{{{tag}}}:session", f"outrider:{{{tag}}}:log", f"outrider:{{{tag}}}:deleted"


def packed(token_ids: Sequence[int]) -> bytes:
    """Return token ids as they stand in the log: 4 bytes each, little endian."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpacked(data: bytes) -> list[int]:
    """Return the token ids of a part of the log."""
    return list(struct.unpack(f"<{len(data) // TOKEN_BYTES}I", data))


def is_derived(tenant: str, session_id: str, request_id: str) -> bool:
    """Return whether a session is that of a request without one."""
    return session_id == derived_session_id(tenant, request_id)


def derived_session_id(tenant: str, request_id: str) -> str:
    """Return the session id of a request without one: the same for every repetition of the request."""
    return hashlib.sha256(f"{tenant}\0{request_id}".encode()).hexdigest()[:32]


def parameters_to_json(parameters: SamplingParameters) -> str:
    """Return the parameters as JSON."""
    values = parameters.as_dict()
    if values["constraint"] is None:
        # An orchestrator of the release before, beside this one during an update, does not know the name.
        del values["constraint"]
    return json.dumps(values, sort_keys=True)


def parameters_from_json(text: str) -> SamplingParameters:
    """Return the parameters of `parameters_to_json`; raise ValueError for any other text."""
    try:
        values: dict[str, Any] = json.loads(text)
        biases = {_count(token_id, _MAX_TOKEN_ID): bias for token_id, bias in values["logit_bias"].items()}
        lists = {name: values[name] for name in ("stop", "stop_token_ids")}
        if any(type(value) is not list for value in lists.values()):
            raise ValueError("a stop condition has another type")
        tuples = {name: tuple(value) for name, value in lists.items()}
        known = values.get("constraint")
        constraint = None if known is None else Constraint.from_dict(known)
        parameters = SamplingParameters(**values | tuples | {"logit_bias": biases, "constraint": constraint})
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError, InvalidArgument) as error:
        raise ValueError("no sampling parameters") from error
    _check_types(parameters)
    return parameters


def _check_types(parameters: SamplingParameters) -> None:
    """Raise ValueError where a value has a type that the workers' messages do not take."""
    for item in fields(parameters):
        value = getattr(parameters, item.name)
        if item.name == "constraint":
            continue  # checks its types itself
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
    """Return a whole number from 0 to `most`; raise ValueError for anything else."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text) <= most):
        raise ValueError("not a count")
    return int(text)
