"""An election held in Redis: whoever has set a key leads until it expires, and renews it until then."""

import asyncio
import logging
import time
from typing import Final

import redis.asyncio
from redis.asyncio.lock import Lock
from redis.exceptions import LockError, RedisError

from orchestrator.election.election import Work
from orchestrator.scripts import uninterrupted

_LOG: Final = logging.getLogger(__name__)
_LEASE_S: Final = 30.0


class RedisElection:
    """See `orchestrator.election.election.Election`.

    Args:
        client: of the server, with its bounds on time and attempts; stays the caller's.
        name: of the key.
        lease_s: seconds that it lasts unless renewed; renewed three times as often.
    """

    def __init__(self, client: "redis.asyncio.Redis", name: str, lease_s: float = _LEASE_S) -> None:
        self._client = client
        self._name = name
        self._lease_s = lease_s

    async def run(self, work: Work) -> None:
        """See `Election`."""
        while True:
            lock = Lock(self._client, self._name, timeout=self._lease_s, thread_local=False)
            until = time.monotonic() + self._lease_s
            try:
                if await self._is_acquired(lock):
                    _LOG.info("elected", extra={"lease": self._name})
                    await self._lead(lock, until, work)
            finally:
                await self._give_back(lock)
            await asyncio.sleep(self._lease_s / 3)

    async def _is_acquired(self, lock: Lock) -> bool:
        try:
            return await uninterrupted(lock.acquire(blocking=False))
        except (RedisError, OSError) as error:
            _LOG.debug("no election", extra={"lease": self._name, "problem": type(error).__name__})
            return False

    async def _lead(self, lock: Lock, until: float, work: Work) -> None:
        working = asyncio.create_task(work())
        try:
            await self._hold(lock, until, working)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _give_back(self, lock: Lock) -> None:
        try:
            await uninterrupted(lock.release())
        except LockError:
            # It was never held, or is another one's by now.
            return
        except (RedisError, OSError) as error:
            # It expires by itself.
            _LOG.info("lease not given back", extra={"lease": self._name, "problem": type(error).__name__})

    async def _hold(self, lock: Lock, until: float, working: "asyncio.Task[None]") -> None:
        """Renews the key until it is another one's, or may be."""
        while not working.done() and time.monotonic() < until:
            await asyncio.wait([working], timeout=min(self._lease_s / 3, max(0.0, until - time.monotonic())))
            began = time.monotonic()
            try:
                await uninterrupted(lock.reacquire())
                until = began + self._lease_s
            except LockError:
                _LOG.warning("another one was elected", extra={"lease": self._name})
                return
            except (RedisError, OSError) as error:
                _LOG.warning("lease not renewed", extra={"lease": self._name, "problem": type(error).__name__})
