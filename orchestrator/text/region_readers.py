"""Readers of the text of one region of an output: each returns parts as they become certain."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from orchestrator.text.argument_types import typed_arguments
from orchestrator.text.call_readers import ArgumentsReader, Calls, CallsReader, RegionReader
from orchestrator.text.json_calls import CallShape
from orchestrator.text.parts import CallPiece, Content, Part, Reasoning
from orchestrator.text.region_contents import apply_transform, parse_content
from orchestrator.text.response_template import Region

_OWN_SHAPE: Final = CallShape(("name", "function"), ("arguments", "parameters"), repeats=True)


class TextReader(RegionReader):
    """Text that is passed on as it comes.

    Args:
        kind: of its parts.
    """

    def __init__(self, kind: type[Content] | type[Reasoning]) -> None:
        self._kind = kind

    def push(self, text: str) -> list[Part]:
        """Return the text."""
        return [self._kind(text)]

    def close(self, closing: str) -> list[Part]:
        """Return nothing."""
        return []


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

    @property
    def is_raw(self) -> bool:
        """Always."""
        return True


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
        self._is_raw = False

    @property
    def is_raw(self) -> bool:
        """Whether the text had no value."""
        return self._is_raw

    def push(self, text: str) -> list[Part]:
        """Return nothing before the end."""
        self._pieces.append(text)
        return []

    def close(self, closing: str) -> list[Part]:
        """Return the value's parts."""
        text = "".join(self._pieces)
        try:
            return self._parts_of(self._value(text, is_closed=closing != ""))
        except ValueError:
            self._is_raw = True
            return [Content(self._opening + text + closing)]

    def _value(self, text: str, *, is_closed: bool) -> Any:
        region = self._region
        # Only an anchor behind the text shows that it is whole.
        value = parse_content(region.content, text, {**region.arguments, "is_closed": is_closed})
        if region.transform is None:
            return value
        if not region.transforms_each:
            return apply_transform(region.transform, {**self._captures, "content": value})
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ValueError("the value is no list of objects")
        return [apply_transform(region.transform, {**self._captures, **item}) for item in value]


def reader_of(
    region: Region, opening: str, captures: Mapping[str, str], calls: Calls, *, needs_tool: bool
) -> RegionReader:
    """Return the reader of a region.

    Args:
        region: the region.
        opening: the text of the anchor that began it.
        captures: named groups of that anchor.
        calls: of the output.
        needs_tool: whether calls must name a tool that the request has.
    """
    if region.is_content or region.is_reasoning:
        kind = Content if region.is_content else Reasoning
        if region.content == "text" and region.transform is None:
            return TextReader(kind)
        return ValueReader(region, opening, captures, lambda value: [kind(_text_of(value))])
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
