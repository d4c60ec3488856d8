"""Command-line options that several commands share, and the objects made of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from outrider.client.addresses import checked_addresses
from outrider.client.request import Speculation
from outrider.constraint import Constraint
from outrider.drafter_names import DRAFTERS
from outrider.errors import InvalidArgument
from outrider.parameters import DRAFT_PLACES, AcceptanceRule, SamplingParameters

F = TypeVar("F", bound=Callable[..., Any])

_FILE: Final[Any] = {"type": click.Path(exists=True, dir_okay=False, path_type=Path), "metavar": "FILE"}
CONNECTION: Final = "outrider.connection"
"""Where a command's context keeps the options about connections."""

_DEFAULTS = SamplingParameters()
NO_DRAFTER: Final = "none"
_MODELS = "the model's"
_CONSTRAINTS: Final = ("json_schema", "json_object", "regex", "choice", "grammar")
_RULES = [rule.value for rule in AcceptanceRule]


def stacked(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return one decorator for many options, listed in the help in the order given."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _number(name: str, kind: type, text: str, default: str = "") -> Callable[[F], F]:
    """Return an option that is None unless given: the service has the default, which may be the model's own."""
    shown = default or f"{getattr(_DEFAULTS, name):g}"
    option = f"--{name.replace('_', '-')}"
    return click.option(option, name, type=kind, help=f"{text} [default: {shown}]")


def _bias(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    """Return token id to bias, from repeated ID=VALUE."""
    biases = {}
    for value in values:
        token_id, _, bias = value.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not ID=VALUE, such as 42=-100") from None
    return biases


def _text_file(name: str, text: str) -> Callable[[F], F]:
    """Return an option that names a file, and gives its text."""

    def read(context: click.Context, parameter: click.Parameter, value: Path | None) -> str | None:
        try:
            return None if value is None else value.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise click.BadParameter(f"{value} is not a text file: {error}") from None

    return click.option(f"--{name.replace('_', '-')}", name, callback=read, help=text, **_FILE)


sampling_options = stacked(
    _number("temperature", float, "Divides the logits; 0 is greedy decoding.", _MODELS),
    _number("top_k", int, "Keeps the k most likely tokens; 0 keeps all.", _MODELS),
    _number("top_p", float, "Keeps the smallest set of tokens with at least this probability.", _MODELS),
    _number("min_p", float, "Drops tokens less likely than this share of the most likely one.", _MODELS),
    _number("repetition_penalty", float, "Weakens tokens seen in prompt or output, above 1.", _MODELS),
    _number("presence_penalty", float, "Subtracted from logits of tokens seen in the output."),
    _number("frequency_penalty", float, "The same, once for each time the token was seen."),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        callback=_bias,
        help="Added to the logit of a token id. Repeatable.",
    ),
    click.option("--seed", type=int, help="Key of all randomness; random where not given."),
    click.option("--stop", multiple=True, metavar="TEXT", help="Ends the output before this text. Repeatable."),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        type=int,
        multiple=True,
        metavar="ID",
        help="Ends the output with this token id. Repeatable.",
    ),
    _number("max_tokens", int, "Output tokens, at most."),
    _number("min_tokens", int, "Output tokens before which nothing ends it."),
    click.option("--ignore-eos", is_flag=True, help="Goes on past the model's end-of-text tokens."),
    click.option(
        "--logprobs",
        type=int,
        metavar="N",
        help="Reports log-probabilities, and the N most likely tokens (with --json).",
    ),
    _text_file("json_schema", "The output is JSON that follows the JSON schema in this file."),
    click.option("--json-object", is_flag=True, help="The output is a JSON object."),
    click.option("--regex", metavar="REGEX", help="The whole output matches this regular expression."),
    click.option("--choice", multiple=True, metavar="TEXT", help="The output is one of these texts. Repeatable."),
    _text_file("grammar", "The output follows the grammar in this file, in llguidance's dialect of Lark."),
)
"""Every sampling parameter, named and meant as in vLLM, and what the output must follow."""

drafter_option = click.option(
    "--drafter",
    type=click.Choice((*DRAFTERS, NO_DRAFTER)),
    help="Which drafter to use; a local stack starts this one. [default: any; in a local stack one that fits]",
)

draft_at_option = click.option(
    "--draft-at",
    type=click.Choice(DRAFT_PLACES),
    help="Where the draft runs: in a service of its own, or within the target's process. [default: where it is "
    "measured to be faster; a local stack starts a head at both]",
)

