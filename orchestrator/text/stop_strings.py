"""Stop strings: text is held back while it may still become one, and ends before the first that does."""

from collections.abc import Sequence
from typing import NamedTuple


class Passed(NamedTuple):
    """Text that is certain, and whether a stop string ended it."""

    text: str
    stopped: bool


class StopStrings:
    """Passes text through until the first stop string.

    Args:
        stops: the strings; none lets everything through at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> Passed:
        """Adds text; where several stop strings end with it, the one that begins first cuts the text."""
        if not self._stops:
            return Passed(piece, False)
        self._held += piece
        starts = [start for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if starts:
            text, self._held = self._held[: min(starts)], ""
            return Passed(text, True)
        return Passed(self._release(), False)

    def skip(self, piece: str) -> str:
        """Adds text within which no stop string counts (before `min_tokens`); one may begin in it and end later."""
        if not self._stops:
            return piece
        self._held += piece
        return self._release()

    def flush(self) -> str:
        """Returns what was held back, at the end."""
        text, self._held = self._held, ""
        return text

    def _release(self) -> str:
        """Removes and returns the held text, but for an end that may become a stop string."""
        split = len(self._held) - self._num_possible()
        text, self._held = self._held[:split], self._held[split:]
        return text

    def _num_possible(self) -> int:
        """Returns the length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for num in range(longest, 0, -1):
            if any(stop.startswith(self._held[-num:]) for stop in self._stops):
                return num
        return 0
