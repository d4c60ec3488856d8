"""The body of POST /v1/responses: its input items, its tools, and the form of its text."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from orchestrator.http.bodies import GenerationBody, Sampling, Tokens, bounded
from orchestrator.http.body import Body
from orchestrator.http.tools import FunctionBody, choice_kind

_MAX_METADATA: Final = 16
"""Entries of `metadata`, as OpenAI documents it."""


class InputPart(Body):
    """A part of a message's content; what earlier answers carry besides their text is accepted with them."""

    ignored: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint", "parsed"})

    type: Literal["input_text", "output_text"]
    text: str


class _Item(Body):
    """What input items share: fields of earlier outputs that say nothing to the model."""

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})


class InputMessage(_Item):
    """One message of the input."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(fail_fast=True)]


class FunctionCallItem(_Item):
    """A call that an earlier answer made."""

    ignored: ClassVar[frozenset[str]] = _Item.ignored | frozenset({"caller", "namespace", "async", "parsed_arguments"})

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(_Item):
    """The result of a call."""

    ignored: ClassVar[frozenset[str]] = _Item.ignored | frozenset({"name", "caller", "namespace"})

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputPart], Field(fail_fast=True)]


class ReasoningPart(Body):
    """A part of the reasoning of an earlier answer."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    """The reasoning of an earlier answer; a summary of it is left out."""

    ignored: ClassVar[frozenset[str]] = _Item.ignored | frozenset({"encrypted_content", "summary"})

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None


_ITEMS: Mapping[str, str] = {
    "message": "InputMessage",
    "function_call": "FunctionCallItem",
    "function_call_output": "FunctionOutputItem",
    "reasoning": "ReasoningItem",
}


def _kind_of(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else "message"
    return _ITEMS.get(kind, "InputMessage") if isinstance(kind, str) else "InputMessage"


InputItem = Annotated[
    Annotated[InputMessage, Tag("InputMessage")]
    | Annotated[FunctionCallItem, Tag("FunctionCallItem")]
    | Annotated[FunctionOutputItem, Tag("FunctionOutputItem")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")],
    Discriminator(_kind_of),
]


class TextFormat(Body):
    """The form of the output's text."""

    ignored: ClassVar[frozenset[str]] = frozenset({"description", "strict"})

    type: Literal["text", "json_object", "json_schema"]
    name: str = "schema"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(Body):
    """The text of the output."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ReasoningOptions(Body):
    """How the model reasons, which no field changes here."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "effort": ("none",),
        "summary": (),
        "generate_summary": (),
        "context": ("auto",),
        "mode": ("standard",),
    }


class ResponsesStreamOptions(Body):
    """Options of a stream."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}


class ResponseTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def function(self) -> FunctionBody:
        """The function as chat completions have it."""
        values = {name: getattr(self, name) for name in ("name", "description", "parameters", "strict")}
        return FunctionBody(**values)


class NamedFunctionChoice(Body):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class AllowedFunctionsChoice(Body):
    """The tools that may be called, and whether one of them must be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunctionChoice], Field(min_length=1, fail_fast=True)]


FunctionChoice = Annotated[
    Annotated[NamedFunctionChoice, Tag("NamedChoice")] | Annotated[AllowedFunctionsChoice, Tag("AllowedChoice")],
    Discriminator(choice_kind),
]


class ResponsesBody(Sampling, GenerationBody):
    """POST /v1/responses."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "max_tool_calls",
        }
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "previous_response_id": (),
        "conversation": (),
        "context_management": ([],),
        # Reasoning is in no encrypted form: it is in the output as text.
        "include": ([], ["reasoning.encrypted_content"]),
        "moderation": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    input: str | Annotated[list[InputItem], Field(fail_fast=True)]
    instructions: str | None = Field(default=None, description="A system message in front of the input.")
    max_output_tokens: Tokens | None = Field(default=None, description="Absent: as many as fit.")
    metadata: Annotated[dict[str, str], BeforeValidator(bounded(_MAX_METADATA))] | None = None
    store: bool | None = Field(default=None, description="Responses are not stored: true is refused.")
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: ResponsesStreamOptions | None = None
