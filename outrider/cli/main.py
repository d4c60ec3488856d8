"""The command line `outrider`."""

import asyncio
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from outrider import __version__
from outrider.cli.bench import bench
from outrider.cli.chat import chat
from outrider.cli.demo import demo
from outrider.cli.distill import distill
from outrider.cli.examples import ExampleSection
from outrider.cli.generate import INTERRUPTED, generate
from outrider.cli.info import info
from outrider.cli.plan import plan_command
from outrider.cli.up import up
from outrider.errors import OutriderError
from outrider.serving.variables import complaints


class OneLineErrors(ExampleSection, click.Group):
    """A group whose every failure is one line on standard error and an exit code: 2 for wrong usage, 1 otherwise."""

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
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except (click.Abort, KeyboardInterrupt, asyncio.CancelledError):
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, with errors as click reports them."""
        if strange := complaints(os.environ, ()):
            raise click.ClickException("\n".join(strange))
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if ctx.params["debug"]:
                raise
            raise click.ClickException(_explained(error)) from error


def _explained(error: Exception) -> str:
    if isinstance(error, OutriderError):
        return error.message
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        # The reader has gone (`outrider generate ... | head`); Python must not try to flush to it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return "the reader of the output has gone"
    return f"{type(error).__name__}: {error} (outrider --debug shows where)"


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"outrider: error: {message}", err=True)
    sys.exit(code)


@click.group(
    cls=OneLineErrors,
    examples=(
        "outrider demo                            see all of it in a minute",
        "outrider up                              start every service on this machine",
        'outrider generate "Once upon a time"     continue a prompt',
        "outrider chat                            talk with the model",
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="outrider")
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
def main(debug: bool) -> None:
    """Distributed speculative decoding: a draft model runs ahead, and the text is exactly the target model's own."""


for command in (up, generate, chat, info, bench, distill, plan_command, demo):
    main.add_command(command)
