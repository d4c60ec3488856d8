"""Prompts as callers write them (a text, token ids, messages), and the checks that name what is wrong with one."""

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple, TypeAlias

from outrider.errors import InvalidArgument

MAX_UINT32 = 2**32 - 1


class Message(NamedTuple):
    """One message of a conversation; `role` is system, user or assistant."""

    role: str
    content: str


MessageLike: TypeAlias = Message | Mapping[str, str]
"""A message, or a mapping with its fields: `{"role": "user", "content": "Hello"}`."""

Prompt: TypeAlias = str | Sequence[int] | Sequence[MessageLike]
"""A text to continue, token ids to continue, or a conversation's new messages."""


def sorted_by_form(prompt: Prompt) -> dict[str, Any]:
    """Return the prompt under the name of its form: text, token_ids or messages.

    Raises:
        InvalidArgument: it has none of these forms.
    """
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, Message, Mapping)):
        items = tuple(prompt)
        if items and isinstance(items[0], (tuple, Mapping)):
            return {"messages": items}
        if items and hasattr(items[0], "__index__"):
            return {"token_ids": items}
        found = f"a list of {type(items[0]).__name__}" if items else "an empty list"
    else:
        found = _kind(prompt)
    raise InvalidArgument(f"is {found}, must be a text, a list of token ids or a list of messages", "prompt")


def checked_text(field: str, text: object) -> str:
    """Return the text; raise `InvalidArgument` where it is none, or is not valid Unicode."""
    if not isinstance(text, str):
        raise InvalidArgument(f"{field} is {_kind(text)}, must be a string", field)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{field} is not valid Unicode at character {error.start}", field) from error
    return text


def checked_uint32(field: str, value: object) -> int:
    """Return the number; raise `InvalidArgument` where it is no whole number in [0, 2**32)."""
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(f"{field} has {value!r}, must be a whole number", field) from None
    if not 0 <= number <= MAX_UINT32:
        raise InvalidArgument(f"{field} has {number}, must be in [0, {MAX_UINT32}]", field)
    return number


def checked_token_ids(field: str, token_ids: object) -> tuple[int, ...]:
    """Return the token ids; raise `InvalidArgument` for anything else."""
    return tuple(checked_uint32(field, token_id) for token_id in _items(field, token_ids))


def checked_messages(field: str, messages: object) -> tuple[Message, ...]:
    """Return the messages; raise `InvalidArgument` with the place of what is wrong, such as `messages[1].content`."""
    return tuple(_message(f"{field}[{number}]", item) for number, item in enumerate(_items(field, messages)))


def _message(place: str, item: object) -> Message:
    if isinstance(item, tuple) and len(item) == len(Message._fields):
        item = dict(zip(Message._fields, item, strict=True))
    if not isinstance(item, Mapping):
        raise InvalidArgument(f"{place} is {_kind(item)}, must have a role and a content", place)
    for name in item:
        if name not in Message._fields:
            raise InvalidArgument("there is no such field, a message has role and content", f"{place}.{name}")
    for name in Message._fields:
        if name not in item:
            raise InvalidArgument("is missing", f"{place}.{name}")
    return Message(*(checked_text(f"{place}.{name}", item[name]) for name in Message._fields))


def _items(field: str, value: object) -> Iterable[object]:
    if isinstance(value, (str, bytes, Message, Mapping)) or not isinstance(value, Iterable):
        raise InvalidArgument(f"{field} is {_kind(value)}, must be a list", field)
    return value


def _kind(value: object) -> str:
    """Return the type of a value as an error message names it."""
    return "None" if value is None else f"of type {type(value).__name__}"
