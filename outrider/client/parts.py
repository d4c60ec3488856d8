"""The parts of an output: content, reasoning, calls of tools."""

from dataclasses import dataclass
from typing import TypeAlias

from outrider.errors import DataLoss
from outrider.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class ContentPart:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A call of a tool, or the next piece of its arguments.

    Attributes:
        index: number of the call within the output, from 0.
        id: of the call, in its first piece only.
        name: of the tool, in the first piece only.
        arguments: the next piece of the arguments, which are a JSON object as text.
    """

    index: int
    id: str
    name: str
    arguments: str


OutputPart: TypeAlias = ContentPart | ReasoningPart | ToolCallPart


def part_from_message(message: generation_pb2.OutputPart) -> OutputPart:
    """Return the part; raise `DataLoss` for one of an unknown kind."""
    match message.WhichOneof("kind"):
        case "content":
            return ContentPart(message.content)
        case "reasoning":
            return ReasoningPart(message.reasoning)
        case "tool_call":
            call = message.tool_call
            return ToolCallPart(call.index, call.id, call.name, call.arguments)
        case unknown:
            raise DataLoss(f"the stream has a part of unknown kind {unknown}")
