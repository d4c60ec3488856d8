"""Outrider: distributed speculative decoding; the text is exactly the target model's own.

    from outrider import Client, SamplingParameters

    with Client("127.0.0.1:50050") as client:
        print(client.complete("Once upon a time", SamplingParameters(max_tokens=20)).text)

The names below are the Python client's and the local stack's; each is imported when it is first used, so that services
and tools that need other parts of this package do not load them. `outrider.errors` has all errors.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from outrider import errors
    from outrider.client import (
        Accepted,
        AsyncClient,
        Client,
        ClientClosed,
        ContentPart,
        Conversation,
        Delta,
        Event,
        Finished,
        Generation,
        GenerationRequest,
        Message,
        Notice,
        NoticeKind,
        OutputPart,
        ReasoningPart,
        RetryPolicy,
        Speculation,
        Statistics,
        SyncConversation,
        TlsFiles,
        Tool,
        ToolCall,
        ToolCallPart,
    )
    from outrider.constraint import Constraint, StructuralTag, StructuralTags
    from outrider.errors import OutriderError
    from outrider.local import DraftOptions, LocalStack, StackOptions
    from outrider.parameters import AcceptanceRule, FinishReason, SamplingParameters
    from outrider.tokens import TokenLogprobs, TokenOrigin

__all__ = [
    "AcceptanceRule",
    "Accepted",
    "AsyncClient",
    "Client",
    "ClientClosed",
    "Constraint",
    "ContentPart",
    "Conversation",
    "Delta",
    "DraftOptions",
    "Event",
    "FinishReason",
    "Finished",
    "Generation",
    "GenerationRequest",
    "LocalStack",
    "Message",
    "Notice",
    "NoticeKind",
    "OutputPart",
    "OutriderError",
    "ReasoningPart",
    "RetryPolicy",
    "SamplingParameters",
    "Speculation",
    "StackOptions",
    "Statistics",
    "StructuralTag",
    "StructuralTags",
    "SyncConversation",
    "TlsFiles",
    "TokenLogprobs",
    "TokenOrigin",
    "Tool",
    "ToolCall",
    "ToolCallPart",
    "errors",
]

# All others are in `outrider.client`.
_PLACES = {
    "AcceptanceRule": "parameters",
    "Constraint": "constraint",
    "DraftOptions": "local",
    "FinishReason": "parameters",
    "LocalStack": "local",
    "OutriderError": "errors",
    "SamplingParameters": "parameters",
    "StackOptions": "local",
    "StructuralTag": "constraint",
    "StructuralTags": "constraint",
    "TokenLogprobs": "tokens",
    "TokenOrigin": "tokens",
}

# Type checkers see the imports above, and so a name that does not exist.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Return a public name, or `errors`, importing it."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "errors":
            return import_module("outrider.errors")
        return getattr(import_module(f"outrider.{_PLACES.get(name, 'client')}"), name)

    def __dir__() -> list[str]:
        """Return the public names, those that were not imported yet among them."""
        return sorted({*globals(), *__all__})
