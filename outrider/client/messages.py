"""Messages, calls of tools and tools as callers write them, and the checks that name what is wrong with one."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from outrider.errors import InvalidArgument
from outrider.v1 import generation_pb2


class ToolCall(NamedTuple):
    """A call of a tool that an answer made; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


class Message(NamedTuple):
    """One message of a conversation.

    Attributes:
        role: system, user, assistant, or tool for the result of a call.
        content: its text.
        reasoning: of an answer: the reasoning that preceded it.
        tool_calls: of an answer: the calls that it made; each a `ToolCall` or a mapping with its fields.
        tool_call_id: of a result: the id of its call.
        name: of a result: the tool's name; empty for that of the call.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: Sequence["ToolCall | Mapping[str, str]"] = ()
    tool_call_id: str = ""
    name: str = ""


class Tool(NamedTuple):
    """A tool that the model may call.

    Attributes:
        name: its name: 1 to 64 characters of A-Z a-z 0-9 _ . -
        description: what it does, for the model.
        parameters: the JSON schema of its arguments, as `json.loads` returns it or as text; empty for none.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | str = ""


MessageLike: TypeAlias = Message | tuple[str, str] | Mapping[str, Any]
"""A message, or a mapping with its fields: `{"role": "user", "content": "Hello"}`."""
ToolLike: TypeAlias = Tool | Mapping[str, Any]
"""A tool, or a mapping with its fields."""

T = TypeVar("T", Message, ToolCall, Tool)
_TEXTS: Final = frozenset({"role", "content", "reasoning", "tool_call_id", "name", "id", "arguments", "description"})


def checked_text(field: str, text: object) -> str:
    """Return the text; raise `InvalidArgument` where it is none, or is not valid Unicode."""
    if not isinstance(text, str):
        raise InvalidArgument(f"{field} is {kind_of(text)}, must be a string", field)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{field} is not valid Unicode at character {error.start}", field) from error
    return text


def checked_messages(field: str, messages: object) -> tuple[Message, ...]:
    """Return the messages; raise `InvalidArgument` with the place of what is wrong, such as `messages[1].content`."""
    return tuple(_message(f"{field}[{number}]", item) for number, item in enumerate(items_of(field, messages)))


def checked_tools(field: str, tools: object) -> tuple[Tool, ...]:
    """Return the tools, their schemas as text; raise `InvalidArgument` with the place of what is wrong."""
    checked = []
    for number, item in enumerate(items_of(field, tools)):
        place = f"{field}[{number}]"
        tool = _made(Tool, place, item, ("name",))
        schema = tool.parameters
        if isinstance(schema, Mapping):
            try:
                schema = json.dumps(schema, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidArgument(f"is no JSON: {error}", f"{place}.parameters") from None
        checked.append(tool._replace(parameters=checked_text(f"{place}.parameters", schema)))
    return tuple(checked)


def message_of(message: Message) -> generation_pb2.ChatMessage:
    """Return a checked message as one of generation.proto."""
    calls = [generation_pb2.ToolCall(**ToolCall(*call)._asdict()) for call in message.tool_calls]
    return generation_pb2.ChatMessage(**{**message._asdict(), "tool_calls": calls})


def items_of(field: str, value: object) -> Iterable[object]:
    """Return the items of a list; raise `InvalidArgument` for anything else."""
    if isinstance(value, (str, bytes, Message, ToolCall, Tool, Mapping)) or not isinstance(value, Iterable):
        raise InvalidArgument(f"{field} is {kind_of(value)}, must be a list", field)
    return value


def kind_of(value: object) -> str:
    """Return the type of a value as an error message names it."""
    return "None" if value is None else f"of type {type(value).__name__}"


def _message(place: str, item: object) -> Message:
    if isinstance(item, tuple) and not isinstance(item, Message) and len(item) == 2:
        item = Message(*item)
    calls = item.get("tool_calls") if isinstance(item, Mapping) else ()
    message = _made(Message, place, item, ("role",) if calls else ("role", "content"))
    field = f"{place}.tool_calls"
    checked = [
        _made(ToolCall, f"{field}[{number}]", call, ToolCall._fields)
        for number, call in enumerate(items_of(field, message.tool_calls))
    ]
    return message._replace(tool_calls=tuple(checked))


def _made(kind: type[T], place: str, item: object, required: Sequence[str]) -> T:
    """Return the object of a mapping with its fields, or of one of its own, with its texts checked."""
    values: Mapping[str, object]
    if isinstance(item, kind):
        values = item._asdict()
    elif isinstance(item, Mapping):
        values = item
    else:
        raise InvalidArgument(f"{place} is {kind_of(item)}, must have {' and '.join(required)}", place)
    for name in values:
        if name not in kind._fields:
            raise InvalidArgument(f"there is no such field, known are {', '.join(kind._fields)}", f"{place}.{name}")
    for name in required:
        if name not in values:
            raise InvalidArgument("is missing", f"{place}.{name}")
    defaults = kind._field_defaults | ({"content": ""} if kind is Message else {})
    complete = {**defaults, **values}
    for name in _TEXTS & complete.keys():
        checked_text(f"{place}.{name}", complete[name])
    return kind(**complete)
