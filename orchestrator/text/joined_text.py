"""The text of one kind of part over a whole output: regions joined, without the white space between them and others."""

from collections.abc import Mapping
from typing import Any


class JoinedText:
    """Text that regions add to, one after the other; the time it takes grows with the text alone.

    White space beside another part belongs to none; what stands between two pieces of one text is text.
    """

    def __init__(self) -> None:
        self._strips = True
        self._strips_ends = True
        self._joint = ""
        self._held: list[str] = []
        self._has_text = False
        self._is_apart = self._is_first = True

    def begin(self, arguments: Mapping[str, Any], joint: str) -> None:
        """Take the ways of the region that the next text is of.

        Args:
            arguments: `strip` is whether white space beside other parts belongs to none of them, `strip_ends` whether
                white space at the ends of the whole output does too; both are true by default.
            joint: what precedes the text where it follows on an earlier one, with another part between them.
        """
        self._strips = bool(arguments.get("strip", True))
        self._strips_ends = bool(arguments.get("strip_ends", True))
        self._joint = joint
        if self._is_first and not self._strips_ends:
            self._is_apart = False

    def part(self) -> None:
        """Take note that another part, or another region, stands between this text and the next."""
        self._is_apart, self._is_first = True, False
        self._held.clear()

    def push(self, text: str) -> str:
        """Return the text that became certain with more text."""
        if self._is_apart:
            text = text.lstrip() if self._strips else text
            if not text:
                return ""
            text = self._joint + text if self._has_text else text
            self._is_apart = self._is_first = False
        body = text.rstrip() if self._strips else text
        space = text[len(body) :]
        if body:
            body = "".join((*self._held, body))
            self._held.clear()
            self._has_text = True
        if space:
            self._held.append(space)
        return body

    def end(self) -> str:
        """Return the rest at the output's end."""
        return "" if self._strips_ends else "".join(self._held)

    def forget(self) -> None:
        """Forget the text so far, which was no output."""
        self._held.clear()
        self._has_text = False
