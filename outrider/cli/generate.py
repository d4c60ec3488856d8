"""`outrider generate`: one request, streamed."""

import asyncio
import json
import sys
from contextlib import aclosing
from typing import Any

import click

from outrider.cli.connection import connected
from outrider.cli.examples import ExampleCommand
from outrider.cli.interrupt import CancelOnInterrupt
from outrider.cli.options import (
    address_option,
    parse_token_ids,
    sampling_options,
    speculation_options,
    take_sampling,
    take_speculation,
)
from outrider.cli.rendering import TextPrinter, as_json, summary
from outrider.cli.stack_arguments import stack_options, take_stack
from outrider.cli.waiting import ReadingPrompt
from outrider.client.client import OutriderClient
from outrider.client.events import Generation
from outrider.client.request import GenerationRequest, Message

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


@click.command(
    cls=ExampleCommand,
    short_help="Continue a prompt, streaming the text.",
    examples=(
        'outrider generate "Once upon a time" --max-tokens 64',
        'outrider generate "Why is the sky blue?" --chat --temperature 0 --color',
        "outrider generate - --raw < essay.txt",
        'outrider generate "Hi" --address 127.0.0.1:50050 --seed 7 --json',
        'outrider generate "3 1 4 1 5" --token-ids --model markov:vocabulary=16',
    ),
)
@click.argument("prompt")
@address_option
@click.option(
    "--chat/--raw", default=False, help="Take the prompt as a chat message, or as text to continue (default)."
)
@click.option("--system", default="", metavar="TEXT", help="System message, with --chat.")
@click.option("--token-ids", is_flag=True, help="The prompt is token ids, with commas or spaces between them.")
@click.option("--session-id", default="", help="Continue this session, or create it under this id.")
@click.option("--request-id", default="", help="Repeating a request under the same id gives the same output.")
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="Bound on the whole generation.")
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object at the end instead of the text.")
@click.option("--color", is_flag=True, help="Colour the text by how each token came to be.")
@click.option("--quiet", is_flag=True, help="No line of figures on standard error.")
@sampling_options
@speculation_options
@stack_options
def generate(prompt: str, addresses: tuple[str, ...], **values: Any) -> None:
    """Continue PROMPT and stream the text; PROMPT - reads it from standard input.

    Without --address a stack of this machine is started for this one request. Ctrl-C ends the generation and keeps
    what has been generated in its session.
    """
    timeout_s, wants_json, color, quiet = (values.pop(name) for name in ("timeout_s", "wants_json", "color", "quiet"))
    request = _request(prompt, values)
    options = take_stack(values)

    async def run() -> tuple[Generation, bool]:
        async with connected(addresses, options) as client:
            printer = None if wants_json else TextPrinter(color=color)
            return await stream(client, request, timeout_s, printer)

    generation, was_interrupted = asyncio.run(run())
    if wants_json:
        answer = as_json(generation, with_logprobs=request.parameters.logprobs is not None)
        click.echo(json.dumps(answer, ensure_ascii=False))
    elif not quiet:
        click.echo(click.style(summary(generation), dim=True), err=True)
    if was_interrupted:
        raise click.exceptions.Exit(INTERRUPTED)


async def stream(
    client: OutriderClient, request: GenerationRequest, timeout_s: float | None, printer: TextPrinter | None
) -> tuple[Generation, bool]:
    """Run a request and print its events; return the generation, and whether Ctrl-C ended it."""
    generation = Generation()

    async def cancel() -> None:
        await client.cancel(generation.session_id or request.session_id, request.request_id)

    with CancelOnInterrupt(cancel) as interrupt, ReadingPrompt() as reading:
        async with aclosing(client.generate(request, timeout_s=timeout_s)) as events:
            async for event in events:
                generation.add(event)
                reading.show(event)
                if printer is not None:
                    printer.print(event)
    if printer is not None:
        printer.end(generation)
    return generation, interrupt.was_interrupted


def _request(prompt: str, values: dict[str, Any]) -> GenerationRequest:
    """Take the options of the request out of `values`."""
    as_chat, system, as_token_ids = (values.pop(name) for name in ("chat", "system", "token_ids"))
    identity = {name: value for name in ("session_id", "request_id") if (value := values.pop(name))}
    if as_chat and as_token_ids:
        raise click.UsageError("--chat and --token-ids exclude each other")
    if system and not as_chat:
        raise click.UsageError("--system goes with --chat")
    text = sys.stdin.read() if prompt == "-" else prompt
    opening = [Message("system", system)] if system else []
    return GenerationRequest(
        text=None if as_chat or as_token_ids else text,
        token_ids=parse_token_ids(text) if as_token_ids else None,
        messages=[*opening, Message("user", text)] if as_chat else None,
        parameters=take_sampling(values),
        speculation=take_speculation(values),
        **identity,
    )
