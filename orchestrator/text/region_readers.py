"""Readers of the text of one region of an output: each returns parts as they become certain."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final

from orchestrator.text.argument_types import typed_arguments
from orchestrator.text.json_calls import Begun, CallScanner, CallShape
from orchestrator.text.parts import CallPiece, Content, Part, Reasoning
from orchestrator.text.region_contents import apply_transform, parse_content
from orchestrator.text.response_template import Region

_OWN_SHAPE: Final = CallShape(("name",), ("arguments", "parameters"), repeats=True)


class Calls:
    """The calls of one output, and the tools that they may name.

    Args:
        tools: JSON schema of the parameters of each tool, by its name.

    Attributes:
        num: calls that have begun.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.tools = tools
        self.num = 0

    def begin(self) -> int:
        """Return the index of the next call."""
        self.num += 1
        return self.num - 1


class RegionReader(ABC):
    """A reader of one region."""

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """Return the parts that became certain with more text."""

    @abstractmethod
    def close(self, closing: str) -> list[Part]:
        """Return the parts that became certain with the region's end, or the output's.

        Args:
            closing: the text of the anchor that ended it; empty at the output's end.
        """

    def forget(self) -> None:  # noqa: B027
        """Drop what is held back, where what was read so far is no output."""


class TextReader(RegionReader):
    """Text that is passed on as it comes.

    Args:
        kind: of its parts.
        strips: whether white space at its edges belongs to none of them.
        joint: what precedes its first character.
    """

    def __init__(self, kind: type[Content] | type[Reasoning], *, strips: bool, joint: str = "") -> None:
        self._kind = kind
        self._strips = strips
        self._joint = joint
        self._held = ""
        self._has_begun = False

    def push(self, text: str) -> list[Part]:
        """Return the text, without white space that may be the end's."""
        if self._strips:
            whole = self._held + text
            body = whole.rstrip()
            self._held = whole[len(body) :]
            text = body if self._has_begun else body.lstrip()
        if not text:
            return []
        text = text if self._has_begun else self._joint + text
        self._has_begun = True
        return [self._kind(text)]

    def close(self, closing: str) -> list[Part]:
        """Return nothing: what is held back is white space."""
        return []

    def forget(self) -> None:
        """Drop the white space that is held back."""
        self._held = ""


class RawReader(RegionReader):
    """A region that is content as it stands, its anchors included.

    Args:
        opening: the text of the anchor that began it.
    """

    def __init__(self, opening: str) -> None:
        self._opening = opening

    def push(self, text: str) -> list[Part]:
        """Return the text."""
        text, self._opening = self._opening + text, ""
        return [Content(text)]

    def close(self, closing: str) -> list[Part]:
        """Return the rest."""
        return [Content(self._opening + closing)]


class IgnoredReader(RegionReader):
    """A region that is no part."""

    def push(self, text: str) -> list[Part]:
        """Return nothing."""
        return []

    def close(self, closing: str) -> list[Part]:
        """Return nothing."""
        return []


class ValueReader(RegionReader):
    """A region whose text has a value as a whole; one that has none is content as it stands.

    Args:
        region: the region.
        opening: the text of the anchor that began it.
        captures: named groups of that anchor.
        parts_of: returns the parts of the value, or raises `ValueError`.
    """

    def __init__(
        self, region: Region, opening: str, captures: Mapping[str, str], parts_of: Callable[[Any], list[Part]]
    ) -> None:
        self._region = region
        self._opening = opening
        self._captures = captures
        self._parts_of = parts_of
        self._pieces: list[str] = []

    def push(self, text: str) -> list[Part]:
        """Return nothing before the end."""
        self._pieces.append(text)
        return []

    def close(self, closing: str) -> list[Part]:
        """Return the value's parts."""
        text = "".join(self._pieces)
        try:
            return self._parts_of(self._value(text))
        except ValueError:
            return [Content(self._opening + text + closing)]

    def _value(self, text: str) -> Any:
        region = self._region
        value = parse_content(region.content, text, region.arguments)
        if region.transform is None:
            return value
        if not region.transforms_each:
            return apply_transform(region.transform, {**self._captures, "content": value})
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ValueError("the value is no list of objects")
        return [apply_transform(region.transform, {**self._captures, **item}) for item in value]


