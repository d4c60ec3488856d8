"""Tools of a request, and which of them the output must call: as tags of the model's own format of calls."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from orchestrator.http.body import Body
from orchestrator.http.structure import Structure, made, refusal
from orchestrator.http.tool_grammar import calls_grammar, json_rule, text_terminal
from orchestrator.text.messages import MAX_TOOLS, arguments_schema
from orchestrator.text.tool_formats import CallText, OutputFormat
from orchestrator.workers.model import Model
from outrider.constraint import FIELD, StructuralTag, StructuralTags
from outrider.errors import InvalidArgument
from outrider.grammar.source import schema_of
from outrider.v1 import generation_pb2


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


class AllowedTools(Body):
    """The tools that may be called, and whether one of them must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, fail_fast=True)]


class AllowedChoice(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_kind(value: Any) -> str:
    """Return the name of the body that a choice is read as, by its type."""
    kind = value.get("type") if isinstance(value, dict) else None
    return "AllowedChoice" if kind == "allowed_tools" else "NamedChoice"


ChoiceOfTool = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[NamedChoice, Tag("NamedChoice")] | Annotated[AllowedChoice, Tag("AllowedChoice")],
        Discriminator(choice_kind),
    ]
)


class Tools:
    """The tools of a request, and which of them its output calls.

    Args:
        functions: the tools.
        choice: none, auto or required.
        allowed: names of the tools that may be called; None for all.
        is_parallel: whether the output may have several calls.

    Raises:
        HttpError: there is no such tool, none at all, or there are too many.
    """

    def __init__(
        self, functions: Sequence[FunctionBody], choice: str, allowed: Sequence[str] | None, *, is_parallel: bool
    ) -> None:
        if len(functions) > MAX_TOOLS:
            raise refusal(f"tools has {len(functions)} tools, may have at most {MAX_TOOLS}", "tools")
        self._functions = functions
        self._choice = choice
        self._is_parallel = is_parallel
        names = {item.name for item in functions}
        if unknown := [name for name in allowed or () if name not in names]:
            raise refusal(f"tool_choice names {unknown[0][:80]!r}, which is none of the tools", "tool_choice")
        if choice == "required" and not functions:
            raise refusal("tool_choice is required, there are no tools", "tool_choice")
        chosen = names if allowed is None else set(allowed)
        self._callable = [item for item in functions if item.name in chosen]

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

        Free calls are constrained only where a tool is `strict`, some may not be called, or no second call is wanted.

        Args:
            structure: what it must follow where it is no call; None for free text.
            model: the model.

        Raises:
            HttpError: the model writes calls, or answers, in a form that the constraint cannot follow.
        """
        if structure is not None:
            _check_answers(structure, model)
        if not self.are_called:
            return structure
        if structure is not None and structure.constraint.kind not in ("json_schema", "json_object"):
            problem = f"{structure.field} does not go with tools, unless tool_choice is none: give a JSON schema"
            raise refusal(problem, structure.field)
        is_strict = any(item.strict for item in self._callable)
        is_free = self._is_parallel and not is_strict and not self._leaves_some_out
        if self._choice == "auto" and structure is None and is_free:
            return None
        field = self._field(structure, is_strict=is_strict)
        form = model.tokenizer.output_format if model.tokenizer is not None else None
        if form is None or form.call is None:
            raise refusal(f"{field} is not supported: this model's calls are not written as JSON", field)
        tags = self._tags(form.call)
        if self._choice == "auto" and (structure is not None or form.needs_tool):
            return self._calls_or_else(structure, tags, form, model, field)
        called = StructuralTags(tags, at_least_one=self._choice == "required", stop_after_first=not self._is_parallel)
        return made(field, structural_tags=called)

    def _calls_or_else(
        self, structure: Structure | None, tags: Sequence[StructuralTag], form: OutputFormat, model: Model, field: str
    ) -> Structure:
        """Return a constraint by which the output is calls from its beginning on, or what it must be else."""
        assert model.tokenizer is not None
        if structure is None:
            answer, whitespace = text_terminal(form.no_call), False
        else:
            whitespace = structure.constraint.any_whitespace
            answer = f"answer: {json_rule(_answer_schema(structure), any_whitespace=whitespace)}"
        grammar = calls_grammar(
            answer, tags, model.tokenizer.marker_tokens, any_whitespace=whitespace, is_parallel=self._is_parallel
        )
        return made(field, grammar=grammar)

    @property
    def _leaves_some_out(self) -> bool:
        return len(self._callable) < len(self._functions)

    def _field(self, structure: Structure | None, *, is_strict: bool) -> str:
        if self._choice == "required":
            return "tool_choice"
        if structure is not None:
            return structure.field
        if self._leaves_some_out:
            return "tool_choice"
        return "tools" if is_strict else "parallel_tool_calls"

    def _tags(self, call: CallText) -> list[StructuralTag]:
        tags = []
        for item in self._callable:
            is_followed = item.strict or self._choice == "required"
            try:
                schema = arguments_schema(item.name, item.parameters or {}) if is_followed else {}
                text = json.dumps(schema, ensure_ascii=False) if schema else ""
                if text:
                    schema_of(text)
                tags.append(call.tag(item.name, text))
            except InvalidArgument as error:
                told = error.message.removeprefix(f"{FIELD}: ")
                raise refusal(
                    told.replace("json_schema", f"tools: parameters of {item.name[:80]}", 1), "tools"
                ) from None
        return tags


def _answer_schema(structure: Structure) -> Any:
    """Return the schema of answers beside calls; raise `HttpError` for what would be refused without tools."""
    try:
        return schema_of(structure.constraint.json_schema or '{"type": "object"}')
    except InvalidArgument as error:
        raise refusal(f"{structure.field}: {error.message.removeprefix(FIELD).lstrip(': ')}", structure.field) from None


def _check_answers(structure: Structure, model: Model) -> None:
    """Raise `HttpError` where answers have a beginning of their own, which only a grammar could tell of."""
    if model.tokenizer is None or structure.constraint.kind == "grammar":
        return
    if model.tokenizer.output_format.template.marks_content:
        raise refusal(
            f"{structure.field} is not supported: this model writes a marker ahead of its answers", structure.field
        )


def tools_of(tools: Sequence[ToolBody] | None, choice: ChoiceOfTool | None, parallel: bool | None) -> Tools:
    """Return the tools of a request in OpenAI's form; raise `HttpError`."""
    kind: str
    allowed: list[str] | None
    match choice:
        case NamedChoice():
            kind, allowed = "required", [choice.function.name]
        case AllowedChoice():
            kind, allowed = choice.allowed_tools.mode, [item.function.name for item in choice.allowed_tools.tools]
        case _:
            kind, allowed = choice or "auto", None
    return Tools([item.function for item in tools or ()], kind, allowed, is_parallel=parallel is not False)
