"""Names of drafters that metrics and statistics count by; workers send them."""

from typing import Final

MAX_NAMES: Final = 16
"""A deployment has a few; more would be made up, and each is a series for as long as the process lives."""
OTHER: Final = "other"


class CountedNames:
    """The names that are counted one by one: the first 16 that come."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def counted(self, name: str) -> str:
        """Return the name that a drafter is counted by: its own, or "other" for those after the first 16."""
        if name not in self._names:
            if len(self._names) == MAX_NAMES:
                return OTHER
            self._names.add(name)
        return name
