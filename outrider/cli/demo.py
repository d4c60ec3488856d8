"""`outrider demo`: stream an answer, then compare speed and text with and without speculation."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import click
from rich.console import Console
from rich.table import Table

from outrider.cli.connection import started
from outrider.cli.examples import ExampleCommand
from outrider.cli.generate import stream
from outrider.cli.next_steps import grpc_lines, program
from outrider.cli.rendering import TextPrinter
from outrider.cli.stack_arguments import stack_options, take_stack
from outrider.cli.up import ADDRESS, HTTP_ADDRESS
from outrider.client.client import OutriderClient
from outrider.client.events import Generation
from outrider.client.request import GenerationRequest, Message, Speculation
from outrider.drafter_names import HEADS, LOOKUPS
from outrider.errors import OutriderError
from outrider.local.stack_options import DraftOptions
from outrider.parameters import SamplingParameters

_REPEATS = 3
_MAX_TOKENS = 96

_PLAIN = "Explain in a few sentences why the sky is blue."
_COPY = """Copy this text, word for word:

The outrider rode ahead of the carriage to look at the road. Where the road was good he waved, and the carriage went on
at full speed. Where the road was bad he came back, and the carriage took its own way. So the carriage never went where
it would not have gone without him, and it came home long before the others.
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt with speculation and without; tokens per second are medians over interleaved runs."""

    name: str
    prompt: str
    draft: DraftOptions
    speculative: list[Generation] = field(default_factory=list)
    plain: list[Generation] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether every run gave the same tokens and the same text."""
        runs = [(run.text, run.token_ids) for run in (*self.speculative, *self.plain)]
        return all(run == runs[0] for run in runs)


@click.command(
    cls=ExampleCommand,
    short_help="Start everything, answer a prompt, compare with plain decoding.",
    examples=(
        "outrider demo",
        "outrider demo --model ./my-model --max-tokens 200",
    ),
)
@stack_options
@click.option(
    "--max-tokens", type=click.IntRange(2), default=_MAX_TOKENS, show_default=True, help="Length of an answer."
)
def demo(max_tokens: int, **values: object) -> None:
    """Start all services here, stream an answer, then compare speculative with plain decoding.

    The comparison shows acceptance, tokens per second both ways, and whether the texts are the same; they must be, so a
    difference ends the command with an error.
    """
    options = take_stack({"drafter": None, **values})
    if options.drafts and options.drafts[0].drafter in HEADS:
        options = replace(options, drafts=(*options.drafts, DraftOptions("ngram")))
    parameters = SamplingParameters(temperature=0, max_tokens=max_tokens)

    async def run() -> list[Comparison]:
        click.echo("starting Valkey, a target, drafts and an orchestrator on this machine", err=True)
        async with started(options) as stack, stack.client() as client:
            await _answer(client, parameters)
            return [await _compare(client, comparison, parameters) for comparison in _planned(options.drafts)]

    comparisons = asyncio.run(run())
    Console().print(_table(comparisons))
    _print_next_steps()
    if different := [comparison.name for comparison in comparisons if not comparison.is_equal]:
        raise OutriderError(f"speculation changed the text of: {', '.join(different)}")


def _planned(drafts: Sequence[DraftOptions]) -> list[Comparison]:
    """Return what to compare: a question at each place where a head drafts, and a copy where texts are looked up."""
    heads = [draft for draft in drafts if draft.main in HEADS] or list(drafts[:1]) or [DraftOptions()]
    # A head that texts are looked up beside does without a draft for copies.
    copying = next((draft for draft in drafts if draft.drafter in LOOKUPS), heads[-1])
    return [*(Comparison("a question", _PLAIN, draft) for draft in heads), Comparison("a copy", _COPY, copying)]


def _print_next_steps() -> None:
    """Print what to try next: the stack of the demo has ended."""
    click.echo("next, start a stack that stays, then talk to it from another terminal:")
    for line in (f"{program()} up", *grpc_lines([ADDRESS]), f"http://{HTTP_ADDRESS}/docs"):
        click.echo(f"  {line}")


async def _answer(client: OutriderClient, parameters: SamplingParameters) -> None:
    """Stream one answer, coloured by the origin of its tokens."""
    click.secho(f"\n> {_COPY.strip()}\n", dim=True)
    await stream(client, _request(_COPY, parameters, Speculation()), None, TextPrinter(color=sys.stdout.isatty()))
    click.echo()


async def _compare(client: OutriderClient, comparison: Comparison, parameters: SamplingParameters) -> Comparison:
    draft = comparison.draft
    # Interleaved, so that whatever else the machine does falls on both.
    for _ in range(_REPEATS):
        for runs, speculation in (
            (comparison.speculative, Speculation(drafter=draft.drafter, draft_at=draft.at)),
            (comparison.plain, Speculation(disabled=True)),
        ):
            runs.append(await client.complete(_request(comparison.prompt, parameters, speculation)))
    return comparison


def _request(prompt: str, parameters: SamplingParameters, speculation: Speculation) -> GenerationRequest:
    return GenerationRequest(messages=[Message("user", prompt)], parameters=parameters, speculation=speculation)


def _table(comparisons: list[Comparison]) -> Table:
    table = Table(f"greedy, median of {_REPEATS}", *(comparison.name for comparison in comparisons))
    columns = [_figures(comparison) for comparison in comparisons]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _figures(comparison: Comparison) -> dict[str, str]:
    statistics = comparison.speculative[0].statistics
    speculative, plain = _speed(comparison.speculative), _speed(comparison.plain)
    return {
        "drafter": comparison.draft.drafter,
        "draft at": comparison.draft.at,
        "tokens": str(len(comparison.speculative[0].token_ids)),
        "acceptance rate": f"{statistics.acceptance_rate:.0%}",
        "mean acceptance length": f"{statistics.mean_acceptance_length:.2f}",
        "tokens/s with speculation": f"{speculative:.1f}",
        "tokens/s without": f"{plain:.1f}",
        "speed-up": f"{speculative / plain:.2f}x" if plain else "-",
        "same text": "yes" if comparison.is_equal else "NO",
    }


def _speed(runs: list[Generation]) -> float:
    return median(run.statistics.tokens_per_second for run in runs)
