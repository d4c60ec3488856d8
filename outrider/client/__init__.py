"""The Python client of Outrider, with the local stack's names for those who start one beside it.

AsyncClient      asyncio: streams, completes, resumes over several orchestrators
Conversation     many turns in one session
Client           the same for scripts without an event loop
LocalStack       Redis, target, draft and orchestrator as processes of this machine (`outrider.local`)

`from outrider import Client` gives the same names. `OutriderClient` and `SyncClient` are earlier names of the clients.
"""

from typing import TYPE_CHECKING, Any

from outrider.client.client import AsyncClient, OutriderClient
from outrider.client.conversation import Conversation
from outrider.client.events import Accepted, Delta, Event, Finished, Generation, Notice, NoticeKind
from outrider.client.parts import ContentPart, OutputPart, ReasoningPart, ToolCallPart
from outrider.client.request import GenerationRequest, Message, Speculation, Tool, ToolCall
from outrider.client.retry import ClientClosed, RetryPolicy
from outrider.client.statistics import Statistics
from outrider.client.sync import Client, SyncClient, SyncConversation
from outrider.serving.tls import TlsFiles

if TYPE_CHECKING:
    from outrider.local import DraftOptions, LocalStack, StackOptions

__all__ = [
    "Accepted",
    "AsyncClient",
    "Client",
    "ClientClosed",
    "ContentPart",
    "Conversation",
    "Delta",
    "DraftOptions",
    "Event",
    "Finished",
    "Generation",
    "GenerationRequest",
    "LocalStack",
    "Message",
    "Notice",
    "NoticeKind",
    "OutputPart",
    "OutriderClient",
    "ReasoningPart",
    "RetryPolicy",
    "Speculation",
    "StackOptions",
    "Statistics",
    "SyncClient",
    "SyncConversation",
    "TlsFiles",
    "Tool",
    "ToolCall",
    "ToolCallPart",
]

_LOCAL = frozenset({"DraftOptions", "LocalStack", "StackOptions"})


def __getattr__(name: str) -> Any:
    """Return a name of `outrider.local`, which imports this package, and is imported when it is asked for only."""
    if name not in _LOCAL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outrider import local

    return getattr(local, name)
