"""Messages, tools and calls in Ollama's form: arguments are objects, and calls need no ids."""

from collections.abc import Iterable, Mapping, Sequence
from json import dumps, loads
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from orchestrator.api.prompts import MAX_CALLS
from orchestrator.http.body import Body
from orchestrator.http.messages import CalledFunction, ChatMessage, ToolCallBody
from orchestrator.http.parsing import CallSoFar, Said
from outrider.v1 import generation_pb2


class OllamaFunction(Body):
    """The function that an answer called."""

    ignored: ClassVar[frozenset[str]] = frozenset({"index", "description"})

    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(Body):
    """A call that an answer made."""

    ignored: ClassVar[frozenset[str]] = frozenset({"type"})

    id: str | None = None
    function: OllamaFunction


class OllamaMessage(Body):
    """One message of a conversation."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"images": ([],)}

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def chat_messages_of(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """Return messages in OpenAI's form; calls without an id get one, and results go to the calls of their names."""
    open_calls: list[ToolCallBody] = []  # of the latest answer with calls, 128 at most
    num_calls = 0
    whole: list[ChatMessage] = []
    for item in messages:
        calls = [_call(call, num_calls + number) for number, call in enumerate(item.tool_calls or ())]
        num_calls += len(calls)
        open_calls = calls.copy() or open_calls
        whole.append(
            ChatMessage(
                role=item.role,
                content=item.content,
                name=item.tool_name,
                tool_calls=calls or None,
                tool_call_id=_answered(item, open_calls) if item.role == "tool" else None,
                reasoning_content=item.thinking,
            )
        )
    return whole


def _call(call: OllamaCall, number: int) -> ToolCallBody:
    arguments = dumps(call.function.arguments or {}, ensure_ascii=False)
    # Of nine letters and digits, since some chat templates take no other ids.
    call_id = call.id or f"call{number:05d}"
    return ToolCallBody(id=call_id, function=CalledFunction(name=call.function.name, arguments=arguments))


def _answered(result: OllamaMessage, open_calls: list[ToolCallBody]) -> str | None:
    """Return the id of the call that a result is of, which is open no longer; None where there is none."""
    for number, call in enumerate(open_calls):
        is_named = result.tool_name in (None, "", call.function.name)
        if result.tool_call_id == call.id or (not result.tool_call_id and is_named):
            return open_calls.pop(number).id
    return result.tool_call_id or None


class WholeCalls:
    """Calls put together from their pieces: Ollama's clients get each of them whole."""

    def __init__(self) -> None:
        self._open: CallSoFar | None = None

    def push(self, parts: Iterable[generation_pb2.OutputPart]) -> Said:
        """Return what parts add up to, with the calls that they end."""
        said, calls = Said(), []
        for part in parts:
            said.content += part.content
            said.reasoning += part.reasoning
            piece = part.tool_call if part.WhichOneof("kind") == "tool_call" else None
            if piece is None or self._open is None or piece.index != self._open.index:
                calls += self.finish()
                self._open = CallSoFar(piece.index, piece.id, piece.name) if piece is not None else None
            if piece is not None and self._open is not None:
                self._open.arguments += piece.arguments
        said.calls = calls
        return said

    def finish(self) -> list[CallSoFar]:
        """Return the call that is open, which the output's end ends."""
        call, self._open = self._open, None
        return [] if call is None else [call]


def call_of(call: CallSoFar) -> dict[str, Any]:
    """Return a call in Ollama's form; arguments that are no JSON object, as of an output cut short, are empty.

    A number that is too large for one, such as 1e999, is the text of it.
    """
    try:
        arguments = loads(call.arguments, parse_float=_finite, parse_constant=str)
    except (ValueError, RecursionError):
        arguments = {}
    arguments = arguments if isinstance(arguments, dict) else {}
    return {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}}


def _finite(text: str) -> float | str:
    number = float(text)
    return number if isfinite(number) else text
