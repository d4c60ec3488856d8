"""`outrider demo`: stream an answer, then compare speed and text with and without speculation."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
from outrider.statistics import SpeculationStatistics

_NUM_COPIES = 3
_MAX_TOKENS = 96

# Of several kinds: how well an answer can be drafted depends on what it says, and a single one shows little.
_QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that reverses the words of a sentence.",
    "I have two hours in a city that I do not know. What should I do?",
    "List the steps to install a program from its source on Linux.",
)
_COPY = """Copy this text, word for word:

The outrider rode ahead of the carriage to look at the road. Where the road was good he waved, and the carriage went on
at full speed. Where the road was bad he came back, and the carriage took its own way. So the carriage never went where
it would not have gone without him, and it came home long before the others.
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Prompts with speculation and without, in turn."""

    name: str
    prompts: Sequence[str]
    draft: DraftOptions
    speculative: list[Generation] = field(default_factory=list)
    plain: list[Generation] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether every prompt gave the same tokens and the same text with speculation and without."""
        pairs = zip(self.speculative, self.plain, strict=True)
        return all((one.text, one.token_ids) == (other.text, other.token_ids) for one, other in pairs)


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
    """Return what to compare: questions at each place where a head drafts, and a copy where texts are looked up."""
    heads = [draft for draft in drafts if draft.main in HEADS] or list(drafts[:1]) or [DraftOptions()]
    # A head that texts are looked up beside does without a draft for copies.
    copying = next((draft for draft in drafts if draft.drafter in LOOKUPS), heads[-1])
    questions = f"{len(_QUESTIONS)} questions"
    return [
        *(Comparison(questions, _QUESTIONS, draft) for draft in heads),
        Comparison(f"a copy, {_NUM_COPIES} times", _NUM_COPIES * [_COPY], copying),
    ]


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
    # In turn, so that whatever else the machine does falls on both.
    for prompt in comparison.prompts:
        for runs, speculation in (
            (comparison.speculative, Speculation(drafter=draft.drafter, draft_at=draft.at)),
            (comparison.plain, Speculation(disabled=True)),
        ):
            runs.append(await client.complete(_request(prompt, parameters, speculation)))
    return comparison


def _request(prompt: str, parameters: SamplingParameters, speculation: Speculation) -> GenerationRequest:
    return GenerationRequest(messages=[Message("user", prompt)], parameters=parameters, speculation=speculation)


def _table(comparisons: list[Comparison]) -> Table:
    table = Table("greedy", *(comparison.name for comparison in comparisons))
    columns = [figures(comparison) for comparison in comparisons]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def figures(comparison: Comparison) -> dict[str, str]:
    """Return the column of a comparison: figures over all its runs, by their names."""
    found = [run.statistics for run in comparison.speculative]
    statistics = SpeculationStatistics(
        num_drafts=sum(item.num_drafts for item in found),
        num_draft_tokens=sum(item.num_draft_tokens for item in found),
        num_accepted_tokens=sum(item.num_accepted_tokens for item in found),
    )
    speculative, plain = _speed(comparison.speculative), _speed(comparison.plain)
    return {
        "drafter": comparison.draft.drafter,
        "draft at": comparison.draft.at,
        "tokens": str(sum(len(run.token_ids) for run in comparison.speculative)),
        "acceptance rate": f"{statistics.acceptance_rate:.0%}",
        "mean acceptance length": f"{statistics.mean_acceptance_length:.2f}",
        "tokens/s with speculation": f"{speculative:.1f}",
        "tokens/s without": f"{plain:.1f}",
        "speed-up": f"{speculative / plain:.2f}x" if plain else "-",
        "same text": "yes" if comparison.is_equal else "NO",
    }


def _speed(runs: Sequence[Generation]) -> float:
    """Return the tokens per second between the first and the last token of each run, over all runs."""
    timed = [(len(run.token_ids) - 1, run.statistics.tokens_per_second) for run in runs]
    seconds = sum(num / per_second for num, per_second in timed if per_second)
    return sum(num for num, per_second in timed if per_second) / seconds if seconds else 0.0
