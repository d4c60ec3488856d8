"""`outrider up`: a whole stack on this machine, until Ctrl-C."""

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import click

from outrider.cli.connection import started
from outrider.cli.examples import ExampleCommand
from outrider.cli.next_steps import grpc_lines, http_lines, served_name
from outrider.cli.options import draft_at_option, drafter_option
from outrider.cli.stack_arguments import stack_options, take_stack, variable_option
from outrider.errors import Unavailable
from outrider.local.process import ServiceProcess
from outrider.local.stack import LocalStack, without_password
from outrider.local.stack_options import StackOptions

ADDRESS = "127.0.0.1:50050"
HTTP_ADDRESS = "127.0.0.1:8000"
"""Where orchestrators listen by default, if the ports are free."""
_CHECK_S = 0.5


def _names(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.strip() for value in values for name in value.split(",") if name.strip())


@click.command(
    cls=ExampleCommand,
    short_help="Start Redis and all services on this machine.",
    examples=(
        "outrider up",
        "outrider up --model ./llama --drafter layers --num-layers 8",
        "outrider up --model ./llama --kv-budget 40GiB --max-len 65536 --http-address 0.0.0.0:8000",
        "outrider up --redis-url redis://127.0.0.1:6379/0 --num-orchestrators 2",
        "outrider up --address 127.0.0.1:50050 --drafter none",
    ),
)
@drafter_option
@draft_at_option
@stack_options
@click.option("--num-targets", type=click.IntRange(1), default=1, show_default=True, help="Target processes.")
@click.option("--num-drafts", type=click.IntRange(1), default=1, show_default=True, help="Draft processes.")
@click.option("--num-orchestrators", type=click.IntRange(1), default=1, show_default=True, help="Orchestrators.")
@variable_option(
    "--address",
    variable="OUTRIDER_ADDRESS",
    default=f"{ADDRESS}+",
    show_default=True,
    metavar="HOST:PORT",
    help="Where orchestrators listen; HOST:PORT+ takes the next free port.",
)
@variable_option(
    "--http-address",
    variable="OUTRIDER_HTTP_ADDRESS",
    default=f"{HTTP_ADDRESS}+",
    show_default=True,
    metavar="HOST:PORT",
    help="Where they serve HTTP; `none` for no HTTP.",
)
@click.option(
    "--served-model-name",
    "served_model_names",
    envvar="OUTRIDER_SERVED_MODEL_NAMES",
    multiple=True,
    callback=_names,
    metavar="NAME",
    help="Name of the model over HTTP. Repeatable. [default: its hub id, or its folder's name]",
)
@click.option(
    "--target-threads", type=click.IntRange(0), default=0, help="CPU threads of a target. [default: all cores]"
)
@click.option("--metrics", is_flag=True, help="Expose Prometheus metrics of each process on a free port.")
@click.option("--draft-threads", type=click.IntRange(0), default=1, show_default=True, help="CPU threads of a draft.")
def up(**values: Any) -> None:
    """Start an embedded Valkey, targets, drafts and orchestrators, each a process of its own.

    Prints their addresses and what to try when requests can be served, then waits. Ctrl-C or SIGTERM drains everything.
    Give the printed address to the other commands with --address.
    """
    extent = {
        name: values.pop(name)
        for name in ("num_targets", "num_orchestrators", "target_threads", "address", "served_model_names")
    }
    draft = {"num_replicas": values.pop("num_drafts"), "num_threads": values.pop("draft_threads")}
    http_address, metrics = values.pop("http_address"), values.pop("metrics")
    for option, address in (("--address", extent["address"]), ("--http-address", http_address)):
        if extent["num_orchestrators"] > 1 and address not in ("", "none") and not address.endswith((":0", "+")):
            raise click.UsageError(f"{option} goes with one orchestrator; {address}+ takes the next free ports")
    options = take_stack(values)
    drafts = tuple(replace(kind, **draft) for kind in options.drafts)
    web = "" if http_address == "none" else http_address
    asyncio.run(_run(replace(options, drafts=drafts, http_address=web, exposes_metrics=metrics, **extent)))


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
        http = f"  http://{process.http_address}" if process.http_address else ""
        metrics = f"  http://{process.metrics_address}/metrics" if stack.options.exposes_metrics else ""
        click.echo(f"{process.spec.name:<20} {process.address}{http}{metrics}")
    click.echo(f"{'logs':<20} {stack.directory}")
    for sentence in _moved(stack):
        click.echo(sentence, err=True)
    click.echo("ready; try:")
    for line in grpc_lines(stack.addresses):
        click.echo(f"  {line}")
    if stack.base_url:
        for line in http_lines(stack.base_url, served_name(stack.options.model, stack.options.served_model_names)):
            click.echo(f"  {line}")


def _moved(stack: LocalStack) -> Iterator[str]:
    """Yield a sentence for each port that was taken, and another one used in its place."""
    first = stack.orchestrators[0]
    for wanted, address in ((stack.options.address, first.address), (stack.options.http_address, first.http_address)):
        if wanted.endswith("+") and address and address != wanted.removesuffix("+"):
            yield f"port {wanted.removesuffix('+').rpartition(':')[2]} is taken: using {address}"


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
