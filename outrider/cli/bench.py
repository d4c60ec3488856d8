"""`outrider bench`: run a bench of the package `bench`, which is imported only here."""

import importlib
import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from outrider.cli.examples import ExampleCommand
from outrider.errors import OutriderError

_REGISTRY = "bench.registry"


@click.command(
    cls=ExampleCommand,
    short_help="Measure; without a name, list what can be measured.",
    examples=(
        "outrider bench",
        "outrider bench overhead",
        "outrider bench speed --json",
        "outrider bench speed --plot speed.png",
    ),
)
@click.argument("name", required=False)
@click.argument("arguments", nargs=-1)
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object: bench, config, rows, figures.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a picture to this PNG file.")
def bench(name: str | None, arguments: tuple[str, ...], wants_json: bool, plot: Path | None) -> None:
    """Run the bench NAME on this machine; without a name, list them all; ARGUMENTS are its own, NAME=VALUE."""
    registry = _registry()
    if name is None:
        for known, summary in registry.summaries().items():
            click.echo(f"{known:<14} {summary}")
        return
    if name not in registry.names():
        raise click.UsageError(f"no bench is named {name!r}; there are: {', '.join(registry.names())}")
    result = registry.run(name, arguments=_pairs(arguments), plot=plot)
    if wants_json:
        click.echo(json.dumps(result))
    else:
        _print(result)


def _registry() -> Any:
    # Benches load model libraries, which no other command may need.
    try:
        return importlib.import_module(_REGISTRY)
    except ModuleNotFoundError as error:
        missing = error.name or _REGISTRY
        raise OutriderError(f"benches need the module {missing}: pip install 'outrider[bench]'") from error


def _pairs(arguments: tuple[str, ...]) -> dict[str, str]:
    if wrong := [argument for argument in arguments if "=" not in argument]:
        raise click.UsageError(f"{wrong[0]!r} is not NAME=VALUE")
    return {name: value for name, _, value in (argument.partition("=") for argument in arguments)}


def _print(result: dict[str, Any]) -> None:
    console = Console()
    console.print(" · ".join(f"{name} {value}" for name, value in result["config"].items()), style="dim")
    rows = result["rows"]
    if rows:
        table = Table(*rows[0].keys())
        for row in rows:
            table.add_row(*(_cell(value) for value in row.values()))
        console.print(table)
    for name, value in result["figures"].items():
        console.print(f"{name}: {_cell(value)}")


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
