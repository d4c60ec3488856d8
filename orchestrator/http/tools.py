"""Tools of a request, and which of them the output must call: as tags of the model's own format of calls."""

import json
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

from pydantic import Field

from orchestrator.http.body import Body
from orchestrator.http.structure import Structure, made, refusal
from orchestrator.text.tokenizer import Tokenizer
from orchestrator.text.tool_formats import CallText
from orchestrator.workers.model import Model
from outrider.constraint import Constraint, StructuralTag, StructuralTags
from outrider.errors import InvalidArgument
from outrider.v1 import generation_pb2

_COMPACT: Final = {"x-guidance": {"whitespace_flexible": False}}
"""Has llguidance write a schema's JSON without white space."""


class FunctionBody(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        default=None, description="Whether calls follow the schema also where none is required."
    )


class ToolBody(Body):
    """A tool: a function."""

    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedChoice(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


ChoiceOfTool = Literal["none", "auto", "required"] | NamedChoice


class Tools:
    """The tools of a request, and which of them its output calls.

    Args:
        functions: the tools.
        choice: none, auto, required, or the name of one in `named`.
        named: the tool that must be called; empty for none.
        is_parallel: whether the output may have several calls.

    Raises:
        HttpError: there is no such tool, or none at all.
    """

    def __init__(self, functions: Sequence[FunctionBody], choice: str, named: str, *, is_parallel: bool) -> None:
        self._functions = functions
        self._choice = choice
        self._is_parallel = is_parallel
        self._callable = [item for item in functions if not named or item.name == named]
        if choice == "required" and not self._callable:
            missing = (
                f"names {named[:80]!r}, which is none of the tools" if named else "is required, there are no tools"
            )
            raise refusal(f"tool_choice {missing}", "tool_choice")

    @property
    def are_called(self) -> bool:
        """Whether calls in the output are calls, and not text."""
        return bool(self._functions) and self._choice != "none"

    def add_to(self, chat: generation_pb2.Chat) -> None:
        """Add the tools to a chat."""
        for item in self._functions:
            parameters = "" if item.parameters is None else json.dumps(item.parameters, ensure_ascii=False)
            chat.tools.add(name=item.name, description=item.description or "", parameters=parameters)

    def constrained(self, structure: Structure | None, model: Model) -> Structure | None:
        """Return what the output must follow, calls included; None where it is free.

        Free calls are constrained only where a tool is `strict`, or no second call is wanted.

        Args:
            structure: what it must follow where it is no call; None for free text.
            model: the model.

        Raises:
            HttpError: the model writes calls in a form that no constraint can follow.
        """
        if not self.are_called:
            return structure
        is_strict = any(item.strict for item in self._callable)
        if self._choice == "auto" and structure is None and self._is_parallel and not is_strict:
            return None
        field = self._field(structure, is_strict=is_strict)
        call = model.tokenizer.output_format.call if model.tokenizer is not None else None
        if call is None:
            raise refusal(f"{field} is not supported: this model's calls are not written as JSON", field)
        if self._choice == "auto" and structure is not None and model.tokenizer is not None:
            tags = [call.tag(item.name, "") for item in self._callable]
            return _either(structure, self._callable, tags, model.tokenizer, is_parallel=self._is_parallel)
        called = StructuralTags(
            self._tags(call), at_least_one=self._choice == "required", stop_after_first=not self._is_parallel
        )
        return made(field, structural_tags=called)

    def _field(self, structure: Structure | None, *, is_strict: bool) -> str:
        if self._choice == "required":
            return "tool_choice"
        if structure is not None:
            return structure.field
        return "tools" if is_strict else "parallel_tool_calls"

    def _tags(self, call: CallText) -> list[StructuralTag]:
        tags = []
        for item in self._callable:
            is_followed = item.strict or self._choice == "required"
            schema = json.dumps(item.parameters, ensure_ascii=False) if item.parameters and is_followed else ""
            try:
                tags.append(call.tag(item.name, schema))
            except InvalidArgument as error:
                raise refusal(error.message, "tools") from None
        return tags


def tools_of(tools: Sequence[ToolBody] | None, choice: ChoiceOfTool | None, parallel: bool | None) -> Tools:
    """Return the tools of a request in OpenAI's form; raise `HttpError`."""
    named = choice.function.name if isinstance(choice, NamedChoice) else ""
    kind = "required" if isinstance(choice, NamedChoice) else choice or "auto"
    return Tools([item.function for item in tools or ()], kind, named, is_parallel=parallel is not False)


def _either(
    structure: Structure,
    functions: Sequence[FunctionBody],
    tags: Sequence[StructuralTag],
    tokenizer: Tokenizer,
    *,
    is_parallel: bool,
) -> Structure:
    """Return a constraint by which the output is calls, or what it must be else."""
    known = structure.constraint
    if known.kind not in ("json_schema", "json_object"):
        problem = f"{structure.field} does not go with tools, unless tool_choice is none: give a JSON schema"
        raise refusal(problem, structure.field)
    schema: Any = json.loads(known.json_schema) if known.json_schema is not None else {"type": "object"}
    rules = [
        "start: answer | calls",
        f"answer: {_json_rule(schema, known)}",
        r'calls: call ("\n"? call)*' if is_parallel else "calls: call",
        f"call: {' | '.join(f'call_{number}' for number in range(len(functions)))}",
    ]
    for number, (item, tag) in enumerate(zip(functions, tags, strict=True)):
        arguments = item.parameters if item.parameters and item.strict else {"type": "object"}
        begin, end = (_text_rule(text, tokenizer) for text in (tag.begin, tag.end))
        rules.append(f"call_{number}: {begin} arguments_{number} {end}".rstrip())
        rules.append(f"arguments_{number}: {_json_rule(arguments, known)}")
    return made(structure.field, grammar="\n".join(rules) + "\n")


def _text_rule(text: str, tokenizer: Tokenizer) -> str:
    """Return a text in llguidance's dialect of Lark, in which special tokens are no text but stand by their ids."""
    markers = {marker: token_id for token_id, marker in tokenizer.marker_tokens.items()}
    pieces = re.split(f"({'|'.join(map(re.escape, markers))})", text) if markers else [text]
    return " ".join(f"<[{markers[piece]}]>" if piece in markers else json.dumps(piece) for piece in pieces if piece)


def _json_rule(schema: Any, known: Constraint) -> str:
    compact = {} if known.any_whitespace or not isinstance(schema, dict) else _COMPACT
    return f"%json {json.dumps({**schema, **compact} if isinstance(schema, dict) else schema)}"
