"""The lease of a running request: tokens are committed under it, and it is renewed while none are."""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from orchestrator.generation.request import RunningRequest, Services
from orchestrator.metrics import RequestStatistics
from orchestrator.store.errors import SessionLost
from orchestrator.store.sessions import Committed
from outrider.errors import DataLoss, OutriderError, SessionNotFound, Unavailable
from outrider.parameters import FinishReason

_LOG: Final = logging.getLogger(__name__)
_PERIODS: Final = 3
"""Renewals within the time of a lease."""


class HeldLease:
    """A lease that commits renew, and that is renewed after every period without one, from `start` to `stop`.

    Periods without a commit come with a long prefill, a slow reader, and while no target is in rotation.

    Args:
        services: store, settings, metrics.
        request: the request.
        statistics: of the request.
        on_cancelled: called when a renewal finds that the request was cancelled.
        on_lost: called with the error when the lease is no longer in force, or the session is gone.

    Attributes:
        committed_len: tokens of the session that are committed.
    """

    def __init__(
        self,
        services: Services,
        request: RunningRequest,
        statistics: RequestStatistics,
        on_cancelled: Callable[[], None],
        on_lost: Callable[[OutriderError], None],
    ) -> None:
        self.committed_len = request.record.committed_len
        self._store = services.store
        self._commit_time = services.metrics.commit_time
        self._period_s = services.settings.lease_s / _PERIODS
        self._request = request
        self._lease = request.lease
        self._session_ttl_s = request.lease.ttl_ms / 1e3
        self._statistics = statistics
        self._on_cancelled = on_cancelled
        self._on_lost = on_lost
        self._renewed_s = time.monotonic()
        self._is_fresh = True
        self._stopped = asyncio.Event()
        # Held by each change of the lease, so that no renewal overtakes the commit or release that ends it.
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start renewals."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Begin no further renewal."""
        self._stopped.set()

    async def commit(self, token_ids: Sequence[int], reason: FinishReason | None, replica: str) -> FinishReason | None:
        """Commit tokens, and the end of the request where there is a reason.

        A session that the server has lost, wholly or its last writes, is written again first.

        Args:
            token_ids: output behind the committed length.
            reason: why the request ends; None while it does not.
            replica: the target whose KV cache is warm.

        Returns:
            The reason; `CANCELLED` for a request that was cancelled and had none.

        Raises:
            OutriderError: see `SessionStore.append` and `SessionStore.restore`.
        """
        async with self._turn:
            if reason is not None:
                self.stop()
            committed = await self._append(token_ids, reason, replica)
            if committed.cancelled and reason is None:
                self.stop()
                reason = FinishReason.CANCELLED
                await self._append([], reason, replica)
        return reason

    async def release(self) -> None:
        """Release the lease of a request that has not ended."""
        try:
            async with self._turn:
                await self._store.release(self._lease)
        except OutriderError as error:
            # The lease ends by itself.
            _LOG.warning("lease not released", extra={"reason": error.reason})

    async def _append(self, token_ids: Sequence[int], reason: FinishReason | None, replica: str) -> Committed:
        append = functools.partial(self._store.append, self._lease, self.committed_len, token_ids, reason, replica)
        try:
            with self._commit_time.time():
                committed = await append()
        except DataLoss as error:
            await self._restore(error)
            committed = await append()
        self.committed_len = committed.length
        self._is_fresh = True
        self._renewed_s = time.monotonic()
        return committed

    async def _restore(self, error: DataLoss) -> None:
        """Write the session again that the server has lost, wholly or its last writes."""
        if isinstance(error, SessionLost) and time.monotonic() - self._renewed_s > self._session_ttl_s:
            raise SessionNotFound("the session expired") from error
        known = self._request.tokens.until(self.committed_len)
        await self._store.restore(self._request.record, self._lease, known.start, known.token_ids)
        self._statistics.record_fallback("session_restored")
        self._request.span.add_event("session_restored")
        _LOG.warning("session restored, which the session store had lost")

    async def _run(self) -> None:
        while not await self._stopped_within_period():
            if self._is_fresh:
                self._is_fresh = False
                continue
            async with self._turn:
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
            self._renewed_s = time.monotonic()
        except (Unavailable, DataLoss) as error:
            # The next commit decides; until then the store may be back, and lost writes are restored then.
            _LOG.warning("lease not renewed", extra={"reason": error.reason})
        except OutriderError as error:
            self._stopped.set()
            self._on_lost(error)
