"""Comma-separated lists of numbers in the options of benchmarks."""

from collections.abc import Callable
from typing import TypeVar

from outrider.errors import InvalidArgument

_Number = TypeVar("_Number", bound=float)


def numbers(name: str, text: str, kind: Callable[[str], _Number], least: _Number) -> tuple[_Number, ...]:
    """Return the numbers of a comma-separated list.

    Args:
        name: name of the option.
        text: value of the option.
        kind: parses one number.
        least: smallest allowed number.

    Raises:
        InvalidArgument: a part is not a number, or a number is too small.
    """
    try:
        found = tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidArgument(f"{name} is {text!r}, must be comma-separated numbers", name) from error
    if min(found) < least:
        raise InvalidArgument(f"{name} has {min(found)}, must be at least {least}", name)
    return found
