"""`outrider distill`: a door to the package `outrider.training`, which is loaded only here."""

import importlib
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outrider.cli.examples import ExampleCommand
from outrider.errors import OutriderError

_METHODS = ("eagle3", "block", "layers", "medusa")


@click.command(
    cls=ExampleCommand,
    short_help="Train a draft that fits a target.",
    examples=(
        "outrider distill embedded ./draft                            a head for the embedded model, in half an hour",
        "outrider distill ./llama ./draft --method layers --budget 8h",
        "outrider distill ./llama ./draft --prompts users.jsonl       on prompts of your own",
        "outrider distill ./llama ./draft --data ./conversations      on conversations that were made before",
    ),
)
@click.argument("target")
@click.argument("output", type=click.Path(file_okay=False, path_type=Path))
@click.option("--method", type=click.Choice(_METHODS), default="eagle3", show_default=True, help="Kind of draft.")
@click.option("--budget", default="30m", show_default=True, metavar="TIME", help="Time for the training: 90s, 30m, 8h.")
@click.option("--steps", default=0, type=click.IntRange(0), help="Optimizer steps, in place of a budget.")
@click.option("--data", type=click.Path(exists=True, path_type=Path), help="Conversations: a file or folder.")
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Prompts, as JSON lines.")
@click.option(
    "--conversations",
    default=4000,
    show_default=True,
    type=click.IntRange(2),
    help="Conversations that the target writes itself.",
)
@click.option(
    "--depth",
    default=4,
    show_default=True,
    type=click.IntRange(1, 16),
    help="Draft tokens that are trained, one after another.",
)
@click.option(
    "--vocabulary",
    default=8192,
    show_default=True,
    type=click.IntRange(1),
    help="Size of the draft's vocabulary, in tokens.",
)
@click.option("--num-layers", default=2, show_default=True, type=click.IntRange(1), help="Layers, for `layers`.")
@click.option(
    "--start",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="EAGLE-3 head that `block` begins as, or block head to train on.",
)
@click.option("--batch", default=2048, show_default=True, type=click.IntRange(1), help="Tokens of one pass.")
@click.option("--accumulate", default=1, show_default=True, type=click.IntRange(1), help="Passes of one step.")
@click.option("--learning-rate", default=2e-3, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--seed", default=0, show_default=True, help="Of the data's order and the first weights.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
@click.option("--checkpoint-every", default="60s", show_default=True, metavar="TIME", help="Between checkpoints.")
@click.option("--trim", is_flag=True, help="Leave out a head's output layer, the target's own.")
@click.option("--json", "wants_json", is_flag=True, help="Print the results as one JSON object.")
def distill(output: Path, wants_json: bool, **values: Any) -> None:
    """Make a draft for TARGET (a folder, a hub id, or `embedded`) in the folder OUTPUT.

    Without --data or --prompts the target writes the conversations itself: what users might ask, then its answers.
    A run that was stopped goes on where it was when it is started again with the same options.
    """
    training = _training("distill")
    options = _training("options")
    synthesis = _training("synthesis")
    wanted = options.DistillOptions(
        target=values["target"],
        output=output,
        method=options.MethodKind(values["method"]),
        budget_s=options.parse_duration(values["budget"]),
        num_steps=values["steps"],
        depth=values["depth"],
        draft_vocab_size=values["vocabulary"],
        num_layers=values["num_layers"],
        start=values["start"],
        tokens_per_batch=values["batch"],
        accumulate=values["accumulate"],
        learning_rate=values["learning_rate"],
        seed=values["seed"],
        device=values["device"],
        checkpoint_every_s=options.parse_duration(values["checkpoint_every"]),
        trim=values["trim"],
    )
    data = training.DataOptions(
        corpus=values["data"],
        prompts=values["prompts"],
        synthesis=synthesis.SynthesisOptions(num_conversations=values["conversations"], seed=values["seed"]),
    )
    command = "outrider " + shlex.join(sys.argv[1:])
    with _bars() as reporter:
        results = training.distill(wanted, data, command, reporter)
    click.echo(json.dumps(results.as_json()) if wants_json else f"the draft is in {output}; see {output / 'README.md'}")


class Bars:
    """Progress on standard error: bars on a terminal, else a line now and then."""

    def __init__(self, progress: Progress, is_terminal: bool) -> None:
        self._progress = progress
        self._is_terminal = is_terminal
        self._tasks: dict[str, Any] = {}
        self._shown = 0.0

    def stage(self, name: str, done: int, total: int) -> None:
        """Show that a part of a stage's work is done."""
        self._show(name, done, total, "")

    def training(self, progress: Any) -> None:
        """Show the progress after a training step."""
        held_out = f" held-out acceptance {progress.acceptance:.1%}" if progress.acceptance is not None else ""
        left = f" {progress.remaining_s / 60:.0f} min left" if progress.num_steps else " planning"
        self._show("training", progress.step, progress.num_steps, f"loss {progress.loss:.3f}{held_out}{left}")

    def _show(self, name: str, done: int, total: int, text: str) -> None:
        if self._is_terminal:
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=None, text="")
            self._progress.update(self._tasks[name], completed=done, total=total or None, text=text)
            return
        share = done / total if total else 0.0
        if share >= self._shown + 0.05 or done >= total > 0 or share < self._shown:
            self._shown = share if done < total else 0.0
            click.echo(f"{name} {done}/{total} {text}".rstrip(), err=True)


@contextmanager
def _bars() -> Iterator[Bars]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield Bars(progress, console.is_terminal)


def _training(module: str) -> Any:
    # Training loads model libraries, which no other command may need.
    try:
        return importlib.import_module(f"outrider.training.{module}")
    except ModuleNotFoundError as error:
        raise OutriderError(f"distilling needs the module {error.name}: pip install 'outrider[training]'") from error
