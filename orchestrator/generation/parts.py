"""Parts of an output as messages of generation.proto."""

import hashlib
from collections.abc import Iterable
from typing import Final

from orchestrator.text.parts import CallPiece, Content, Part, Reasoning
from outrider.v1 import generation_pb2

_ID_CHARS: Final = 9
"""Of an id: letters and digits, since the chat templates of Mistral take no others."""


class PartWriter:
    """Writes the parts of one request's output.

    Args:
        request_id: of the request, from which the ids of its calls follow, so that they are the same in every replay.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def messages(self, parts: Iterable[Part]) -> list[generation_pb2.OutputPart]:
        """Return the messages."""
        return [self._message(part) for part in parts]

    def _message(self, part: Part) -> generation_pb2.OutputPart:
        match part:
            case Content(text):
                return generation_pb2.OutputPart(content=_valid(text))
            case Reasoning(text):
                return generation_pb2.OutputPart(reasoning=_valid(text))
            case CallPiece(index, name, arguments):
                piece = generation_pb2.ToolCallPart(
                    index=index, id=self._id(index) if name else "", name=_valid(name), arguments=_valid(arguments)
                )
                return generation_pb2.OutputPart(tool_call=piece)

    def _id(self, index: int) -> str:
        return hashlib.sha256(f"{self._request_id}.{index}".encode()).hexdigest()[:_ID_CHARS]


def _valid(text: str) -> str:
    """Return a text without halves of characters, which escapes of JSON may stand for."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
