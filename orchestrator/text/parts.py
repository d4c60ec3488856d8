"""The parts that an output is taken apart into: content, reasoning, calls of tools."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A call of a tool, or the next piece of its arguments.

    Attributes:
        index: number of the call within the output, from 0.
        name: the tool's name, in the first piece only; else empty.
        arguments: the next piece of the arguments, which are JSON text.
    """

    index: int
    name: str
    arguments: str


Part: TypeAlias = Content | Reasoning | CallPiece


def merged(parts: Iterable[Part]) -> list[Part]:
    """Return the parts with neighbours of one kind put together, and without empty ones."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        match last, part:
            case (Content(before), Content(text)):
                whole[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                whole[-1] = Reasoning(before + text)
            case (CallPiece(index, name, before), CallPiece(same, "", text)) if index == same:
                whole[-1] = CallPiece(index, name, before + text)
            case (_, Content("") | Reasoning("") | CallPiece(_, "", "")):
                continue
            case _:
                whole.append(part)
    return whole
