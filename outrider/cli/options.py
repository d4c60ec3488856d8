"""Command-line options that several commands share, and the objects made of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from outrider.client.request import Speculation
from outrider.errors import InvalidArgument
from outrider.local.stack_options import DRAFTERS, MODEL_DRAFTERS, DraftOptions, StackOptions, fitting_drafter
from outrider.parameters import AcceptanceRule, SamplingParameters

F = TypeVar("F", bound=Callable[..., Any])

CONNECTION: Final = "outrider.connection"
"""Where a command's context keeps the options about connections."""

_DEFAULTS = SamplingParameters()
_NO_DRAFTER = "none"
_RULES = [rule.value for rule in AcceptanceRule]


def _stacked(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return one decorator for many options, listed in the help in the order given."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _number(name: str, kind: type, text: str) -> Callable[[F], F]:
    default = getattr(_DEFAULTS, name)
    return click.option(f"--{name.replace('_', '-')}", name, type=kind, default=default, show_default=True, help=text)


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


sampling_options = _stacked(
    _number("temperature", float, "Divides the logits; 0 is greedy decoding."),
    _number("top_k", int, "Keeps the k most likely tokens; 0 keeps all."),
    _number("top_p", float, "Keeps the smallest set of tokens with at least this probability."),
    _number("min_p", float, "Drops tokens less likely than this share of the most likely one."),
    _number("repetition_penalty", float, "Weakens tokens seen in prompt or output, above 1."),
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
)
"""Every sampling parameter, named and meant as in vLLM."""

drafter_option = click.option(
    "--drafter",
    type=click.Choice((*DRAFTERS, _NO_DRAFTER)),
    help="Which drafter to use; a local stack starts this one. [default: any; in a local stack one that fits]",
)

speculation_options = _stacked(
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
    click.option(
        "--acceptance-rule",
        type=click.Choice(_RULES),
        help="Which rule verifies proposals; both are exact. [default: the service's, coupled]",
    ),
    click.option("--no-speculation", is_flag=True, help="Decodes without a draft."),
)
"""How to speculate."""

stack_options = _stacked(
    click.option(
        "--model", default=StackOptions().model, show_default=True, help="Target model: a folder or a hub id."
    ),
    click.option(
        "--draft-model",
        default="",
        help="Draft: a model that shares the target's tokenizer, or what `outrider distill` made.",
    ),
    click.option("--num-layers", type=int, help="Layers of the target's model that `--drafter layers` uses."),
    click.option("--dtype", default="", help="bfloat16, float16, float32. [default: the checkpoint's]"),
    click.option("--device", default="", help="cpu, cuda, cuda:1, ... [default: a GPU where there is one]"),
    click.option("--redis-url", default="", help="Redis for the sessions. [default: an embedded one]"),
)
"""Models and devices of a local stack."""


def _remembered(name: str, text: str, **more: Any) -> Callable[[F], F]:
    """Return an option about connections, which `connection.client_of` reads; commands need not pass it on."""

    def remember(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        context.meta[f"{CONNECTION}.{name}"] = value

    option, variable = f"--{name.replace('_', '-')}", f"OUTRIDER_{name.upper()}"
    return click.option(option, envvar=variable, expose_value=False, callback=remember, help=text, **more)


_FILE = {"type": click.Path(exists=True, dir_okay=False, path_type=Path), "metavar": "FILE"}

_secrets = _stacked(
    _remembered("token", "Bearer token. Better as the variable OUTRIDER_TOKEN.", metavar="TOKEN"),
    _remembered("tls_authority", "PEM file with authorities to trust; with it the connection is TLS.", **_FILE),
    _remembered("tls_certificate", "PEM file with a certificate to show.", **_FILE),
    _remembered("tls_key", "PEM file with the certificate's key.", **_FILE),
)

address_option = _stacked(
    click.option(
        "--address",
        "addresses",
        multiple=True,
        metavar="HOST:PORT",
        help="An orchestrator; repeat it for replicas. Without it a local stack is started for this command.",
    ),
    _secrets,
)

required_address_option = _stacked(
    click.option(
        "--address", "addresses", multiple=True, required=True, metavar="HOST:PORT", help="An orchestrator. Repeatable."
    ),
    _secrets,
)
"""Addresses of orchestrators, and the secrets to connect to them."""


def take_sampling(values: dict[str, Any]) -> SamplingParameters:
    """Take the options of `sampling_options` out of `values`; raise `InvalidArgument` for values out of range."""
    return SamplingParameters(**{name: values.pop(name) for name in _DEFAULTS.as_dict()})


def take_speculation(values: dict[str, Any]) -> Speculation:
    """Take the options of `speculation_options` out of `values`; leave the drafter there for `take_stack`."""
    rule, drafter = values.pop("acceptance_rule"), values["drafter"]
    if values.pop("no_speculation"):
        values["drafter"] = drafter = _NO_DRAFTER
    return Speculation(
        disabled=drafter == _NO_DRAFTER,
        num_speculative_tokens=values.pop("num_speculative_tokens"),
        max_nodes=values.pop("max_nodes"),
        lookahead=values.pop("lookahead"),
        draft_min=values.pop("draft_min"),
        draft_p_min=values.pop("draft_p_min"),
        acceptance_rule=AcceptanceRule(rule) if rule else None,
        drafter="" if drafter in (None, _NO_DRAFTER) else drafter,
    )


def take_stack(values: dict[str, Any]) -> StackOptions:
    """Take the options of `stack_options`, and the drafter, out of `values`; raise `InvalidArgument`."""
    drafter, draft_model, num_layers = (values.pop(name) for name in ("drafter", "draft_model", "num_layers"))
    drafter = drafter or fitting_drafter(values["model"], draft_model, num_layers)
    if draft_model and drafter not in MODEL_DRAFTERS:
        raise InvalidArgument(f"draft_model goes with --drafter model, eagle3 or medusa, not {drafter}", "draft_model")
    if num_layers is not None and drafter != "layers":
        raise InvalidArgument(f"num_layers goes with --drafter layers, not {drafter}", "num_layers")
    layers = {} if num_layers is None else {"num_layers": num_layers}
    drafts = () if drafter == _NO_DRAFTER else (DraftOptions(drafter, draft_model, **layers),)
    return StackOptions(drafts=drafts, **{name: values.pop(name) for name in ("model", "dtype", "device", "redis_url")})


def parse_token_ids(text: str) -> list[int]:
    """Return token ids written with commas or spaces between them; raise `InvalidArgument`."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise InvalidArgument("must be numbers with commas or spaces between them", "token_ids") from error
