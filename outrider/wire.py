"""Conversion between protobuf messages and the dataclasses of `tokens` and `parameters`.

The `..._from_message` functions check what a peer sent: a wrong value raises `InvalidArgument` with the field's name.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, Final

from outrider.constraint import Constraint, StructuralTag, StructuralTags
from outrider.errors import InvalidArgument, OutriderError, from_reason
from outrider.parameters import AcceptanceRule, FinishReason, SamplingParameters
from outrider.tokens import (
    Base,
    FeatureSpan,
    NodeKind,
    ProposalNode,
    ProposalPart,
    SparseDistribution,
    TokenLogprobs,
    TokenOrigin,
    TokenSpan,
)
from outrider.v1 import draft_pb2, tokens_pb2

_RULES: Final = {
    tokens_pb2.ACCEPTANCE_RULE_COUPLED: AcceptanceRule.COUPLED,
    tokens_pb2.ACCEPTANCE_RULE_REJECTION: AcceptanceRule.REJECTION,
    tokens_pb2.ACCEPTANCE_RULE_ENGINE: AcceptanceRule.ENGINE,
}
_KINDS: Final = {
    tokens_pb2.NODE_KIND_DRAFTED: NodeKind.DRAFTED,
    tokens_pb2.NODE_KIND_GUESSED: NodeKind.GUESSED,
}
_ORIGINS: Final = {
    tokens_pb2.TOKEN_ORIGIN_ACCEPTED: TokenOrigin.ACCEPTED,
    tokens_pb2.TOKEN_ORIGIN_RECOVERED: TokenOrigin.RECOVERED,
    tokens_pb2.TOKEN_ORIGIN_BONUS: TokenOrigin.BONUS,
}
_FINISHES: Final = {
    tokens_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    tokens_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    tokens_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}
_RULE_NUMBERS: Final = {rule: number for number, rule in _RULES.items()}
_KIND_NUMBERS: Final = {kind: number for number, kind in _KINDS.items()}
_ORIGIN_NUMBERS: Final = {origin: number for number, origin in _ORIGINS.items()}
_FINISH_NUMBERS: Final = {reason: number for number, reason in _FINISHES.items()}

MAX_NAME_LEN: Final = 512
"""Maximum characters of an id, or bytes of a salt, between services: workers keep thousands of them."""
MAX_DRAFTER_LEN: Final = 64
"""Maximum characters of a node's drafter."""
_SCALARS: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "logprobs",
)
_LISTS: Final = ("stop", "stop_token_ids")


def check_name(value: str | bytes, field: str, least: int = 0) -> None:
    """Raise `InvalidArgument` unless an id, a fingerprint or a salt has `least` to `MAX_NAME_LEN` characters."""
    if not least <= len(value) <= MAX_NAME_LEN:
        raise InvalidArgument(f"has {len(value)} characters, must have {least} to {MAX_NAME_LEN}", field)


def parameters_from_message(message: tokens_pb2.SamplingParameters) -> SamplingParameters:
    """Return the parameters; what is not set, or empty, has its default and is not among `given`."""
    given: dict[str, Any] = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    if message.logit_bias:
        given["logit_bias"] = dict(message.logit_bias)
    given |= {name: tuple(values) for name in _LISTS if (values := getattr(message, name))}
    if message.HasField("constraint"):
        given["constraint"] = constraint_from_message(message.constraint)
    return SamplingParameters(**given)


def parameters_to_message(parameters: SamplingParameters) -> tokens_pb2.SamplingParameters:
    """Return the message with every field set, so that the receiver's defaults do not apply."""
    return _parameters_of(parameters, parameters.as_dict())


def given_to_message(parameters: SamplingParameters) -> tokens_pb2.SamplingParameters:
    """Return the message with the given fields set only, so that the receiver's defaults apply to the others."""
    values = parameters.as_dict()
    return _parameters_of(parameters, {name: values[name] for name in parameters.given})


def _parameters_of(parameters: SamplingParameters, values: dict[str, Any]) -> tokens_pb2.SamplingParameters:
    """Return the message of some of the parameters; None is the value of a field that is not set."""
    plain = {name: value for name, value in values.items() if value is not None and name != "constraint"}
    message = tokens_pb2.SamplingParameters(**plain)
    if "constraint" in values and parameters.constraint is not None:
        message.constraint.CopyFrom(constraint_to_message(parameters.constraint))
    return message


def constraint_from_message(message: tokens_pb2.Constraint) -> Constraint:
    """Return the constraint; raise `InvalidArgument` where it is none."""
    kind = message.WhichOneof("kind")
    given: dict[str, Any] = {"any_whitespace": message.any_whitespace, "reasoning_end": message.reasoning_end}
    match kind:
        case "choice":
            given[kind] = tuple(message.choice.texts)
        case "structural_tags":
            tags = message.structural_tags
            parts = [StructuralTag(tag.begin, tag.json_schema, tag.end, tag.trigger) for tag in tags.tags]
            given[kind] = StructuralTags(parts, tags.at_least_one, tags.stop_after_first)
        case str():
            given[kind] = getattr(message, kind)
    return Constraint(**given)


def constraint_to_message(constraint: Constraint) -> tokens_pb2.Constraint:
    """Return the message."""
    message = tokens_pb2.Constraint(any_whitespace=constraint.any_whitespace, reasoning_end=constraint.reasoning_end)
    if (tags := constraint.structural_tags) is not None:
        parts = [tokens_pb2.StructuralTag(**asdict(tag)) for tag in tags.tags]
        message.structural_tags.CopyFrom(
            tokens_pb2.StructuralTags(
                tags=parts, at_least_one=tags.at_least_one, stop_after_first=tags.stop_after_first
            )
        )
    elif constraint.choice:
        message.choice.texts.extend(constraint.choice)
    else:
        setattr(message, constraint.kind, getattr(constraint, constraint.kind))
    return message


