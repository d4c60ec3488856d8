"""Messages and tools of a conversation, checked, and as chat templates expect them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from outrider.errors import InvalidArgument

ROLES: Final = ("system", "user", "assistant", "tool")
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_TOOLS: Final = 128
"""Tools of a request."""
_MAX_DEPTH: Final = 64
"""Of values within values, in schemas and arguments."""
_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
_SCHEMA_WORDS: Final = frozenset(
    {"type", "function", "name", "description", "parameters", "properties", "required", "items", "enum", "const"}
    | {"default", "title", "format", "anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "additionalProperties"}
    | {"nullable", "return", "string", "number", "integer", "boolean", "object", "array", "null"}
)
"""Words that chat templates look for in schemas; none of them is a special token, or can be joined to one by itself."""

Marked: TypeAlias = Callable[[str], str]
"""Returns a text in which no special token of the model is left."""


class Call(NamedTuple):
    """A call of a tool that an answer made; `arguments` is a JSON object as text, unless the answer was cut short."""

    id: str
    name: str
    arguments: str


class Message(NamedTuple):
    """One message of a conversation; see ChatMessage in generation.proto."""

    role: str
    content: str
    reasoning: str = ""
    tool_calls: Sequence[Call] = ()
    tool_call_id: str = ""
    name: str = ""


class Tool(NamedTuple):
    """A tool; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]


Messages: TypeAlias = Sequence[Message | tuple[str, str]]
"""Messages, or their role and content alone."""


def checked_messages(messages: Messages) -> list[Message]:
    """Return the messages; results of tools have the names of their calls.

    Raises:
        InvalidArgument: a role is unknown, or a message has what its role does not have.
    """
    names: dict[str, str] = {}
    whole: list[Message] = []
    for item in messages:
        message = Message(*item)
        if message.role not in ROLES:
            raise InvalidArgument(f"role is {message.role!r}, must be one of {', '.join(ROLES)}", "role")
        if message.role != "assistant" and (message.tool_calls or message.reasoning):
            field = "tool_calls" if message.tool_calls else "reasoning"
            raise InvalidArgument(f"{field} is given of role {message.role}, goes with assistant", field)
        if message.role != "tool" and message.tool_call_id:
            raise InvalidArgument(f"tool_call_id is given of role {message.role}, goes with tool", "tool_call_id")
        names.update({call.id: call.name for call in message.tool_calls})
        if message.role == "tool" and not message.name:
            message = message._replace(name=names.get(message.tool_call_id, ""))
        whole.append(message)
    return whole


def answer_to(messages: Messages) -> Message | None:
    """Return an answer with the calls that messages begin with results of, by their names; None without such."""
    calls: list[Call] = []
    for message in (Message(*item) for item in messages):
        if message.role != "tool":
            break
        if not message.name:
            return None
        calls.append(Call(message.tool_call_id, message.name, ""))
    return Message("assistant", "", tool_calls=calls) if calls else None


def checked_tool(name: str, description: str, parameters: str) -> Tool:
    """Return a tool; raise `InvalidArgument` where its name or its schema is wrong."""
    if not _TOOL_NAME.fullmatch(name):
        raise InvalidArgument(f"tools has name {name[:80]!r}, must be 1 to 64 of A-Z a-z 0-9 _ . -", "tools")
    schema = json_object(parameters, "tools", f"parameters of {name}") if parameters else {"type": "object"}
    arguments_schema(name, schema)
    return Tool(name, description, schema)


def arguments_schema(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema that the arguments of a tool follow, which are an object also where it has no type.

    Args:
        name: of the tool.
        parameters: the schema that its caller gave.

    Raises:
        InvalidArgument: the schema is one of another type.
    """
    kind = parameters.get("type", "object")
    if kind != "object":
        raise InvalidArgument(f"tools: parameters of {name[:80]} has type {kind!r}, must be object", "tools")
    return {"type": "object", **parameters}


def json_object(text: str, field: str, what: str) -> dict[str, Any]:
    """Return a JSON object.

    Args:
        text: its JSON.
        field: that errors name.
        what: the value in words.

    Raises:
        InvalidArgument: it is none, has values nested more than 64 deep, or half a character.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{field}: {what} is not a JSON object", field)
    _check_depth(value, field, what)
    try:
        # An escape may stand for half a character, which no text can have.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{field}: {what} is not valid Unicode", field) from error
    return value


def _check_depth(value: Any, field: str, what: str) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [item for parent in level if isinstance(parent, dict | list) for item in _items(parent)]
        if not level:
            return
    raise InvalidArgument(f"{field}: {what} has values nested more than {_MAX_DEPTH} deep", field)


def _items(parent: dict[str, Any] | list[Any]) -> Sequence[Any]:
    return list(parent.values()) if isinstance(parent, dict) else parent


def template_messages(messages: Sequence[Message], marked: Marked, source: str) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them, as transformers gives them.

    Args:
        messages: the messages.
        marked: takes special tokens out of texts.
        source: of the chat template, whose names for the reasoning are used.
    """
    return [_template_message(message, marked, source) for message in messages]


def _template_message(message: Message, marked: Marked, source: str) -> dict[str, Any]:
    value: dict[str, Any] = {"role": message.role, "content": marked(message.content)}
    if message.reasoning:
        value |= {key: marked(message.reasoning) for key in _REASONING_KEYS if key in source}
    if message.tool_calls:
        value["tool_calls"] = [
            {
                "id": marked(call.id),
                "type": "function",
                "function": {"name": marked(call.name), "arguments": marked_value(call_arguments(call), marked)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        value["tool_call_id"] = marked(message.tool_call_id)
    if message.name:
        value["name"] = marked(message.name)
    return value


def call_arguments(call: Call) -> Any:
    """Return the arguments of a call as an object; their text where it is none, as of an answer that was cut short."""
    try:
        return json_object(call.arguments, "arguments", call.name) if call.arguments else {}
    except InvalidArgument:
        return call.arguments


def template_tools(tools: Sequence[Tool], marked: Marked) -> list[dict[str, Any]]:
    """Return tools as chat templates expect them."""

    def unless_known(text: str) -> str:
        return text if text in _SCHEMA_WORDS else marked(text)

    return [
        {
            "type": "function",
            "function": {
                "name": marked(tool.name),
                "description": marked(tool.description),
                "parameters": marked_value(tool.parameters, unless_known),
            },
        }
        for tool in tools
    ]


def marked_value(value: Any, marked: Marked) -> Any:
    """Return a JSON value whose texts and keys have no special tokens."""
    match value:
        case str():
            return marked(value)
        case list():
            return [marked_value(item, marked) for item in value]
        case dict():
            return {marked(name): marked_value(item, marked) for name, item in value.items()}
    return value
