"""What an election is, and the setting that says where it is held."""

import re
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from outrider.errors import InvalidArgument

REDIS: Final = "redis"
_LEASE: Final = re.compile(r"kubernetes://(?P<namespace>[a-z0-9-]*)/(?P<name>[a-z0-9][a-z0-9.-]*)")

Work = Callable[[], Coroutine[Any, Any, None]]


class Election(Protocol):
    """Has one process at a time do some work.

    For a moment there may be two: a process that stands still may find out late that another one was elected. So the
    work must be such that doing it twice is a waste, and not a fault.
    """

    async def run(self, work: Work) -> None:
        """Runs `work` while this process is elected, and cancels it when that ends; until cancelled itself.

        On its way out it gives up its place, so that another process need not wait for it to expire.
        """


def parse_lease(text: str) -> tuple[str, str] | None:
    """Returns namespace and name of a cluster's Lease, as a setting has them; None for `redis`.

    An empty namespace stands for the pod's own. Raises `InvalidArgument` of anything else.
    """
    if text == REDIS:
        return None
    if found := _LEASE.fullmatch(text):
        return found["namespace"], found["name"]
    raise InvalidArgument(f"{text!r} is neither redis nor kubernetes://[NAMESPACE]/NAME", "housekeeping_lease")