speculation_options = stacked(
    click.option(
        "--num-speculative-tokens",
        "--draft-max",
        "num_speculative_tokens",
        type=int,
        default=0,
        metavar="K",
        help="Tokens of a proposal that a round verifies, at most. [default: the service's]",
    ),
    click.option(
        "--draft-min",
        type=int,
        default=0,
        metavar="N",
        help="Shorter proposals are not verified. [default: 0]",
    ),
    click.option(
        "--draft-p-min",
        type=float,
        metavar="P",
        help="The draft ends a branch before a token less likely than this. [default: the draft's]",
    ),
    click.option(
        "--lookahead",
        type=int,
        metavar="N",
        help="Nodes that the draft may propose while the target verifies, at most; 0: it waits for each verdict. "
        "[default: the service's]",
    ),
    click.option(
        "--max-nodes",
        type=int,
        default=0,
        metavar="N",
        help="Nodes of a proposal tree, at most; K make it a chain. [default: the draft's]",
    ),
    drafter_option,
    draft_at_option,
    click.option(
        "--acceptance-rule",
        type=click.Choice(_RULES),
        help="Which rule verifies proposals; all are exact. Targets on vLLM serve engine only, others the rest. "
        "[default: the service's]",
    ),
    click.option("--no-speculation", is_flag=True, help="Decodes without a draft."),
)
"""How to speculate."""


def _remembered(name: str, text: str, **more: Any) -> Callable[[F], F]:
    """Return an option about connections, which `connection.client_of` reads; commands need not pass it on."""

    def remember(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        context.meta[f"{CONNECTION}.{name}"] = value

    option, variable = f"--{name.replace('_', '-')}", f"OUTRIDER_{name.upper()}"
    return click.option(option, envvar=variable, expose_value=False, callback=remember, help=text, **more)


_secrets = stacked(
    _remembered("token", "Bearer token. Better as the variable OUTRIDER_TOKEN.", metavar="TOKEN"),
    _remembered("tls_authority", "PEM file with authorities to trust; with it the connection is TLS.", **_FILE),
    _remembered("tls_certificate", "PEM file with a certificate to show.", **_FILE),
    _remembered("tls_key", "PEM file with the certificate's key.", **_FILE),
)


def _checked(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Check addresses where they are given, so that the error names the option."""
    try:
        return checked_addresses(values) if values else ()
    except InvalidArgument as error:
        raise click.BadParameter(error.message.removeprefix("addresses: ")) from None


address_option = stacked(
    click.option(
        "--address",
        "addresses",
        multiple=True,
        callback=_checked,
        metavar="HOST:PORT",
        help="An orchestrator; repeat it for replicas. Without it a local stack is started for this command.",
    ),
    _secrets,
)

required_address_option = stacked(
    click.option(
        "--address",
        "addresses",
        multiple=True,
        required=True,
        callback=_checked,
        metavar="HOST:PORT",
        help="An orchestrator. Repeatable.",
    ),
    _secrets,
)
"""Addresses of orchestrators, and the secrets to connect to them."""


def take_sampling(values: dict[str, Any]) -> SamplingParameters:
    """Take the options of `sampling_options` out of `values`; raise `InvalidArgument` for values out of range."""
    return SamplingParameters(**take_given_sampling(values))


def take_given_sampling(values: dict[str, Any]) -> dict[str, Any]:
    """Take the options of `sampling_options` out of `values`; return those that were given.

    Only these become parameters: the service has defaults for the others.

    Raises:
        InvalidArgument: several of them say what the output must follow.
    """
    taken = {name: values.pop(name) for name in _DEFAULTS.as_dict() if name != "constraint"}
    constraint = {name: value for name in _CONSTRAINTS if _is_given(value := values.pop(name))}
    given = {name: value for name, value in taken.items() if _is_given(value)}
    return {**given, "constraint": Constraint(**constraint)} if constraint else given


def _is_given(value: object) -> bool:
    """Return whether an option was given: one that was not is None, a flag False, a repeatable one empty."""
    return value is not None and value is not False and value not in ((), {})


def take_speculation(values: dict[str, Any]) -> Speculation:
    """Take the options of `speculation_options` out of `values`; leave the drafter and its place for `take_stack`."""
    rule, drafter = values.pop("acceptance_rule"), values["drafter"]
    if values.pop("no_speculation"):
        values["drafter"] = drafter = NO_DRAFTER
    return Speculation(
        disabled=drafter == NO_DRAFTER,
        num_speculative_tokens=values.pop("num_speculative_tokens"),
        max_nodes=values.pop("max_nodes"),
        lookahead=values.pop("lookahead"),
        draft_min=values.pop("draft_min"),
        draft_p_min=values.pop("draft_p_min"),
        acceptance_rule=AcceptanceRule(rule) if rule else None,
        drafter="" if drafter in (None, NO_DRAFTER) else drafter,
        draft_at=values["draft_at"] or "",
        # For the line that shows how much of a long prompt was read.
        report=True,
    )


def parse_token_ids(text: str) -> list[int]:
    """Return token ids written with commas or spaces between them; raise `InvalidArgument`."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise InvalidArgument("must be numbers with commas or spaces between them", "token_ids") from error
