"""`outrider chat`: a conversation of many turns in one session."""

import asyncio
import sys
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

import click

from outrider.cli.connection import connected
from outrider.cli.examples import ExampleCommand
from outrider.cli.interrupt import CancelOnInterrupt
from outrider.cli.options import (
    address_option,
    sampling_options,
    speculation_options,
    take_sampling,
    take_speculation,
)
from outrider.cli.rendering import TextPrinter, summary
from outrider.cli.stack_arguments import stack_options, take_stack
from outrider.cli.waiting import ReadingPrompt
from outrider.client.client import OutriderClient
from outrider.client.conversation import Conversation
from outrider.client.events import Generation
from outrider.errors import InvalidArgument, Overloaded, SessionBusy
from outrider.local.stack_options import StackOptions

_HINT = "/help lists the commands, /exit (or Ctrl-D) ends the conversation, Ctrl-C stops an answer."
_HELP = """\
/help    lists these commands
/reset   starts a new conversation
/stats   prints the figures of the last answer
/exit    ends the conversation; so do /quit and Ctrl-D
//text   sends a text that begins with /: "/text\""""
_ENDS = ("/exit", "/quit")


@click.command(
    cls=ExampleCommand,
    short_help="Talk with the model, turn by turn.",
    examples=(
        "outrider chat",
        'outrider chat --address 127.0.0.1:50050 --system "Answer in one sentence." --color',
        "printf 'My name is Ada.\\nWhat is my name?\\n' | outrider chat --temperature 0",
    ),
)
@address_option
@click.option("--system", default="", metavar="TEXT", help="System message ahead of the first turn.")
@click.option("--session-id", default="", help="Continue this session, or create it under this id.")
@click.option("--color", is_flag=True, help="Colour answers by how each token came to be.")
@click.option("--stats", is_flag=True, help="Print a line of figures after each answer.")
@sampling_options
@speculation_options
@stack_options
def chat(addresses: tuple[str, ...], **values: Any) -> None:
    """Talk with the model: each line is a turn, the session remembers the ones before.

    Only new messages travel; earlier turns stay in the session, on a warm KV cache. Lines may be piped in. /help
    lists the commands, /exit ends the conversation, Ctrl-C stops an answer.
    """
    color, stats, system = (values.pop(name) for name in ("color", "stats", "system"))
    session = {"session_id": session_id} if (session_id := values.pop("session_id")) else {}
    parameters, speculation = take_sampling(values), take_speculation(values)
    options = take_stack(values)
    # The loop runs only during turns, so that Ctrl-C and Ctrl-D at the prompt are the terminal's own.
    with asyncio.Runner() as runner:
        connection = AsyncExitStack()
        try:
            client = runner.run(_enter(connection, addresses, options))
            conversation = Conversation(client, system, parameters, speculation, **session)
            _converse(runner, conversation, TextPrinter(color=color), stats=stats)
        finally:
            runner.run(connection.aclose())


async def _enter(connection: AsyncExitStack, addresses: tuple[str, ...], options: StackOptions) -> OutriderClient:
    return await connection.enter_async_context(connected(addresses, options))


def _converse(runner: asyncio.Runner, conversation: Conversation, printer: TextPrinter, *, stats: bool) -> None:
    """Take turns until the input ends; after an error an interactive user may continue, a pipe may not."""
    is_interactive = sys.stdin.isatty()
    last: Generation | None = None
    if is_interactive:
        _edit_lines()
        _note(_HINT)
    while (line := _read_line(is_interactive)) is not None and line not in _ENDS:
        try:
            if line.startswith("/") and not line.startswith("//"):
                _obey(runner, conversation, line, last)
            elif line:
                last = runner.run(_answer(conversation, line.removeprefix("/"), printer))
                if stats:
                    _note(summary(last))
        except (InvalidArgument, SessionBusy, Overloaded) as error:
            if not is_interactive:
                raise
            click.echo(f"outrider: error: {error.message}", err=True)


def _obey(runner: asyncio.Runner, conversation: Conversation, command: str, last: Generation | None) -> None:
    """Run a command of the conversation; raise `InvalidArgument` for an unknown one."""
    match command:
        case "/reset":
            runner.run(conversation.reset())
        case "/help":
            _note(_HELP)
        case "/stats":
            _note("there is no answer yet" if last is None else summary(last))
        case _:
            raise InvalidArgument(f"{command.split()[0]} is unknown; /help lists the commands, // sends a /", "command")


def _note(text: str) -> None:
    click.echo(click.style(text, dim=True), err=True)


async def _answer(conversation: Conversation, line: str, printer: TextPrinter) -> Generation:
    generation = Generation()
    with CancelOnInterrupt(conversation.cancel), ReadingPrompt() as reading:
        async with aclosing(conversation.send(line)) as events:
            async for event in events:
                generation.add(event)
                reading.show(event)
                printer.print(event)
    printer.end(generation)
    return generation


def _read_line(is_interactive: bool) -> str | None:
    """Return the next line without blanks around it; None at the end of the input."""
    try:
        return input("> " if is_interactive else "").strip()
    except EOFError:
        return None


def _edit_lines() -> None:
    """Give `input` history and editing where Python was built with them."""
    with suppress(ImportError):
        import readline  # noqa: F401
