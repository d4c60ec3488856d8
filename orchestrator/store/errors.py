"""Errors of the session store: from the codes of Redis's answers and the outcomes of scripts to Outrider's errors.

A message names the problem, and never where Redis is, nor what was sent to it.
"""

import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NoReturn

from redis import exceptions

from orchestrator.store.sessions import Lease, NewRequest
from outrider.errors import (
    DataLoss,
    DuplicateRequest,
    Fenced,
    InvalidArgument,
    ModelMismatch,
    OutriderError,
    Overloaded,
    RequestNotFound,
    SessionBusy,
    SessionNotFound,
    Unavailable,
)

_CODE: Final = re.compile(r"\b[A-Z]{3,}\b")
_FULL_RETRY_S: Final = 5.0


class NotDurable(exceptions.RedisError):
    """A write was accepted, but did not become durable in time; it may count later."""


class SessionLost(DataLoss):
    """The server has no record of a session that was not deleted: it expired, or the server has lost it."""


def _refuses(problem: str) -> Callable[[], OutriderError]:
    return lambda: Unavailable(f"the session store refuses this service: {problem}")


def _takes_no_writes(problem: str) -> Callable[[], OutriderError]:
    return lambda: Unavailable(f"the session store takes no writes: {problem}")


_ERRORS: Final[Mapping[str, Callable[[], OutriderError]]] = {
    "NOAUTH": _refuses("it requires a password"),
    "WRONGPASS": _refuses("user or password is wrong"),
    "NOPERM": _refuses("its user lacks a permission"),
    "ACL": _refuses("its user lacks a permission"),  # from within a script
    "DENIED": _refuses("it is in protected mode, and has no password"),
    "READONLY": _takes_no_writes("it is a replica"),
    "MASTERDOWN": _takes_no_writes("it is a replica without its primary"),
    "NOREPLICAS": _takes_no_writes("it has too few replicas"),
    "MISCONF": _takes_no_writes("it cannot write to its disk"),
    "CLUSTERDOWN": _takes_no_writes("its cluster is down"),
    "MOVED": _takes_no_writes("it is one node of a cluster"),
    "TRYAGAIN": _takes_no_writes("its cluster is moving keys"),
    "LOADING": _takes_no_writes("it is loading its data"),
    "BUSY": _takes_no_writes("a script does not end"),
    "OOM": lambda: Overloaded("the session store is out of memory", retry_after_s=_FULL_RETRY_S),
    "WRONGTYPE": lambda: DataLoss("a key has another type"),
}


def translation(error: Exception) -> OutriderError | None:
    """Return the error for clients, caused by one of redis-py; None for one that stands for a bug.

    It is `Overloaded` where Redis is out of memory, `DataLoss` where a key has another type than the store writes
    there, and `Unavailable` where Redis does not answer within the bound, refuses this service, or takes no writes.
    """
    known = _translation(error) if isinstance(error, exceptions.RedisError | OSError) else None
    if known is not None:
        known.__cause__ = error
    return known


def _translation(error: Exception) -> OutriderError | None:
    if isinstance(error, NotDurable):
        return Unavailable(f"the session store has not made a write durable: {error}")
    # Redis 6.2 wraps the error of a command inside a script in a sentence of its own: the code may be anywhere.
    for code in _CODE.findall(f"{getattr(error, 'status_code', None) or ''} {error}"):
        if code in _ERRORS:
            return _ERRORS[code]()
    if isinstance(error, exceptions.AuthenticationError):
        return _ERRORS["WRONGPASS"]()
    if isinstance(error, exceptions.InvalidResponse):
        return Unavailable("the session store is no Redis")
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
        # redis-py raises its own error for that of the connection, which then is only the context.
        match error.__context__:
            case ssl.SSLCertVerificationError():
                return Unavailable("the certificate of the session store is not of an authority that is trusted")
            case FileNotFoundError() | PermissionError():
                return Unavailable("a file that the URL of the session store names cannot be read")
        return Unavailable("the session store does not answer")
    return None


def of_session(session_id: str, error: DataLoss) -> DataLoss:
    """Return a `DataLoss` with the session's id."""
    return DataLoss(f"session {session_id}: {error.message}")


@contextmanager
def session_named(session_id: str) -> Iterator[None]:
    """Add the session's id to a `DataLoss`."""
    try:
        yield
    except DataLoss as error:
        raise of_session(session_id, error) from error


def check_lease(outcome: bytes, lease: Lease) -> None:
    """Raise the error of a script that runs under a lease; nothing for the outcome `ok`."""
    if outcome == b"fenced":
        raise Fenced(f"fencing token {lease.fencing_token} is no longer in force")
    if outcome == b"deleted":
        raise SessionNotFound("the session was deleted")
    if outcome == b"gone":
        raise SessionLost(f"session {lease.session_id} is not there any more")
    if outcome == b"data_loss":
        raise DataLoss(f"session {lease.session_id}: its record or its token log differs from the commits")


def refuse(outcome: str, request: NewRequest) -> NoReturn:
    """Raise the error for a request that lua/begin.lua refused."""
    errors: dict[str, OutriderError] = {
        "not_found": SessionNotFound("there is no such session"),
        "no_request": RequestNotFound(f"the session's latest request is not {request.request_id}"),
        "other_model": ModelMismatch("the session was made with another model"),
        "duplicate": DuplicateRequest(f"request id {request.request_id} was used for another request"),
        "busy": SessionBusy("a request is running on the session"),
        "other_length": SessionBusy("another request changed the session meanwhile"),
        "too_long": InvalidArgument(f"the session would have no room left of {request.max_len} tokens", "prompt"),
        "data_loss": DataLoss(f"session {request.session_id}: its record or its token log differs from the commits"),
    }
    raise errors[outcome]
