"""Outputs with parts: which requests have them, and what their parts add up to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from orchestrator.http.structure import Structure
from orchestrator.http.tools import Tools
from orchestrator.workers.model import Model
from outrider.constraint import FIELD
from outrider.v1 import generation_pb2


@dataclass(slots=True)
class CallSoFar:
    """A call of a tool, or some pieces of it; `id` and `name` are empty behind the first."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Said:
    """What some parts add up to."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallSoFar] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[generation_pb2.OutputPart]) -> Self:
        """Return what parts add up to."""
        said = cls()
        calls: dict[int, CallSoFar] = {}
        for part in parts:
            said.content += part.content
            said.reasoning += part.reasoning
            if part.WhichOneof("kind") == "tool_call":
                piece = part.tool_call
                call = calls.setdefault(piece.index, CallSoFar(piece.index))
                call.id += piece.id
                call.name += piece.name
                call.arguments += piece.arguments
        said.calls = list(calls.values())
        return said


def parse(message: generation_pb2.GenerateRequest, tools: Tools, model: Model) -> bool:
    """Request the parts of a chat's output, where it can have any; return whether it is so."""
    if model.tokenizer is None:
        return False
    has_reasoning = model.tokenizer.output_format.template.reasoning is not None
    # Only what is true is set: a field that is present changes the request's fingerprint.
    if has_reasoning:
        message.chat.output_parsing.reasoning = True
    if tools.are_called:
        message.chat.output_parsing.tool_calls = True
    return has_reasoning or tools.are_called


def names_with(names: Mapping[str, str], structure: Structure | None) -> Mapping[str, str]:
    """Return a route's names of fields, with the one that its constraint came from."""
    return names if structure is None else {**names, FIELD: structure.field}
