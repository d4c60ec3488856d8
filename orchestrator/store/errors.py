"""What Redis's errors mean to clients: the one table, from the codes of its answers to Outrider's errors.

A message says what is wrong, and never where Redis is, nor what was sent to it.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeVar

from redis import exceptions

from orchestrator.store.scripts import NotDurable
from outrider.errors import DataLoss, OutriderError, Overloaded, Unavailable

_CODE: Final = re.compile(r"\b[A-Z]{3,}\b")
_FULL_RETRY_S: Final = 5.0

T = TypeVar("T")


def _refuses(problem: str) -> Callable[[], OutriderError]:
    return lambda: Unavailable(f"the session store refuses this service: {problem}")


def _rests(problem: str) -> Callable[[], OutriderError]:
    return lambda: Unavailable(f"the session store takes no writes: {problem}")


_ERRORS: Final[Mapping[str, Callable[[], OutriderError]]] = {
    "NOAUTH": _refuses("it wants a password"),
    "WRONGPASS": _refuses("user or password is wrong"),
    "NOPERM": _refuses("its user may not do what is needed"),
    "ACL": _refuses("its user may not do what is needed"),  # from within a script
    "DENIED": _refuses("it is in protected mode, and has no password"),
    "READONLY": _rests("it is a replica"),
    "MASTERDOWN": _rests("it is a replica without its primary"),
    "NOREPLICAS": _rests("it has too few replicas"),
    "MISCONF": _rests("it cannot write to its disk"),
    "CLUSTERDOWN": _rests("its cluster is down"),
    "MOVED": _rests("it is one node of a cluster"),
    "TRYAGAIN": _rests("its cluster is moving keys"),
    "LOADING": _rests("it is loading its data"),
    "BUSY": _rests("a script does not end"),
    "OOM": lambda: Overloaded("the session store is out of memory", retry_after_s=_FULL_RETRY_S),
    "WRONGTYPE": lambda: DataLoss("what is kept of it has another type"),
}


async def named(call: Awaitable[T]) -> T:
    """Returns what a call to Redis gives.

    Raises:
        Overloaded: Redis is out of memory.
        Unavailable: Redis does not answer within the bound, refuses this service, or takes no writes.
        DataLoss: what is there has another type than it was written with.
    """
    try:
        return await call
    except (exceptions.RedisError, OSError) as error:
        meaning = _meaning(error)
        if meaning is None:
            raise
        raise meaning from error


def _meaning(error: Exception) -> OutriderError | None:
    """Returns what an error stands for; None for one that stands for a bug."""
    if isinstance(error, NotDurable):
        return Unavailable(f"the session store has not made a write durable: {error}")
    # Redis 6.2 wraps what a command inside a script answered in a sentence of its own: the code may stand anywhere.
    for code in _CODE.findall(f"{getattr(error, 'status_code', None) or ''} {error}"):
        if code in _ERRORS:
            return _ERRORS[code]()
    if isinstance(error, exceptions.AuthenticationError):
        return _ERRORS["WRONGPASS"]()
    if isinstance(error, exceptions.InvalidResponse):
        return Unavailable("the session store is no Redis")
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
        return Unavailable("the session store does not answer")
    return None
