"""Messages and dataclasses: every value survives the wire, and wrong ones are named."""

import math

import pytest

from outrider import wire
from outrider.constraint import Constraint, StructuralTag, StructuralTags
from outrider.errors import ERRORS, InvalidArgument, KVCacheMiss, OutriderError, Overloaded, TokenizerMismatch
from outrider.parameters import AcceptanceRule, FinishReason, SamplingParameters
from outrider.tokens import Base, NodeKind, ProposalNode, SparseDistribution, TokenLogprobs, TokenOrigin, TokenSpan
from outrider.v1 import tokens_pb2

FULL = SamplingParameters(
    temperature=0.5,
    top_k=7,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.2,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias={3: -100.0, 9: 1.5},
    seed=2**64 - 1,
    stop=("a", "\n"),
    stop_token_ids=(4, 5),
    max_tokens=9,
    min_tokens=2,
    ignore_eos=True,
    logprobs=0,
)


TAG = StructuralTag('<call>{"name": "add", "arguments": ', '{"type": "object"}', "}</call>", "<call>")
CONSTRAINTS = (
    Constraint(json_schema='{"type": "integer"}', any_whitespace=True),
    Constraint(json_schema=""),
    Constraint(json_object=True, reasoning_end="</think>"),
    Constraint(regex="a+b"),
    Constraint(choice=("yes", "no")),
    Constraint(grammar="start: /a+/"),
    Constraint(structural_tags=StructuralTags((TAG, StructuralTag("<x>")), at_least_one=True, stop_after_first=True)),
)


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda item: item.kind)
def test_constraints_survive(constraint: Constraint) -> None:
    parameters = SamplingParameters(seed=1, constraint=constraint)
    for message in (wire.parameters_to_message(parameters), wire.given_to_message(parameters)):
        found = tokens_pb2.SamplingParameters.FromString(message.SerializeToString())
        assert wire.parameters_from_message(found) == parameters


@pytest.mark.parametrize("parameters", [SamplingParameters(), FULL])
def test_parameters_survive(parameters: SamplingParameters) -> None:
    data = wire.parameters_to_message(parameters).SerializeToString()
    assert wire.parameters_from_message(tokens_pb2.SamplingParameters.FromString(data)) == parameters


def test_a_message_has_every_parameter_or_only_the_given_ones() -> None:
    every = {item.name for item in tokens_pb2.SamplingParameters.DESCRIPTOR.fields}
    scalars = every - {"seed", "logprobs", "logit_bias", "stop", "stop_token_ids", "constraint"}
    assert {item.name for item, _ in wire.parameters_to_message(SamplingParameters()).ListFields()} == scalars
    given = SamplingParameters(temperature=1.0, top_k=0, seed=None, ignore_eos=False, stop=("x",))
    message = wire.given_to_message(given)
    assert {item.name for item, _ in message.ListFields()} == {"temperature", "top_k", "ignore_eos", "stop"}
    assert wire.parameters_from_message(message).given == given.given - {"seed"}
    assert wire.given_to_message(SamplingParameters()) == tokens_pb2.SamplingParameters()
    assert wire.given_to_message(FULL) == wire.parameters_to_message(FULL)


def test_absent_parameters_are_the_defaults() -> None:
    assert wire.parameters_from_message(tokens_pb2.SamplingParameters()) == SamplingParameters()


def test_wrong_parameters_are_named() -> None:
    with pytest.raises(InvalidArgument) as caught:
        wire.parameters_from_message(tokens_pb2.SamplingParameters(temperature=math.nan))
    assert caught.value.field == "temperature"


def test_tokens_survive() -> None:
    span, base = TokenSpan(3, (1, 2)), Base(5, 2**53)
    assert wire.span_from_message(wire.span_to_message(span)) == span
    assert wire.base_from_message(wire.base_to_message(base)) == base
    logprobs = TokenLogprobs(-0.5, 2, (1, 2), (-0.25, -0.5))
    assert wire.logprobs_from_message(wire.logprobs_to_message(logprobs)) == logprobs


@pytest.mark.parametrize("distribution", [None, SparseDistribution((1, 2), (0.25, 0.75))])
@pytest.mark.parametrize("kind", NodeKind)
def test_nodes_survive(kind: NodeKind, distribution: SparseDistribution | None) -> None:
    node = ProposalNode(3, 7, kind, distribution, "model+suffix", 0.25)
    assert wire.node_from_message(wire.node_to_message(node)) == node


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (tokens_pb2.ProposalNode(token_id=1), "kind"),
        (
            tokens_pb2.ProposalNode(
                kind=tokens_pb2.NODE_KIND_DRAFTED,
                draft_distribution=tokens_pb2.SparseDistribution(token_ids=[1], probabilities=[math.nan]),
            ),
            "draft_distribution",
        ),
        (
            tokens_pb2.ProposalNode(
                kind=tokens_pb2.NODE_KIND_DRAFTED,
                draft_distribution=tokens_pb2.SparseDistribution(token_ids=[1, 2], probabilities=[0.5, 0.4]),
            ),
            "draft_distribution",
        ),
        (tokens_pb2.ProposalNode(kind=tokens_pb2.NODE_KIND_GUESSED, drafter="a" * 65), "drafter"),
        (tokens_pb2.ProposalNode(kind=tokens_pb2.NODE_KIND_GUESSED, likelihood=-0.1), "likelihood"),
        (tokens_pb2.ProposalNode(kind=tokens_pb2.NODE_KIND_GUESSED, likelihood=1.1), "likelihood"),
        (tokens_pb2.ProposalNode(kind=tokens_pb2.NODE_KIND_GUESSED, likelihood=math.nan), "likelihood"),
    ],
)
def test_garbage_nodes_are_named(message: tokens_pb2.ProposalNode, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        wire.node_from_message(message)
    assert caught.value.field == field


def test_enums_survive() -> None:
    assert [wire.rule_from_number(wire.rule_to_number(rule)) for rule in AcceptanceRule] == list(AcceptanceRule)
    assert [wire.origin_from_number(wire.origin_to_number(origin)) for origin in TokenOrigin] == list(TokenOrigin)
    assert [wire.finish_from_number(wire.finish_to_number(reason)) for reason in FinishReason] == list(FinishReason)
    assert wire.finish_from_number(wire.finish_to_number(None)) is None
    assert wire.rule_from_number(tokens_pb2.ACCEPTANCE_RULE_UNSPECIFIED) is None


@pytest.mark.parametrize("reason", ERRORS)
def test_refusals_survive(reason: str) -> None:
    special: dict[str, OutriderError] = {
        "INVALID_ARGUMENT": InvalidArgument("wrong", "top_p"),
        "KV_CACHE_MISS": KVCacheMiss("gone", 17),
        "OVERLOADED": Overloaded("full", 2.5),
        "TOKENIZER_MISMATCH": TokenizerMismatch("other", "a", "b"),
    }
    error = special.get(reason) or ERRORS[reason]("a message")
    again = wire.refusal_from_message(wire.refusal_to_message(error))
    assert type(again) is type(error)
    assert (again.message, again.metadata) == (error.message, error.metadata)
