"""Outputs with parts: which requests have them, and what their parts add up to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from orchestrator.http.structure import Structure
from orchestrator.http.tools import Tools
from orchestrator.text.reasoning import expected_reasoning_end
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
    parsing = message.chat.output_parsing
    parsing.reasoning = model.tokenizer.output_format.template.reasoning is not None
    parsing.tool_calls = tools.are_called
    return parsing.reasoning or parsing.tool_calls


def behind_reasoning(structure: Structure | None, model: Model, variables: Mapping[str, Any]) -> Structure | None:
    """Return what an answer must follow, from behind the reasoning on with which it is expected to begin.

    Args:
        structure: what it must follow; None for free text.
        model: the model.
        variables: of the chat template.
    """
    if structure is None or model.tokenizer is None:
        return structure
    end = expected_reasoning_end(model.tokenizer, variables)
    return structure._replace(constraint=replace(structure.constraint, reasoning_end=end))


def names_with(names: Mapping[str, str], structure: Structure | None) -> Mapping[str, str]:
    """Return a route's names of fields, with the one that its constraint came from."""
    return names if structure is None else {**names, FIELD: structure.field}
