"""The Python client, a whole stack on this machine, and the command line `outrider`.

OutriderClient   asyncio: streams, completes, resumes over several orchestrators
Conversation     many turns in one session
SyncClient       the same for scripts without an event loop
LocalStack       Redis, target, draft and orchestrator as processes of this machine
"""

from outrider.client.client import OutriderClient
from outrider.client.conversation import Conversation
from outrider.client.events import Accepted, Delta, Event, Finished, Generation, Statistics
from outrider.client.request import GenerationRequest, Message, Speculation
from outrider.client.retry import RetryPolicy
from outrider.client.stack import LocalStack
from outrider.client.stack_options import DraftOptions, StackOptions
from outrider.client.sync import SyncClient
from outrider.serving.tls import TlsFiles

__all__ = [
    "Accepted",
    "Conversation",
    "Delta",
    "DraftOptions",
    "Event",
    "Finished",
    "Generation",
    "GenerationRequest",
    "LocalStack",
    "Message",
    "OutriderClient",
    "RetryPolicy",
    "Speculation",
    "StackOptions",
    "Statistics",
    "SyncClient",
    "TlsFiles",
]
