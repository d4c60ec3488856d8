"""What `outrider doctor` has found out about one prerequisite."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Whether a prerequisite holds.

    Attributes:
        HOLDS: it holds.
        ADVICE: it is not required, or whether it holds cannot be seen from here.
        UNKNOWN: it is required, and could not be checked.
        FAILS: it is required, and does not hold.
    """

    HOLDS = "ok"
    ADVICE = "warn"
    UNKNOWN = "unknown"
    FAILS = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One prerequisite.

    Attributes:
        check: its name.
        state: whether it holds.
        found: what was found.
        remedy: what to do about it; empty where there is nothing to do.
    """

    check: str
    state: State
    found: str
    remedy: str = ""


def listed(names: Iterable[str], most: int = 6) -> str:
    """Return names with commas between them, sorted, the first `most` of them."""
    found = sorted(set(names))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more
