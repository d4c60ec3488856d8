"""A request's parameters, complete with its model's defaults."""

import pytest

from orchestrator.workers.model import Model
from outrider.errors import InvalidArgument
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
