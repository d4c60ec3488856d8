"""`outrider up`: a whole stack on this machine, until Ctrl-C."""

import asyncio
import signal
from dataclasses import replace
from typing import Any

import click

from outrider.cli.connection import started
from outrider.cli.examples import ExampleCommand
from outrider.cli.options import drafter_option, stack_options, take_stack
from outrider.errors import Unavailable
from outrider.local.process import ServiceProcess
from outrider.local.stack import LocalStack, without_password
from outrider.local.stack_options import StackOptions

_CHECK_S = 0.5


@click.command(
    cls=ExampleCommand,
    short_help="Start Redis and all services on this machine.",
    examples=(
        "outrider up",
        "outrider up --model ./llama --drafter layers --num-layers 8",
        "outrider up --redis-url redis://127.0.0.1:6379/0 --num-orchestrators 2",
        "outrider up --address 127.0.0.1:50050 --drafter none",
    ),
)
@drafter_option
@stack_options
@click.option("--num-targets", type=click.IntRange(1), default=1, show_default=True, help="Target processes.")
@click.option("--num-drafts", type=click.IntRange(1), default=1, show_default=True, help="Draft processes.")
@click.option("--num-orchestrators", type=click.IntRange(1), default=1, show_default=True, help="Orchestrators.")
@click.option(
    "--address", default="", metavar="HOST:PORT", help="Where the orchestrator listens. [default: a free port]"
)
@click.option(
    "--target-threads", type=click.IntRange(0), default=0, help="CPU threads of a target. [default: all cores]"
)
@click.option("--metrics", is_flag=True, help="Expose Prometheus metrics of each process on a free port.")
@click.option("--draft-threads", type=click.IntRange(0), default=1, show_default=True, help="CPU threads of a draft.")
def up(**values: Any) -> None:
    """Start an embedded Valkey, targets, drafts and orchestrators, each a process of its own, on free ports.

    Prints their addresses when requests can be served, then waits. Ctrl-C or SIGTERM drains everything. Give
    the printed address to the other commands with --address.
    """
    extent = {name: values.pop(name) for name in ("num_targets", "num_orchestrators", "target_threads")}
    draft = {"num_replicas": values.pop("num_drafts"), "num_threads": values.pop("draft_threads")}
    address, metrics = values.pop("address"), values.pop("metrics")
    if address and extent["num_orchestrators"] > 1:
        raise click.UsageError("--address goes with one orchestrator")
    options = take_stack(values)
    drafts = tuple(replace(kind, **draft) for kind in options.drafts)
    orchestrator = {"OUTRIDER_ADDRESS": address} if address else {}
    asyncio.run(
        _run(replace(options, drafts=drafts, orchestrator_environment=orchestrator, exposes_metrics=metrics, **extent))
    )


async def _run(options: StackOptions) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with started(options) as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        _print_addresses(stack)
        await _watch(stack, stopped)
        click.echo("draining", err=True)


def _print_addresses(stack: LocalStack) -> None:
    click.echo(f"{'redis':<20} {without_password(stack.redis_url)}")
    for process in (*stack.targets, *stack.drafts, *stack.orchestrators):
        metrics = f"  http://{process.metrics_address}/metrics" if stack.options.exposes_metrics else ""
        click.echo(f"{process.spec.name:<20} {process.address}{metrics}")
    click.echo(f"{'logs':<20} {stack.directory}")
    addresses = " ".join(f"--address {address}" for address in stack.addresses)
    click.echo(f'ready; try: outrider generate "Once upon a time" {addresses}')


async def _watch(stack: LocalStack, stopped: asyncio.Event) -> None:
    """Return when stopped; report each service that has ended, and fail when no request can be served any more."""
    known: set[ServiceProcess] = set()
    while not stopped.is_set():
        ended = {process for process in stack.processes if not process.is_running}
        for process in sorted(ended - known, key=lambda process: process.spec.name):
            click.echo(f"{process.spec.name} has ended; its log: {process.log}", err=True)
        known |= ended
        for group in (stack.targets, stack.orchestrators):
            if ended.issuperset(group):
                raise Unavailable(f"{group[0].spec.module}: no process is left")
        try:
            async with asyncio.timeout(_CHECK_S):
                await stopped.wait()
        except TimeoutError:
            continue
