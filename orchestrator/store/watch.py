"""Readiness of the session store: without it an orchestrator can only answer with errors."""

import asyncio
import logging
from contextlib import suppress
from typing import Final

from orchestrator.store.connection import RedisConnection
from outrider.errors import OutriderError

_LOG: Final = logging.getLogger(__name__)
_PERIOD_S: Final = 1.0
"""The kubelet probes readiness every few seconds."""
_FIRST_S: Final = 1.0
_NOT_YET: Final = "it was not checked yet"


class StoreWatch:
    """A check of the store every second, which logs a problem once, and its end once.

    Args:
        connection: to the Redis that is checked.
        period_s: seconds between two checks.
    """

    def __init__(self, connection: RedisConnection, period_s: float = _PERIOD_S) -> None:
        self._connection = connection
        self._period_s = period_s
        self._problem = _NOT_YET
        self._checked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def takes_writes(self) -> bool:
        """Whether the store took a write at the last check."""
        return not self._problem

    async def start(self) -> None:
        """Start; return after the first check, or after a second without an answer."""
        self._task = asyncio.create_task(self._run())
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_S):
                await self._checked.wait()

    async def stop(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._record(await self._find_problem())
            self._checked.set()
            await asyncio.sleep(self._period_s)

    async def _find_problem(self) -> str:
        try:
            await self._connection.check()
        except OutriderError as error:
            return error.message
        except Exception as error:
            # Were this task to end, readiness would stay as it was.
            return f"the session store gave an unexpected answer ({type(error).__name__})"
        return ""

    def _record(self, problem: str) -> None:
        before, self._problem = self._problem, problem
        if problem and problem != before:
            # Not the URL itself, which may have a password.
            _LOG.error("no requests can be served, check the Redis that OUTRIDER_REDIS_URL names: %s", problem)
        elif before and not problem:
            _LOG.info("the session store takes writes")
