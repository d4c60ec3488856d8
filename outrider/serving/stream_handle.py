"""The address of a session on a stream between an orchestrator and a worker."""

from dataclasses import dataclass
from typing import Generic, TypeVar

StreamT_co = TypeVar("StreamT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class StreamHandle(Generic[StreamT_co]):
    """A session's handle on a stream; two are equal where both parts are.

    Attributes:
        stream: the stream; compared by identity.
        number: the handle that the orchestrator chose for the session on this stream.
    """

    stream: StreamT_co
    number: int
