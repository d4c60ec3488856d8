"""The connection of a command: to the orchestrators given by --address, or to a local stack of its own."""

import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from outrider.cli.options import CONNECTION
from outrider.cli.stack_arguments import unused_variables
from outrider.client.client import OutriderClient
from outrider.client.retry import RetryPolicy
from outrider.errors import OutriderError
from outrider.local.stack import LocalStack
from outrider.local.stack import Progress as Report
from outrider.local.stack_options import StackOptions
from outrider.serving.tls import TlsFiles

# A person waits in front of it, and a wrong address is likelier than an orchestrator that is just coming back.
_RETRY = RetryPolicy(max_attempts=6)


def client_of(addresses: Sequence[str]) -> OutriderClient:
    """Return a client of these orchestrators, with the token and the certificates that the command was given."""
    known = click.get_current_context().meta
    token, authority, certificate, key = (
        known.get(f"{CONNECTION}.{name}") for name in ("token", "tls_authority", "tls_certificate", "tls_key")
    )
    tls = TlsFiles(certificate, key, authority) if authority or certificate or key else None
    return OutriderClient(addresses, retry=_RETRY, token=token or "", tls=tls)


@asynccontextmanager
async def connected(addresses: Sequence[str], options: StackOptions) -> AsyncGenerator[OutriderClient, None]:
    """Give a client of the orchestrators at `addresses`; without any, of a local stack that ends with the block."""
    if addresses:
        async with client_of(addresses) as client:
            yield client
        return
    async with started(options) as stack, stack.client() as client:
        yield client


@asynccontextmanager
async def started(options: StackOptions) -> AsyncGenerator[LocalStack, None]:
    """Give a started local stack; its progress is shown on standard error, and what is not used, with the reason."""
    for sentence in unused_variables(os.environ):
        warn(sentence)
    with progress_report() as report:
        stack = LocalStack(options, progress=report)
        await stack.start()
    try:
        await _warn_of_idle_workers(stack)
        yield stack
    finally:
        await stack.close()


def warn(sentence: str) -> None:
    """Print a warning on standard error."""
    click.echo(f"outrider: warning: {sentence}", err=True)


async def _warn_of_idle_workers(stack: LocalStack) -> None:
    """Warn of each worker that gets no sessions: drafts only help, so that requests would not show it."""
    try:
        async with client_of(stack.addresses[:1]) as client:
            idle = await stack.out_of_rotation(client)
    except OutriderError as error:
        warn(f"it is not known whether all workers get sessions: {error.message}")
        return
    for line in idle:
        warn(f"out of rotation: {line}")


@contextmanager
def progress_report() -> Iterator[Report]:
    """Give a function that shows a progress line for each process; on a terminal only, removed when all are ready."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def report(name: str, line: str) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=1)
            done = line.startswith("ready")
            bars.update(tasks[name], description=f"{name:<16} {line[:70]}", completed=1 if done else 0)

        yield report
