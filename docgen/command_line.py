"""The page of the command line, from the commands of click."""

from collections.abc import Iterator
from inspect import cleandoc
from typing import Final

import click

from outrider.cli.examples import ExampleSection
from outrider.cli.main import main

_TOP: Final = """\
# Command line

`outrider` starts services, generates, measures and trains. `outrider COMMAND --help` shows the same as this page.
"""


def page() -> str:
    """Return the page as Markdown."""
    context = click.Context(main, info_name="outrider", **main.context_settings)
    return "\n".join([_TOP, *_body(main, context), *_sections(context)])


def _sections(context: click.Context) -> Iterator[str]:
    for name, command in sorted(main.commands.items()):
        child = click.Context(command, info_name=name, parent=context)
        yield f"## outrider {name}\n"
        yield from _body(command, child)


def _body(command: click.Command, context: click.Context) -> Iterator[str]:
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"```text\n{context.command_path} {usage}\n```\n"
    if command.help:
        yield cleandoc(command.help) + "\n"
    options = (item for item in command.get_params(context) if isinstance(item, click.Option))
    if records := [record for item in options if (record := item.get_help_record(context))]:
        yield "| option | meaning |\n|---|---|"
        yield "".join(f"| {_cell(f'`{names}`')} | {_cell(text)} |\n" for names, text in records)
    if isinstance(command, ExampleSection) and command.examples:
        yield "```text\n" + "\n".join(command.examples) + "\n```\n"


def _cell(text: str) -> str:
    """Return text for a table's cell.

    Brackets outside of code, as in `[x>=1] [default: 1]`, would be a link; a bar in code is shown with its escape.
    """
    parts = " ".join(text.split()).split("`")
    parts[::2] = [part.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[") for part in parts[::2]]
    parts[1::2] = [part.replace("|", ", ") for part in parts[1::2]]
    return "`".join(parts)
