"""Whether the session store can be used: without it an orchestrator can answer nothing but errors."""

import asyncio
import logging
from contextlib import suppress
from typing import Final

from orchestrator.store.store import SessionStore
from outrider.errors import OutriderError

_LOG: Final = logging.getLogger(__name__)
_PERIOD_S: Final = 1.0
"""The kubelet asks for readiness every few seconds."""
_FIRST_S: Final = 1.0
_NOT_YET: Final = "it was not asked yet"


class StoreWatch:
    """Checks the store every second, and logs what is wrong with it once, and once that it is well again.

    Args:
        store: what is checked.
        period_s: seconds between two checks.
    """

    def __init__(self, store: SessionStore, period_s: float = _PERIOD_S) -> None:
        self._store = store
        self._period_s = period_s
        self._problem = _NOT_YET
        self._checked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_well(self) -> bool:
        """Whether the last check found that the store takes writes."""
        return not self._problem

    async def start(self) -> None:
        """Begins; returns after the first check, or after a second without an answer."""
        self._task = asyncio.create_task(self._run())
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_S):
                await self._checked.wait()

    async def stop(self) -> None:
        """Ends."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._note(await self._find_problem())
            self._checked.set()
            await asyncio.sleep(self._period_s)

    async def _find_problem(self) -> str:
        try:
            await self._store.check()
        except OutriderError as error:
            return error.message
        except Exception as error:
            # Were this task to end, the service would stay as it was found last.
            return f"the session store gives an unexpected answer ({type(error).__name__})"
        return ""

    def _note(self, problem: str) -> None:
        before, self._problem = self._problem, problem
        if problem and problem != before:
            # The URL itself may have a password.
            _LOG.error("no requests can be served, look at the Redis that OUTRIDER_REDIS_URL names: %s", problem)
        elif before and not problem:
            _LOG.info("the session store takes writes")
