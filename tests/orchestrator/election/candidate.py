"""A process that stands for election, as tests see it."""

import asyncio
from collections.abc import Callable

from orchestrator.election.election import Election


class Candidate:
    """Stands for election from its making to `stop`.

    Attributes:
        is_leading: whether its work runs now.
        num_times: times that it was elected.
    """

    def __init__(self, election: Election) -> None:
        self.is_leading = False
        self.num_times = 0
        self._standing = asyncio.create_task(election.run(self._work))

    async def stop(self) -> None:
        """Gives up."""
        self._standing.cancel()
        await asyncio.gather(self._standing, return_exceptions=True)

    async def _work(self) -> None:
        self.is_leading = True
        self.num_times += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.is_leading = False


async def until(holds: Callable[[], bool], bound_s: float = 20.0) -> None:
    """Returns once something holds."""
    async with asyncio.timeout(bound_s):
        while not holds():
            await asyncio.sleep(0.01)
