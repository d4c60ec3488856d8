"""The progress of a benchmark on standard error, separate from results on standard output."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Step = Callable[[str], None]
"""Called with the name of the step that begins; the previous step is done."""

_LINE_PERIOD_S: Final = 30.0


@contextmanager
def progress(num_steps: int) -> Iterator[Step]:
    """Show the progress over `num_steps` steps: a bar on a terminal, otherwise a line at most every 30 s."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(num_steps)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=num_steps)
        # The first call completes no step.
        num_begun = iter(range(num_steps + 1))
        yield lambda name: bar.update(task, completed=next(num_begun, num_steps), description=name)


def _lines(num_steps: int) -> Step:
    """Return a step function that writes a line at most every 30 s."""
    start_s = time.monotonic()
    last_s = start_s
    num_done = 0

    def step(name: str) -> None:
        nonlocal last_s, num_done
        now_s = time.monotonic()
        if now_s - last_s >= _LINE_PERIOD_S:
            print(f"{num_done} of {num_steps} done in {now_s - start_s:.0f} s: {name}", file=sys.stderr, flush=True)
            last_s = now_s
        num_done = min(num_done + 1, num_steps)

    return step