def features_to_message(features: FeatureSpan) -> tokens_pb2.Features:
    """Return the message of features."""
    return tokens_pb2.Features(start=features.start, data=features.data)


def span_from_message(message: tokens_pb2.TokenSpan) -> TokenSpan:
    """Return the span."""
    return TokenSpan(message.start, tuple(message.token_ids))


def span_to_message(span: TokenSpan) -> tokens_pb2.TokenSpan:
    """Return the message."""
    return tokens_pb2.TokenSpan(start=span.start, token_ids=span.token_ids)


def base_from_message(message: tokens_pb2.Base) -> Base:
    """Return the base."""
    return Base(message.len, message.fencing_token)


def base_to_message(base: Base) -> tokens_pb2.Base:
    """Return the message."""
    return tokens_pb2.Base(len=base.len, fencing_token=base.fencing_token)


def node_from_message(message: tokens_pb2.ProposalNode) -> ProposalNode:
    """Return the node; raise `InvalidArgument` for a field with an invalid value."""
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise InvalidArgument(f"kind is {message.kind}", "kind")
    distribution = None
    if message.HasField("draft_distribution"):
        sparse = message.draft_distribution
        try:
            distribution = SparseDistribution(tuple(sparse.token_ids), tuple(sparse.probabilities))
        except ValueError as error:
            raise InvalidArgument(str(error), "draft_distribution") from error
    if len(message.drafter) > MAX_DRAFTER_LEN:
        raise InvalidArgument(f"has {len(message.drafter)} characters, must have {MAX_DRAFTER_LEN} at most", "drafter")
    if not 0 <= message.likelihood <= 1:
        raise InvalidArgument(f"is {message.likelihood}, must be a probability", "likelihood")
    return ProposalNode(message.parent, message.token_id, kind, distribution, message.drafter, message.likelihood)


def node_to_message(node: ProposalNode) -> tokens_pb2.ProposalNode:
    """Return the message."""
    distribution = node.draft_distribution
    sparse = None
    if distribution is not None:
        sparse = tokens_pb2.SparseDistribution(
            token_ids=distribution.token_ids, probabilities=distribution.probabilities
        )
    return tokens_pb2.ProposalNode(
        parent=node.parent,
        token_id=node.token_id,
        kind=_KIND_NUMBERS[node.kind],
        draft_distribution=sparse,
        drafter=node.drafter,
        likelihood=node.likelihood,
    )


def proposal_from_message(message: tokens_pb2.Proposal) -> ProposalPart:
    """Return the part of a proposal; raise `InvalidArgument` for an invalid node or step time."""
    if not 0 <= message.step_time_s < math.inf:
        raise InvalidArgument(f"step_time_s is {message.step_time_s}, must be at least 0 and finite", "step_time_s")
    return ProposalPart(
        base=base_from_message(message.base),
        first_node=message.first_node,
        nodes=tuple(node_from_message(node) for node in message.nodes),
        complete=message.complete,
        known_len=message.known_len or message.base.len,
        step_time_s=message.step_time_s,
    )


def proposal_to_message(part: ProposalPart) -> tokens_pb2.Proposal:
    """Return the message."""
    return tokens_pb2.Proposal(
        base=base_to_message(part.base),
        first_node=part.first_node,
        nodes=[node_to_message(node) for node in part.nodes],
        complete=part.complete,
        known_len=part.known_len,
        step_time_s=part.step_time_s,
    )


def logprobs_from_message(message: tokens_pb2.TokenLogprobs) -> TokenLogprobs:
    """Return the log-probabilities at one position."""
    return TokenLogprobs(message.logprob, message.rank, tuple(message.top_token_ids), tuple(message.top_logprobs))


def logprobs_to_message(logprobs: TokenLogprobs) -> tokens_pb2.TokenLogprobs:
    """Return the message."""
    return tokens_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def rule_from_number(number: tokens_pb2.AcceptanceRule.ValueType) -> AcceptanceRule | None:
    """Return the rule; None if it is unspecified."""
    if number == tokens_pb2.ACCEPTANCE_RULE_UNSPECIFIED:
        return None
    if number not in _RULES:
        raise InvalidArgument(f"acceptance_rule is {number}", "acceptance_rule")
    return _RULES[number]


def rule_to_number(rule: AcceptanceRule) -> tokens_pb2.AcceptanceRule.ValueType:
    """Return the enum value."""
    return _RULE_NUMBERS[rule]


def origin_from_number(number: tokens_pb2.TokenOrigin.ValueType) -> TokenOrigin:
    """Return the origin."""
    if number not in _ORIGINS:
        raise InvalidArgument(f"origin is {number}", "origins")
    return _ORIGINS[number]


def origin_to_number(origin: TokenOrigin) -> tokens_pb2.TokenOrigin.ValueType:
    """Return the enum value."""
    return _ORIGIN_NUMBERS[origin]


def finish_from_number(number: tokens_pb2.FinishReason.ValueType) -> FinishReason | None:
    """Return the reason; None if the request has not ended."""
    return _FINISHES.get(number)


def finish_to_number(reason: FinishReason | None) -> tokens_pb2.FinishReason.ValueType:
    """Return the enum value, unspecified for None."""
    return tokens_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_NUMBERS[reason]


def refusal_from_message(message: draft_pb2.WorkerRefusal) -> OutriderError:
    """Return the error that a worker sent."""
    return from_reason(message.reason, message.message, message.metadata)


def refusal_to_message(error: OutriderError) -> draft_pb2.WorkerRefusal:
    """Return the message."""
    return draft_pb2.WorkerRefusal(reason=error.reason, message=error.message, metadata=error.metadata)
