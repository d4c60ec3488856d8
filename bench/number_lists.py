"""Lists of numbers as a bench's options give them: with commas between them."""

from collections.abc import Callable
from typing import TypeVar

from outrider.errors import InvalidArgument

_Number = TypeVar("_Number", bound=float)


def numbers(name: str, text: str, kind: Callable[[str], _Number], least: _Number) -> tuple[_Number, ...]:
    """Returns the numbers of an option.

    Args:
        name: of the option.
        text: its value.
        kind: reads one.
        least: that one may be.

    Raises:
        InvalidArgument: something else stands there, or a number is too small.
    """
    try:
        found = tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidArgument(f"{name} is {text!r}, must be numbers with commas between them", name) from error
    if min(found) < least:
        raise InvalidArgument(f"{name} has {min(found)}, must be at least {least}", name)
    return found
