"""A progress bar on standard error, so that results on standard output stay clean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Step = Callable[[str], None]
"""Says what begins now; what began before is done."""


@contextmanager
def progress(num_steps: int) -> Iterator[Step]:
    """Shows how many of so many steps are done, where standard error is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("starting", total=num_steps)
        # The first step ends nothing.
        num_begun = iter(range(num_steps + 1))
        yield lambda name: bar.update(task, completed=next(num_begun, num_steps), description=name)
