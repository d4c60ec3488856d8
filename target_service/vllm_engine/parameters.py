"""Sampling parameters of requests, as vLLM names them, and those that it cannot follow."""

import hashlib
import json
from typing import Any, Final

from outrider.constraint import Constraint, StructuralTags
from outrider.errors import InvalidArgument
from outrider.parameters import AcceptanceRule
from target_service.engine.commands import Open
from target_service.vllm_engine.requests import VllmRequest

_MAX_TEMPERATURE: Final = 2.0


def check_parameters(command: Open, *, speculates: bool) -> None:
    """Raise `InvalidArgument` if vLLM cannot follow the parameters of a request.

    Args:
        command: opens the request.
        speculates: whether vLLM verifies proposals, of any request; its sampler then has no `min_p` or `logit_bias`,
            for requests without proposals neither.
    """
    parameters = command.parameters
    if command.rule is not AcceptanceRule.ENGINE and not parameters.is_greedy:
        problem = f"is {command.rule.value}; vLLM draws with noise of its own, which serves engine only"
        raise InvalidArgument(problem, "acceptance_rule")
    if parameters.temperature > _MAX_TEMPERATURE:
        raise InvalidArgument(
            f"temperature is {parameters.temperature}, targets on vLLM take at most {_MAX_TEMPERATURE:g}", "temperature"
        )
    if parameters.constraint is not None and parameters.constraint.reasoning_end:
        problem = (
            "reasoning_end is not supported by targets on vLLM: vLLM finds the end of reasoning by a parser of its own"
        )
        raise InvalidArgument(problem, "constraint")
    if speculates and parameters.min_p > 0:
        raise InvalidArgument("min_p is not supported by vLLM while it verifies proposals", "min_p")
    if speculates and parameters.logit_bias:
        raise InvalidArgument("logit_bias is not supported by vLLM while it verifies proposals", "logit_bias")


def needs_output(request: VllmRequest) -> bool:
    """Return whether penalties or a constraint depend on which of its tokens are output, and it has output already."""
    parameters = request.parameters
    counts_output = parameters.presence_penalty != 0 or parameters.frequency_penalty != 0
    return (counts_output or parameters.constraint is not None) and request.num_output > 0


def structured_outputs(constraint: Constraint) -> dict[str, Any]:
    """Return the arguments of vLLM's `StructuredOutputsParams` for a constraint."""
    options: dict[str, Any] = {"disable_any_whitespace": not constraint.any_whitespace}
    match constraint.kind:
        case "json_schema":
            return {"json": constraint.json_schema, **options}
        case "json_object":
            return {"json_object": True, **options}
        case "choice":
            return {"choice": list(constraint.choice)}
        case "structural_tags":
            assert constraint.structural_tags is not None
            return {
                "structural_tag": json.dumps({"type": "structural_tag", "format": _tags(constraint.structural_tags)})
            }
    return {constraint.kind: getattr(constraint, constraint.kind)}


def _tags(tags: StructuralTags) -> dict[str, Any]:
    """Return tags in the format that vLLM takes from xgrammar."""
    found = [
        {
            "begin": tag.begin,
            "content": {"type": "json_schema", "json_schema": json.loads(tag.json_schema or '{"type": "object"}')},
            "end": tag.end,
        }
        for tag in tags.tags
    ]
    return {
        "type": "triggered_tags",
        "triggers": sorted({tag.trigger or tag.begin for tag in tags.tags}),
        "tags": found,
        "at_least_one": tags.at_least_one,
        "stop_after_first": tags.stop_after_first,
    }


def sampling_arguments(request: VllmRequest, num_given: int, max_len: int) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams` for a request that enters vLLM now.

    Args:
        request: the request, with its whole text.
        num_given: tokens of its output that vLLM gets as output; those before them are a part of the prompt.
        max_len: longest session, in tokens.
    """
    parameters = request.parameters
    num_hidden = request.num_output - num_given
    room = min(parameters.max_tokens, max_len - request.prompt_len) - num_hidden
    arguments: dict[str, Any] = {
        "temperature": parameters.temperature,
        "top_k": parameters.top_k,
        "top_p": parameters.top_p,
        "min_p": parameters.min_p,
        "repetition_penalty": parameters.repetition_penalty,
        "presence_penalty": parameters.presence_penalty,
        "frequency_penalty": parameters.frequency_penalty,
        "max_tokens": room,
        "min_tokens": min(max(0, parameters.min_tokens - num_hidden), room),
        "logprobs": parameters.logprobs,
        # The caller's list has the end-of-text tokens, unless they are to be ignored.
        "stop_token_ids": sorted(request.stop_token_ids),
        "ignore_eos": True,
        "seed": None if parameters.is_greedy else _seed(parameters.seed or 0, len(request.resident.token_ids)),
    }
    if parameters.logit_bias:
        arguments["logit_bias"] = dict(parameters.logit_bias)
    if parameters.constraint is not None:
        arguments["structured_outputs"] = structured_outputs(parameters.constraint)
    return arguments


def _seed(seed: int, length: int) -> int:
    """Return the seed of vLLM's generator for a request that enters vLLM with a text of `length` tokens.

    A generator starts anew whenever a request enters. With one seed throughout, the tokens behind a resumption would
    be drawn with the noise that the text before it was drawn with.
    """
    digest = hashlib.sha256(f"{seed} {length}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
