"""How far a bench is, on standard error, so that results on standard output stay clean."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Step = Callable[[str], None]
"""Says what begins now; what began before is done."""

_LINE_PERIOD_S: Final = 30.0


@contextmanager
def progress(num_steps: int) -> Iterator[Step]:
    """Shows how many of so many steps are done: a bar on a terminal, elsewhere a line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(num_steps)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=num_steps)
        # The first step ends nothing.
        num_begun = iter(range(num_steps + 1))
        yield lambda name: bar.update(task, completed=next(num_begun, num_steps), description=name)


def _lines(num_steps: int) -> Step:
    """Returns a step that writes a line where the last one is some time ago: a log of hours stays short."""
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
