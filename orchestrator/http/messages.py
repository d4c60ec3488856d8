"""Messages of a conversation in OpenAI's form, with calls of tools, their results and reasoning."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from orchestrator.http.body import Body
from orchestrator.http.structure import refusal
from outrider.v1 import generation_pb2


class TextPart(Body):
    """A part of a message's content."""

    ignored: ClassVar[frozenset[str]] = frozenset({"prompt_cache_breakpoint"})

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """The function that an answer called."""

    # Of messages that OpenAI's client has parsed.
    ignored: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})

    name: str
    arguments: str = ""


class ToolCallBody(Body):
    """A call that an answer made."""

    ignored: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    """One message of a conversation."""

    ignored: ClassVar[frozenset[str]] = frozenset({"parsed"})
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "refusal": (),
        "audio": (),
        "annotations": ([],),
        "function_call": (),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = Field(default=None, description="Of a tool; without effect in other messages.")
    tool_calls: Annotated[list[ToolCallBody], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(default=None, description="Of an answer: the reasoning that preceded it.")
    reasoning: str | None = Field(default=None, description="Another name of `reasoning_content`.")

    @property
    def text(self) -> str:
        """The content; parts are joined by a line break, as in vLLM."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    @property
    def template_role(self) -> str:
        """The role that chat templates know."""
        return "system" if self.role == "developer" else self.role

    def message(self) -> generation_pb2.ChatMessage:
        """Return the message of generation.proto."""
        calls = [
            generation_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in self.tool_calls or ()
        ]
        return generation_pb2.ChatMessage(
            role=self.template_role,
            content=self.text,
            reasoning=self.reasoning_content or self.reasoning or "",
            tool_calls=calls,
            tool_call_id=self.tool_call_id or "",
            name=(self.name or "") if self.role == "tool" else "",
        )


def chat_messages(messages: Sequence[ChatMessage]) -> list[generation_pb2.ChatMessage]:
    """Return messages of generation.proto; raise `HttpError` for one without a content, which only answers may lack."""
    for number, item in enumerate(messages):
        where = f"messages[{number}]"
        if item.content is None and item.role != "assistant":
            raise refusal(f"{where}.content: Field required", f"{where}.content")
        if item.tool_calls and item.role != "assistant":
            raise refusal(f"{where}.tool_calls goes with role assistant", f"{where}.tool_calls")
        if item.tool_call_id and item.role != "tool":
            raise refusal(f"{where}.tool_call_id goes with role tool", f"{where}.tool_call_id")
    return [item.message() for item in messages]
