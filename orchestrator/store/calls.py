"""Calls of Redis in flight: what closes the connections waits for them, and none begins behind it."""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from outrider.errors import Unavailable

_CLOSED: Final = "the session store is closed"

T = TypeVar("T")


class RedisCalls:
    """The calls that one client of Redis has in flight; each must be bounded in time.

    A caller that is cancelled leaves its call behind, which comes to its end by itself: redis-py leaves a connection
    open that is cancelled while it is being made. And when a connection is closed under a call, redis-py retries the
    call on a new one, which nothing closes any more.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def check_open(self) -> None:
        """Raises `Unavailable` once `close` has been called."""
        if self._is_closed:
            raise Unavailable(_CLOSED)

    def start(self, call: Coroutine[Any, Any, T], context: contextvars.Context | None = None) -> asyncio.Task[T]:
        """Begins a call, in a context of its own where one is given; whoever awaits it shields it from being cancelled.

        Raises `Unavailable` once `close` has been called.
        """
        if self._is_closed:
            call.close()
            raise Unavailable(_CLOSED)
        task = asyncio.create_task(call, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    async def close(self) -> None:
        """Lets no further call begin, and returns when none is in flight any more."""
        self._is_closed = True
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Its caller may have left: then its error is nobody's, and nothing to log.
            task.exception()
