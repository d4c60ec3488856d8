"""Command-line options of a local stack, the environment variables that stand for them, and the stack made of both."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import click
from click.core import ParameterSource

from outrider.cli.options import NO_DRAFTER, F, stacked
from outrider.drafter_names import HEADS, LOOKUPS, main_of
from outrider.errors import InvalidArgument
from outrider.local.stack_options import (
    EMBEDDED,
    MODEL_DRAFTERS,
    DraftOptions,
    StackOptions,
    fitting_drafter,
)
from outrider.parameters import AT_SERVICE, AT_TARGET

_UNITS: Final = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS_OF_TEN: Final = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_TORCHAO: Final = re.compile(r"[A-Za-z]\w*Config")

_UNUSED: Final = {
    "TARGETS": "the stack starts its own targets",
    "DRAFTS": "the stack starts its own drafts",
    "DRAFTER": "give --drafter",
    "NUM_THREADS": "`outrider up` has --target-threads and --draft-threads",
    "READY_FILE": "the stack prints when it is ready",
    "HEALTH_ADDRESS": "the processes of a stack cannot share one",
    "METRICS_ADDRESS": "`outrider up --metrics` exposes those of each process",
    "DRAIN_BUDGET_S": "each process has ten seconds",
}
"""Settings of services that a stack makes itself, and what to do instead."""


def parse_size(text: str) -> int:
    """Return a number of bytes from text such as 8GiB, 512MiB or 1073741824; raise `BadParameter`."""
    found = _SIZE.fullmatch(str(text).strip().lower())
    unit = (_UNITS | _UNITS_OF_TEN).get(found[2]) if found else None
    if found is None or unit is None:
        raise click.BadParameter(f"{text!r} is not a size such as 8GiB or 512MiB")
    return int(float(found[1]) * unit)


def variable_option(*names: str, variable: str, **more: Any) -> Callable[[F], F]:
    """Return an option that has an environment variable as its default; it is wrong to give both differently."""

    def check(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        name = parameter.name or ""
        text = os.environ.get(variable, "")
        if text and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            other = parameter.type_cast_value(context, parameter.value_from_envvar(context))
            if other != value:
                raise click.UsageError(f"{names[0]} contradicts {variable}={text}: give one of both")
        return value

    return click.option(*names, envvar=variable, callback=check, **more)


def _quantization(text: str) -> str:
    """Return a quantisation config as JSON, from JSON or from the name of a config of torchao."""
    if not text:
        return ""
    if _TORCHAO.fullmatch(text):
        return json.dumps({"quant_method": "torchao", "quant_type": text})
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        problem = f"is {text!r}, must be a config of torchao, such as Int8WeightOnlyConfig, or a JSON object"
        raise InvalidArgument(problem, "quantization")
    return text


stack_options = stacked(
    variable_option(
        "--model",
        variable="OUTRIDER_MODEL",
        default=EMBEDDED,
        show_default=True,
        help="Target model: a folder or a hub id.",
    ),
    click.option(
        "--draft-model",
        default="",
        help="Draft: a model that shares the target's tokenizer, or what `outrider distill` made.",
    ),
    variable_option(
        "--num-layers",
        variable="OUTRIDER_NUM_LAYERS",
        type=click.IntRange(1),
        help="Layers of the target's model that `--drafter layers` uses.",
    ),
    variable_option(
        "--dtype",
        variable="OUTRIDER_DTYPE",
        default="",
        help="bfloat16, float16, float32. [default: the checkpoint's]",
    ),
    variable_option(
        "--quantization",
        variable="OUTRIDER_QUANTIZATION",
        default="",
        metavar="CONFIG",
        help="Quantise the target while it loads: a config of torchao, such as Int8WeightOnlyConfig, or the JSON of a "
        "transformers config. [default: the checkpoint's]",
    ),
    variable_option(
        "--device",
        variable="OUTRIDER_DEVICE",
        default="",
        help="cpu, cuda, cuda:1, ... [default: a GPU where there is one]",
    ),
    click.option("--draft-device", default="", help="The same for drafts. [default: the target's]"),
    click.option(
        "--tensor-parallel",
        type=click.IntRange(1, 64),
        default=1,
        show_default=True,
        metavar="N",
        help="GPUs that run a target together, each with a part of every weight.",
    ),
    variable_option(
        "--kv-budget",
        "kv_budget_bytes",
        variable="OUTRIDER_KV_BUDGET_BYTES",
        type=parse_size,
        default=0,
        metavar="SIZE",
        help="KV cache of a target, at most, such as 8GiB. [default: 4GiB]",
    ),
    variable_option(
        "--max-len",
        "max_session_len",
        variable="OUTRIDER_MAX_SESSION_LEN",
        type=click.IntRange(2),
        metavar="TOKENS",
        help="Longest session; the model may allow less. [default: 32768]",
    ),
    variable_option(
        "--redis-url",
        variable="OUTRIDER_REDIS_URL",
        default="",
        help="Redis for the sessions. [default: an embedded one]",
    ),
    variable_option(
        "--kv-blocks-url",
        variable="OUTRIDER_KV_BLOCKS_URL",
        default="",
        help="Redis for blocks of the KV cache. [default: an embedded one for several targets, else none]",
    ),
    variable_option(
        "--generation-config",
        variable="OUTRIDER_GENERATION_CONFIG",
        type=click.Choice(("auto", "none")),
        help="Whether sampling parameters have the model's own defaults. [default: auto]",
    ),
    click.option(
        "--ready-timeout",
        "ready_timeout_s",
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        help="Bound on the start of each process. [default: none while it makes progress]",
    ),
)
"""Models, devices and limits of a local stack."""

_PASSED: Final = (
    "model",
    "dtype",
    "quantization",
    "device",
    "draft_device",
    "tensor_parallel",
    "kv_budget_bytes",
    "max_session_len",
    "redis_url",
    "kv_blocks_url",
    "generation_config",
    "ready_timeout_s",
)
_OF_A_STACK: Final = frozenset((*_PASSED, "draft_model", "num_layers"))


def take_stack(values: dict[str, Any]) -> StackOptions:
    """Take the options of `stack_options`, the drafter and its place out of `values`; with addresses, none counts.

    Raises:
        InvalidArgument: a value is wrong.
        UsageError: options of a stack were given together with the address of one that runs.
    """
    context = click.get_current_context()
    if context.params.get("addresses"):
        _check_own_stack(context)
        for name in (*_OF_A_STACK, "drafter", "draft_at"):
            values.pop(name, None)
        return StackOptions()
    drafter, draft_model, num_layers = (values.pop(name) for name in ("drafter", "draft_model", "num_layers"))
    drafter = drafter or fitting_drafter(values["model"], draft_model, num_layers)
    if draft_model and main_of(drafter) not in MODEL_DRAFTERS:
        raise InvalidArgument(
            f"draft_model goes with --drafter model, eagle3, block or medusa, not {drafter}", "draft_model"
        )
    if num_layers is not None and main_of(drafter) != "layers":
        raise InvalidArgument(f"num_layers goes with --drafter layers, not {drafter}", "num_layers")
    if values["draft_device"] and drafter in (*LOOKUPS, NO_DRAFTER):
        raise InvalidArgument(f"draft_device goes with a drafter that has a model, not {drafter}", "draft_device")
    layers = {} if num_layers is None else {"num_layers": num_layers}
    draft_at = values.pop("draft_at", None)
    if draft_at == AT_TARGET and (drafter == NO_DRAFTER or values["draft_device"]):
        raise InvalidArgument("a draft within the target has no device of its own, and is a draft", "draft_at")
    draft = None if drafter == NO_DRAFTER else DraftOptions(drafter, draft_model, **layers, at=draft_at or AT_SERVICE)
    drafts: tuple[DraftOptions, ...] = () if draft is None else (draft,)
    if draft is not None and draft_at is None and main_of(drafter) in HEADS and not values["draft_device"]:
        # On one device the target is a good place too: which one is better is measured.
        drafts = (draft, replace(draft, at=AT_TARGET))
    passed = {name: value for name in _PASSED if (value := values.pop(name)) is not None}
    return StackOptions(drafts=drafts, **passed | {"quantization": _quantization(passed["quantization"])})


def unused_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable that is set and has no effect on a local stack."""
    for name, instead in _UNUSED.items():
        if environment.get(f"OUTRIDER_{name}"):
            yield f"OUTRIDER_{name} is not used: {instead}"


def _check_own_stack(context: click.Context) -> None:
    """Raise `UsageError` for an option of a stack, which beside an orchestrator's address would not be used."""
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if given and parameter.name in _OF_A_STACK:
            raise click.UsageError(f"{parameter.opts[0]} is of a stack that this command starts: not with --address")
