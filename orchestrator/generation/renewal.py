"""Keeps a lease alive while nothing is committed under it: no target, a long prefill, a client that reads slowly."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from orchestrator.store.sessions import Lease
from orchestrator.store.store import SessionStore
from outrider.errors import DataLoss, OutriderError, Unavailable

_LOG: Final = logging.getLogger(__name__)


class LeaseRenewal:
    """Renews a lease after every period without a commit, from `start` to `stop`.

    Args:
        store: has the lease.
        lease: the lease.
        period_s: seconds; at most a third of the lease.
        on_cancelled: is called when the request was told to end.
        on_lost: gets the error when somebody else has the session, or nobody.

    Attributes:
        renewed_s: when the lease was renewed last, on the monotonic clock.
        turn: held by whoever changes the lease, so that no renewal overtakes the commit or release that ends it.
    """

    def __init__(
        self,
        store: SessionStore,
        lease: Lease,
        period_s: float,
        on_cancelled: Callable[[], None],
        on_lost: Callable[[OutriderError], None],
    ) -> None:
        self.turn = asyncio.Lock()
        self._store = store
        self._lease = lease
        self._period_s = period_s
        self._on_cancelled = on_cancelled
        self._on_lost = on_lost
        self.renewed_s = time.monotonic()
        self._is_fresh = True
        self._stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Begins no renewal any more; one that is under way ends before `turn` is free."""
        self._stopped.set()

    def committed(self) -> None:
        """Notes that a commit has just renewed the lease."""
        self._is_fresh = True
        self.renewed_s = time.monotonic()

    async def _run(self) -> None:
        while not await self._stopped_within_period():
            if self._is_fresh:
                self._is_fresh = False
                continue
            async with self.turn:
                if not self._stopped.is_set():
                    await self._renew()

    async def _stopped_within_period(self) -> bool:
        try:
            async with asyncio.timeout(self._period_s):
                return await self._stopped.wait()
        except TimeoutError:
            return False

    async def _renew(self) -> None:
        try:
            if await self._store.renew(self._lease):
                self._on_cancelled()
            self.renewed_s = time.monotonic()
        except (Unavailable, DataLoss) as error:
            # The next commit decides; until then the store may be back, and what it has lost is written again then.
            _LOG.warning("lease not renewed", extra={"reason": error.reason})
        except OutriderError as error:
            self._stopped.set()
            self._on_lost(error)