class CallsReader(RegionReader):
    """Calls written as JSON, whose arguments are passed on as they come; what is no call is content as it stands.

    Args:
        shape: of the calls.
        opening: the text of the anchor that began the region.
        calls: of the output.
        needs_tool: whether a name that is of no tool is no call.
    """

    def __init__(self, shape: CallShape, opening: str, calls: Calls, *, needs_tool: bool) -> None:
        self._scanner = CallScanner(shape, lambda name: not needs_tool or name in calls.tools)
        self._opening = opening
        self._calls = calls
        self._index = -1
        self._is_content = False

    def push(self, text: str) -> list[Part]:
        """Return the calls and the pieces of arguments that became known."""
        if self._is_content:
            return [Content(text)]
        parts: list[Part] = []
        for event in self._scanner.push(text):
            if isinstance(event, Begun):
                self._index = self._calls.begin()
                parts.append(CallPiece(self._index, event.name, ""))
            else:
                parts.append(CallPiece(self._index, "", event.text))
        if self._scanner.has_failed and self._index < 0:
            self._is_content = True
            parts.append(Content(self._opening + self._scanner.unread))
        return parts

    def close(self, closing: str) -> list[Part]:
        """Return the text that is no call; behind calls, what is none is dropped: brackets and separators."""
        if self._index >= 0:
            return []
        return [Content(closing if self._is_content else self._opening + self._scanner.unread + closing)]


class ArgumentsReader(RegionReader):
    """The arguments of one call, whose name stands in the anchor.

    Args:
        name: of the tool.
        calls: of the output.
    """

    def __init__(self, name: str, calls: Calls) -> None:
        self._name = name
        self._index = calls.begin()
        self._held = ""
        self._has_begun = False

    def push(self, text: str) -> list[Part]:
        """Return the next piece of the arguments."""
        whole = self._held + text
        body = whole.rstrip()
        self._held = whole[len(body) :]
        if not self._has_begun:
            body = body.lstrip()
            if not body:
                return []
            self._has_begun = True
            return [CallPiece(self._index, self._name, body)]
        return [CallPiece(self._index, "", body)]

    def close(self, closing: str) -> list[Part]:
        """Return a call without arguments, where none came."""
        return [] if self._has_begun else [CallPiece(self._index, self._name, "{}")]


def reader_of(
    region: Region, opening: str, captures: Mapping[str, str], calls: Calls, *, joint: str, needs_tool: bool
) -> RegionReader:
    """Return the reader of a region.

    Args:
        region: the region.
        opening: the text of the anchor that began it.
        captures: named groups of that anchor.
        calls: of the output.
        joint: what separates its text from an earlier one of its kind.
        needs_tool: whether calls must name a tool that the request has.
    """
    if region.is_content or region.is_reasoning:
        kind = Content if region.is_content else Reasoning
        if region.content == "text" and region.transform is None:
            return TextReader(kind, strips=bool(region.arguments.get("strip", True)), joint=joint)
        return ValueReader(region, opening, captures, lambda value: [kind(joint + _text_of(value))])
    if not region.is_calls:
        return IgnoredReader()
    if region.content == "json-calls":
        if "name" in captures:
            return ArgumentsReader(captures["name"], calls)
        return CallsReader(_OWN_SHAPE, opening, calls, needs_tool=needs_tool)
    if region.content == "json" and not region.arguments:
        name, arguments = region.call_keys
        if arguments == "{content}" and (captured := captures.get(name.strip("{}"))):
            return ArgumentsReader(captured, calls)
        if (shape := _shape(region, name, arguments)) is not None:
            return CallsReader(shape, opening, calls, needs_tool=needs_tool)
    return ValueReader(region, opening, captures, lambda value: _call_parts(value, calls))


def _shape(region: Region, name: str, arguments: str) -> CallShape | None:
    """Return where calls have name and arguments; None where they cannot be read as they come."""
    head = "" if region.transforms_each else "content."
    keys = [item[1 + len(head) : -1] for item in (name, arguments) if item.startswith("{" + head) and item[-1] == "}"]
    if len(keys) < 2 or any(not key or "." in key or key == "content" for key in keys):
        return None
    return CallShape((keys[0],), (keys[1],), repeats=region.transforms_each)


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _call_parts(value: Any, calls: Calls) -> list[Part]:
    """Return the calls of a value: one, or a list of them; raise `ValueError` for anything else."""
    items = value if isinstance(value, list) else [value]
    found: list[tuple[str, str]] = []
    for item in items:
        function = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
            raise ValueError("the value is no call")
        arguments = function.get("arguments", {})
        if isinstance(arguments, dict):
            arguments = typed_arguments(arguments, calls.tools.get(name, {}))
        found.append((name, _text_of(arguments)))
    return [CallPiece(calls.begin(), name, arguments) for name, arguments in found]
