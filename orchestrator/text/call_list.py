"""Calls as a list of Python's calls, `[get_weather(city="Paris"), ...]`: transformers' python-call-list."""

import math
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

import regex

_SPACE: Final = regex.compile(r"[ \t\n\r]*")
_NAME: Final = regex.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:[-.][A-Za-z0-9_]+)*")
_NUMBER: Final = regex.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_STRING: Final = regex.compile(r"""'((?:[^'\\\n\r]|\\.)*+)'|"((?:[^"\\\n\r]|\\.)*+)\"""", regex.DOTALL)
_ESCAPE: Final = regex.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))", regex.DOTALL
)
_SURROGATE: Final = regex.compile(r"[\ud800-\udfff]")
_ESCAPES: Final = {"\\": "\\", "'": "'", '"': '"', "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_CONSTANTS: Final = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_MAX_INTEGER: Final = 2**53 - 1
_MAX_DIGITS: Final = 17
_MAX_DEPTH: Final = 100

T = TypeVar("T")


def parse_call_list(text: str) -> list[dict[str, Any]]:
    """Return the calls, each with `name` and `arguments`; raise `ValueError` where the text is no such list."""
    return _Reader(text).calls()


class _Reader:
    """A reader of one text, at a position that only grows."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def calls(self) -> list[dict[str, Any]]:
        self._expect("[")
        calls = self._items("]", self._call)
        self._skip_space()
        if self._position != len(self._text):
            self._fail("something follows the list")
        return calls

    def _call(self) -> dict[str, Any]:
        name = self._name()
        self._expect("(")
        return {"name": name, "arguments": self._unique(self._items(")", self._argument))}

    def _argument(self) -> tuple[str, Any]:
        name = self._name()
        self._expect("=")
        return name, self._value(0)

    def _value(self, depth: int) -> Any:
        self._skip_space()
        following = self._text[self._position : self._position + 1]
        if following in ("'", '"') and following:
            return self._string()
        if following in ("[", "{") and following:
            if depth >= _MAX_DEPTH:
                self._fail(f"values are nested more than {_MAX_DEPTH} deep")
            self._position += 1
            if following == "[":
                return self._items("]", lambda: self._value(depth + 1))
            return self._unique(self._items("}", lambda: self._pair(depth + 1)))
        if (found := _NUMBER.match(self._text, self._position)) is not None:
            return self._number(found)
        name = self._name()
        if name not in _CONSTANTS:
            self._fail("a value is missing")
        return _CONSTANTS[name]

    def _pair(self, depth: int) -> tuple[str, Any]:
        self._skip_space()
        key = self._string()
        self._expect(":")
        return key, self._value(depth)

    def _number(self, found: "regex.Match[str]") -> int | float:
        digits = found[0]
        self._position = found.end()
        if found[1] is None and found[2] is None:
            # Counted first: a huge literal never becomes a number.
            if len(digits) > _MAX_DIGITS or abs(int(digits)) > _MAX_INTEGER:
                self._fail("a whole number is out of range")
            return int(digits)
        if math.isinf(float(digits)):
            self._fail("a number is too large")
        return float(digits)

    def _string(self) -> str:
        found = _STRING.match(self._text, self._position)
        if found is None:
            self._fail("a text is not valid")
        body = found[1] if found[1] is not None else found[2]
        if _SURROGATE.search(body):
            self._fail("a text has half a character")
        self._position = found.end()
        return str(_ESCAPE.sub(self._unescaped, body))

    def _unescaped(self, found: "regex.Match[str]") -> str:
        high, low, code, letter = found.groups()
        if high is not None:
            return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
        if code is not None:
            if _SURROGATE.match(chr(int(code, 16))):
                self._fail("a text has half a character")
            return chr(int(code, 16))
        if letter not in _ESCAPES:
            self._fail(f"a text has the unknown escape \\{letter}")
        return _ESCAPES[letter]

    def _items(self, close: str, item: Callable[[], T]) -> list[T]:
        items: list[T] = []
        if self._is_at(close):
            self._position += 1
            return items
        while True:
            items.append(item())
            if self._is_at(close):
                self._position += 1
                return items
            self._expect(",")

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            self._fail("a name occurs twice")
        return values

    def _name(self) -> str:
        self._skip_space()
        found = _NAME.match(self._text, self._position)
        if found is None:
            self._fail("a name is missing")
        self._position = found.end()
        return str(found[0])

    def _is_at(self, char: str) -> bool:
        self._skip_space()
        return self._text.startswith(char, self._position)

    def _expect(self, char: str) -> None:
        if not self._is_at(char):
            self._fail(f"{char!r} is missing")
        self._position += 1

    def _skip_space(self) -> None:
        found = _SPACE.match(self._text, self._position)
        self._position = found.end() if found else self._position

    def _fail(self, problem: str) -> NoReturn:
        raise ValueError(f"{problem}, at character {self._position} of a list of calls")
