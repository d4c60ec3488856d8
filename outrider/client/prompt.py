"""Prompts as callers write them (a text, token ids, messages), and the checks that name what is wrong with one."""

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, TypeAlias

from outrider.client.messages import Message, MessageLike, items_of, kind_of
from outrider.errors import InvalidArgument

MAX_UINT32 = 2**32 - 1


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
        found = kind_of(prompt)
    raise InvalidArgument(f"is {found}, must be a text, a list of token ids or a list of messages", "prompt")


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
    return tuple(checked_uint32(field, token_id) for token_id in items_of(field, token_ids))
