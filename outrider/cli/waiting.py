"""A line that shows on a terminal how far the model has read the prompt."""

import asyncio
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from outrider.client.events import Accepted, Delta, Event, Finished, Notice, NoticeKind

_DELAY_S: Final = 0.4
"""Seconds before the line is shown: for a short prompt it would only flicker."""


class ReadingPrompt:
    """Shows how much of the prompt was read, from the block's begin until the first text; on a terminal only."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._is_shown = console.is_terminal
        self._line = Progress(*columns, console=console, transient=True)
        self._timer: asyncio.TimerHandle | None = None
        self._task = TaskID(0)
        self._num_tokens = 0

    def show(self, event: Event) -> None:
        """Show what an event tells of the prompt; remove the line where it has text."""
        match event:
            case Accepted():
                self._num_tokens = event.session_len + event.num_prompt_tokens
            case Notice(kind=NoticeKind.PREFILL):
                if self._timer is not None:
                    text = f"reading the prompt: {event.num_tokens:,} of {self._num_tokens:,} tokens"
                    self._line.update(self._task, description=text, total=self._num_tokens, completed=event.num_tokens)
            case Delta() | Finished():
                self.end()

    def end(self) -> None:
        """Remove the line; no-op where it is gone already."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._line.stop()

    def __enter__(self) -> Self:
        if self._is_shown:
            self._task = self._line.add_task("reading the prompt ...", total=None)
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self._line.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
