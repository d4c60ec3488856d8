"""The command line `outrider`."""

import asyncio
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from outrider import __version__
from outrider.cli.bench import bench
from outrider.cli.chat import chat
from outrider.cli.demo import demo
from outrider.cli.distill import distill
from outrider.cli.doctor import doctor
from outrider.cli.examples import ExampleSection
from outrider.cli.generate import INTERRUPTED, generate
from outrider.cli.info import info
from outrider.cli.plan import plan_command
from outrider.cli.up import up
from outrider.errors import InvalidArgument, OutriderError
from outrider.serving.variables import complaints

READER_GONE = 128 + signal.SIGPIPE
"""Exit code where the reader of the output has gone (`outrider generate ... | head`), as of other programs there."""


class OneLineErrors(ExampleSection, click.Group):
    """A group whose every failure is one line on standard error and an exit code.

    The code is 2 where the command line or a value in it is wrong, 130 after Ctrl-C, 141 (and no line) where the reader
    of the output has gone, and 1 otherwise.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run the command line and end the process."""
        try:
            sys.exit(self._code(args, prog_name, complete_var, **extra))
        except BrokenPipeError:
            _end_outputs()
            sys.exit(READER_GONE)

    def _code(self, args: Sequence[str] | None, prog_name: str | None, complete_var: str | None, **extra: Any) -> int:
        """Run the command line and return its exit code; raise BrokenPipeError where nobody reads the output."""
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            if sys.stdout is not None:
                sys.stdout.flush()
        except click.ClickException as error:
            click.echo(f"outrider: error: {error.format_message()}", err=True)
            return error.exit_code
        except (click.Abort, KeyboardInterrupt, asyncio.CancelledError):
            return INTERRUPTED
        except SystemExit:
            # click's own answer to an output that cannot be written.
            if _unread_outputs():
                raise BrokenPipeError from None
            raise
        return code if isinstance(code, int) else 0

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, with errors as click reports them."""
        if strange := complaints(os.environ, ()):
            raise click.ClickException("\n".join(strange))
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.params["debug"]:
                raise
            raise _reported(error) from error


def _reported(error: Exception) -> click.ClickException:
    """Return what click reports an error as."""
    if isinstance(error, InvalidArgument):
        return click.UsageError(error.message)
    if isinstance(error, OutriderError):
        return click.ClickException(error.message)
    return click.ClickException(f"{type(error).__name__}: {error} (outrider --debug shows where)")


def _end_outputs() -> None:
    """Turn the outputs without a reader to nowhere, so that Python's flush at the end of the process does not fail."""
    for descriptor in _unread_outputs():
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _unread_outputs() -> list[int]:
    """Return which of standard output and standard error are pipes whose other end is closed."""
    poll = select.poll()
    # What is wrong with a descriptor is reported without being asked for.
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            poll.register(stream.fileno(), 0)
    return [descriptor for descriptor, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]


@click.group(
    cls=OneLineErrors,
    invoke_without_command=True,
    examples=(
        "outrider demo                            see all of it in a minute",
        "outrider up                              start every service on this machine; prints its address",
        'outrider generate "Once upon a time"     continue a prompt (without --address it starts its own services)',
        'outrider generate "Hi" --chat --address 127.0.0.1:50050',
        "outrider chat                            talk with the model",
        "outrider info --address 127.0.0.1:50050  which models serve, and how loaded they are",
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="outrider")
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
@click.pass_context
def main(context: click.Context, debug: bool) -> None:
    """Distributed speculative decoding: a draft model runs ahead, and the text is exactly the target model's own.

    Begin with `outrider demo`. `outrider COMMAND --help` shows a command's options, with examples.

    Errors are one line on standard error. Exit codes: 2 the command line or a value in it is wrong, 130 Ctrl-C,
    141 the reader of the output has gone (as in `outrider ... | head`), 1 any other error.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (up, generate, chat, info, bench, distill, plan_command, doctor, demo):
    main.add_command(command)
