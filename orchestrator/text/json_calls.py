"""Calls of tools written as JSON, read as they come: the name first, then the arguments piece by piece."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

_SPACE: Final = " \t\r\n"
_OPENING: Final = "{["
_CLOSING: Final = "}]"


@dataclass(frozen=True, slots=True)
class CallShape:
    """Where a call has its name and its arguments.

    Attributes:
        names: keys of the name, any of them.
        arguments: keys of the arguments, any of them.
        repeats: whether several calls may follow each other, in a list or separated by commas or semicolons.
    """

    names: Sequence[str]
    arguments: Sequence[str]
    repeats: bool = False


class Begun(NamedTuple):
    """A call has begun."""

    name: str


class Arguments(NamedTuple):
    """The next piece of the arguments of the call that began last."""

    text: str


class NestedJson:
    """The extent of a JSON object or list, of which only texts and brackets are followed.

    Attributes:
        has_ended: whether its last bracket has come.
        is_in_text: whether it is within one of its texts.
    """

    def __init__(self) -> None:
        self.has_ended = self.is_in_text = False
        self._depth = 0
        self._is_escaped = False

    def push(self, text: str) -> int:
        """Return how many characters of the next text are of it."""
        if self.has_ended:
            return 0
        for position, char in enumerate(text, start=1):
            if self.take(char):
                return position
        return len(text)

    def take(self, char: str) -> bool:
        """Take one character; return whether it is the last."""
        if self.is_in_text:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self.is_in_text = False
        elif char == '"':
            self.is_in_text = True
        elif char in _OPENING:
            self._depth += 1
        elif char in _CLOSING:
            self._depth -= 1
        self.has_ended = self._depth == 0
        return self.has_ended


class CallScanner:
    """A scanner of calls written as JSON objects, a character at a time.

    What a call has besides its name and arguments is skipped. Within arguments only texts and brackets are followed, so
    that they stream; whether they are JSON is for the reader to find out.

    Args:
        shape: of the calls.
        is_tool: whether the first call may have a name; another fails.
        ends: characters that may follow the last call besides brackets and separators.

    Attributes:
        has_failed: whether what came is no call; nothing is read from there on.
        unread: the text that is of no call: since the end of the last one, or from where it failed.
    """

    def __init__(self, shape: CallShape, is_tool: Callable[[str], bool], *, ends: str = "") -> None:
        self._shape = shape
        self._ends = _CLOSING + ends
        self._is_tool = is_tool
        self._step: Callable[[str], None] = self._between
        self._events: list[Begun | Arguments] = []
        self._pieces: list[str] = []
        self._num_calls = 0
        self._has_call = False
        self.has_failed = False
        self._unread: list[str] = []
        self._start_call()

    @property
    def unread(self) -> str:
        """The text that is of no call: since the end of the last one, or from where it failed."""
        return "".join(self._unread)

    @property
    def is_in_text(self) -> bool:
        """Whether what came last is within a text of a call's JSON."""
        if self.has_failed:
            return False
        if self._step in (self._in_nested, self._in_arguments):
            return self._nested.is_in_text
        return self._step in (self._in_key, self._in_text_value, self._in_text_arguments)

    def push(self, text: str) -> list[Begun | Arguments]:
        """Return what became known with more text."""
        for char in text:
            is_read = self._has_begun and not self.has_failed
            if not is_read:
                self._unread.append(char)
            if not self.has_failed and self._fails_at(char) and is_read:
                self._unread.append(char)
        self._pass_arguments()
        events, self._events = self._events, []
        return events

    def _fails_at(self, char: str) -> bool:
        self._step(char)
        return self.has_failed

    def _start_call(self) -> None:
        self._key = ""
        self._raw: list[str] = []
        self._nested = NestedJson()
        self._is_escaped = False
        self._has_begun = self._has_arguments = False

    # Between calls, and between the members of one.

    def _between(self, char: str) -> None:
        separators = "[],;" if self._shape.repeats else ""
        if char == "{" and (self._shape.repeats or not self._num_calls):
            self._num_calls += 1
            self._step = self._member
        elif self._num_calls and (char in _SPACE or char in separators or char in self._ends):
            # Behind a call they are of no text.
            self._unread.clear()
        elif char not in _SPACE and char not in separators:
            self.has_failed = True

    def _member(self, char: str) -> None:
        if char == '"':
            self._raw = [char]
            self._step = self._in_key
        elif char == "}":
            self._end_call()
        elif char not in _SPACE and char != ",":
            self.has_failed = True

    def _in_key(self, char: str) -> None:
        if self._ends_text(char):
            self._key = self._text()
            self._step = self._colon

    def _colon(self, char: str) -> None:
        if char == ":":
            self._step = self._value
        elif char not in _SPACE:
            self.has_failed = True

    def _value(self, char: str) -> None:
        if char in _SPACE:
            return
        is_arguments = self._key in self._shape.arguments and not self._has_arguments
        self._has_arguments |= is_arguments
        self._raw = [char]
        if char == '"':
            self._step = self._in_text_arguments if is_arguments else self._in_text_value
        elif char in _OPENING:
            self._nested = NestedJson()
            self._nested.take(char)
            self._step = self._in_arguments if is_arguments else self._in_nested
            self._pieces += [char] if is_arguments else []
        elif char in _CLOSING or char in ",:":
            self.has_failed = True
        else:
            self._step = self._in_plain_arguments if is_arguments else self._in_plain

    # Values.

    def _in_text_value(self, char: str) -> None:
        if self._ends_text(char):
            if self._key in self._shape.names and not self._has_begun:
                self._begin(self._text())
            self._step = self._member

    def _in_text_arguments(self, char: str) -> None:
        if self._ends_text(char):
            # Some models write them as a text that has the JSON.
            self._pieces.append(self._text())
            self._step = self._member

    def _in_nested(self, char: str) -> None:
        if self._nested.take(char):
            self._step = self._member

    def _in_arguments(self, char: str) -> None:
        self._pieces.append(char)
        if self._nested.take(char):
            self._step = self._member

    def _in_plain(self, char: str) -> None:
        if char in ",}":
            self._step = self._member
            self._member(char)

    def _in_plain_arguments(self, char: str) -> None:
        if char not in ",}":
            self._raw.append(char)
            return
        plain = "".join(self._raw).strip()
        self._pieces.append("{}" if plain == "null" else plain)
        self._step = self._member
        self._member(char)

    # What they share.

    def _begin(self, name: str) -> None:
        if not name or not (self._has_call or self._is_tool(name)):
            self.has_failed = True
            return
        self._has_begun = self._has_call = True
        self._unread = []
        self._events.append(Begun(name))

    def _end_call(self) -> None:
        if not self._has_begun:
            self.has_failed = True
            return
        if not self._has_arguments:
            self._pieces.append("{}")
        self._pass_arguments()
        self._start_call()
        self._step = self._between

    def _pass_arguments(self) -> None:
        """Pass arguments on, once the name is known."""
        if self._has_begun and self._pieces:
            self._events.append(Arguments("".join(self._pieces)))
            self._pieces = []

    def _ends_text(self, char: str) -> bool:
        self._raw.append(char)
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        else:
            return char == '"'
        return False

    def _text(self) -> str:
        """Return the text whose JSON was read; empty where it is not valid."""
        try:
            return str(json.loads("".join(self._raw), strict=False))
        except ValueError:
            self.has_failed = True
            return ""
