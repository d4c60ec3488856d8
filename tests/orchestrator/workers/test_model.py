"""A request's parameters, complete with its model's defaults."""

from dataclasses import replace

import pytest

from orchestrator.workers.model import Model
from outrider.errors import InvalidArgument, RuleUnsupported
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.v1 import tokens_pb2

PARAMETERS = tokens_pb2.SamplingParameters


def model(**defaults: float) -> Model:
    return Model(
        name="m",
        fingerprint="f",
        tokenizer_fingerprint="t",
        tokenizer=None,
        vocabulary_size=100,
        max_session_len=4096,
        eos_token_ids=(2,),
        defaults=PARAMETERS(**defaults),
    )


def test_what_is_given_wins_over_the_models_default_and_that_over_ours() -> None:
    found = model(temperature=0.5, top_p=0.75).parameters(PARAMETERS(top_p=1, stop=["x"][:0]), 7)
    assert (found.temperature, found.top_p, found.top_k, found.max_tokens, found.seed) == (0.5, 1.0, 0, 256, 7)


def test_a_neutral_value_that_is_given_is_no_absent_one() -> None:
    found = model(temperature=0.5, top_k=20).parameters(PARAMETERS(temperature=1, top_k=0), 7)
    assert (found.temperature, found.top_k) == (1.0, 0)


@pytest.mark.parametrize(("defaults", "given", "expected"), [({}, 0, 4096), ({"max_tokens": 99}, 0, 99), ({}, 5, 5)])
def test_zero_tokens_are_as_many_as_there_is_room_for(defaults: dict[str, int], given: int, expected: int) -> None:
    assert model(**defaults).parameters(PARAMETERS(max_tokens=given), 7).max_tokens == expected


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (PARAMETERS(max_tokens=5000), "max_tokens"),
        (PARAMETERS(stop_token_ids=[100]), "stop_token_ids"),
        (PARAMETERS(stop=["x"]), "stop"),
        (PARAMETERS(min_tokens=300), "min_tokens"),
    ],
)
def test_what_the_model_cannot_follow_is_refused_by_name(given: tokens_pb2.SamplingParameters, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        model().parameters(given, 7)
    assert caught.value.field == field


COUPLED, REJECTION, ENGINE = AcceptanceRule.COUPLED, AcceptanceRule.REJECTION, AcceptanceRule.ENGINE
KEYED, EMBEDDED = {COUPLED, REJECTION}, {ENGINE}


@pytest.mark.parametrize(
    ("served", "default", "named", "temperature", "expected"),
    [
        (KEYED, COUPLED, None, 1.0, COUPLED),
        (KEYED, REJECTION, None, 1.0, REJECTION),
        (KEYED, REJECTION, COUPLED, 1.0, COUPLED),
        (EMBEDDED, COUPLED, None, 1.0, ENGINE),
        (EMBEDDED, REJECTION, None, 1.0, ENGINE),
        (EMBEDDED, COUPLED, ENGINE, 1.0, ENGINE),
        (EMBEDDED, COUPLED, COUPLED, 0.0, ENGINE),
        (EMBEDDED, COUPLED, REJECTION, 0.0, ENGINE),
    ],
)
def test_the_rule_is_one_that_the_targets_serve(
    served: set[AcceptanceRule],
    default: AcceptanceRule,
    named: AcceptanceRule | None,
    temperature: float,
    expected: AcceptanceRule,
) -> None:
    found = replace(model(), rules=frozenset(served), default_rule=default)
    assert found.rule(named, SamplingParameters(temperature=temperature)) is expected


@pytest.mark.parametrize(
    ("served", "named", "temperature", "reason"),
    [
        (EMBEDDED, COUPLED, 0.5, "serve engine, not coupled: they draw tokens with noise of their own"),
        (EMBEDDED, REJECTION, 1.0, "serve engine, not rejection: they draw tokens with noise of their own"),
        (KEYED, ENGINE, 1.0, "serve coupled, rejection, not engine$"),
        (KEYED, ENGINE, 0.0, "serve coupled, rejection, not engine$"),
    ],
)
def test_a_named_rule_that_no_target_serves_is_refused_with_the_reason(
    served: set[AcceptanceRule], named: AcceptanceRule, temperature: float, reason: str
) -> None:
    with pytest.raises(RuleUnsupported, match=reason):
        replace(model(), rules=frozenset(served)).rule(named, SamplingParameters(temperature=temperature))
