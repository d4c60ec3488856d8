"""Readers of calls of tools that are written as JSON: names and arguments are passed on as they come."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

from orchestrator.text.json_calls import Begun, CallScanner, CallShape, NestedJson
from orchestrator.text.parts import CallPiece, Content, Part

_FENCE: Final = "```"


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

    @property
    def is_raw(self) -> bool:
        """Whether the region was content as it stands, its anchors included: no part stands there."""
        return False

    @property
    def is_in_text(self) -> bool:
        """Whether what came last is within a text of JSON, where no anchor counts."""
        return False


class CallsReader(RegionReader):
    """Calls written as JSON, whose arguments are passed on as they come.

    What is no call is content as it stands, and so is what follows a call and is none, but for brackets and separators.

    Args:
        shape: of the calls.
        opening: the text of the anchor that began the region.
        calls: of the output.
        needs_tool: whether the first call must name a tool, because nothing else marks it.
    """

    def __init__(self, shape: CallShape, opening: str, calls: Calls, *, needs_tool: bool) -> None:
        self._index = -1
        ends = _FENCE[0] if _FENCE in opening else ""
        self._scanner = CallScanner(shape, lambda name: not needs_tool or name in calls.tools, ends=ends)
        self._opening = opening
        self._calls = calls
        self._is_content = False

    @property
    def is_raw(self) -> bool:
        """Whether there was no call."""
        return self._index < 0

    @property
    def is_in_text(self) -> bool:
        """Whether it is a text of a call."""
        return self._scanner.is_in_text

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
        if self._scanner.has_failed:
            self._is_content = True
            parts.append(Content(self._unread()))
        return parts

    def close(self, closing: str) -> list[Part]:
        """Return the text that is no call."""
        text = "" if self._is_content else self._unread()
        return [Content(text if self._index >= 0 else text + closing)]

    def _unread(self) -> str:
        return self._scanner.unread if self._index >= 0 else self._opening + self._scanner.unread


class ArgumentsReader(RegionReader):
    """The arguments of one call, whose name stands in the anchor; what follows their JSON is content.

    Args:
        name: of the tool.
        calls: of the output.
    """

    def __init__(self, name: str, calls: Calls) -> None:
        self._name = name
        self._index = calls.begin()
        self._json: NestedJson | None = None
        self._held: list[str] = []
        self._has_begun = False

    @property
    def is_in_text(self) -> bool:
        """Whether it is a text of the arguments."""
        return self._json is not None and self._json.is_in_text

    def push(self, text: str) -> list[Part]:
        """Return the next piece of the arguments, or the content behind them."""
        if not self._has_begun:
            text = text.lstrip()
            if not text:
                return []
            self._json = NestedJson() if text[0] in "{[" else None
        if self._json is None:
            # No JSON that has an end of its own: all of it, but for white space at its end.
            return self._arguments(text)
        end = self._json.push(text)
        parts = self._arguments(text[:end])
        return [*parts, Content(text[end:])] if end < len(text) else parts

    def close(self, closing: str) -> list[Part]:
        """Return a call without arguments, where none came."""
        return [] if self._has_begun else [CallPiece(self._index, self._name, "{}")]

    def _arguments(self, text: str) -> list[Part]:
        body = text.rstrip()
        if not body:
            self._held += [text] if text and not (self._json and self._json.has_ended) else []
            return []
        name = "" if self._has_begun else self._name
        piece = CallPiece(self._index, name, "".join((*self._held, body)))
        self._held = [text[len(body) :]]
        self._has_begun = True
        return [piece]
