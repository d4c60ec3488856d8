"""Ctrl-C: once cancels the generation at its next token, twice ends the command."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from outrider.errors import OutriderError


class CancelOnInterrupt:
    """Within its block the first SIGINT runs `cancel`, the second cancels the running task.

    Attributes:
        was_interrupted: whether a SIGINT has come.
    """

    def __init__(self, cancel: Callable[[], Awaitable[object]]) -> None:
        self.was_interrupted = False
        self._cancel = cancel
        self._cancelling: asyncio.Task[None] | None = None
        self._owner: asyncio.Task[object] | None = None

    def __enter__(self) -> Self:
        self._owner = asyncio.current_task()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        if self._cancelling is not None:
            self._cancelling.cancel()

    def _on_interrupt(self) -> None:
        if self.was_interrupted and self._owner is not None:
            self._owner.cancel()
            return
        self.was_interrupted = True
        self._cancelling = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._cancel()
        except OutriderError:
            # The request cannot be cancelled: close its stream.
            if self._owner is not None:
                self._owner.cancel()
