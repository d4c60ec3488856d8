"""A line that shows on a terminal that the model still reads the prompt."""

import asyncio
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_DELAY_S: Final = 0.4
"""Seconds before the line is shown: for a short prompt it would only flicker."""


class ReadingPrompt:
    """Shows "reading the prompt ..." with the time since its block was entered, until `end`; on a terminal only."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._is_shown = console.is_terminal
        self._line = Progress(*columns, console=console, transient=True)
        self._timer: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """Remove the line; no-op where it is gone already."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._line.stop()

    def __enter__(self) -> Self:
        if self._is_shown:
            self._line.add_task("reading the prompt ...", total=None)
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self._line.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
