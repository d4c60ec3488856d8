"""Sampling parameters: every value is checked, and a wrong one is named."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from outrider.errors import InvalidArgument
from outrider.parameters import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRING_LEN,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParameters,
)

BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 1e-12, 1e-9, 100], [-0.1, 1e-13, 5e-324, 100.1, math.nan, math.inf]),
    "top_k": ([0, 1, 2**31 - 1], [-1, 2**31]),
    "top_p": ([1e-12, 1e-9, 0.5, 1], [0, 5e-324, -0.1, 1.1, math.nan]),
    "min_p": ([0, 0.5, 1], [-0.1, 1.1, math.nan]),
    "repetition_penalty": ([0.01, 0.5, 1, 10], [0, 1e-310, 1e-9, -1, 10.1, math.nan]),
    "presence_penalty": ([-2, 0, 2], [-2.1, 2.1, math.nan]),
    "frequency_penalty": ([-2, 0, 2], [-2.1, 2.1, math.nan]),
    "logit_bias": (
        [{}, {1: -100.0, 2: 100.0}, dict.fromkeys(range(MAX_LOGIT_BIASES), 1.0)],
        [{1: 100.1}, {1: math.nan}, {1: -math.inf}, dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)],
    ),
    "seed": ([None, 0, MAX_SEED], [-1, MAX_SEED + 1, 10**400]),
    "stop": (
        [(), ("a",), ("a" * MAX_STOP_STRING_LEN,), ("a",) * MAX_STOP_STRINGS],
        [("",), ("a" * (MAX_STOP_STRING_LEN + 1),), ("a",) * (MAX_STOP_STRINGS + 1)],
    ),
    "stop_token_ids": ([(), (0,), (1,) * MAX_STOP_TOKEN_IDS], [(1,) * (MAX_STOP_TOKEN_IDS + 1)]),
    "max_tokens": ([1, 2**31 - 1], [0, -1, 2**31]),
    "min_tokens": ([0, 256], [-1, 257]),
    "ignore_eos": ([False, True], []),
    "logprobs": ([None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
    "constraint": ([None], ["a+", {"regex": "a+"}]),
}
"""Values of each parameter that are in range, and that are not."""


def test_every_parameter_has_bounds_here() -> None:
    assert set(BOUNDS) == set(SamplingParameters().as_dict())


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (good, _) in BOUNDS.items() for value in good])
def test_values_in_range_are_taken(name: str, value: Any) -> None:
    assert SamplingParameters(**{name: value}).as_dict()[name] == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (_, bad) in BOUNDS.items() for value in bad])
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}") as refused:
        SamplingParameters(**{name: value})
    assert refused.value.field == name


WRONG_TYPES: dict[str, list[Any]] = {
    "temperature": ["0.5", None],
    "top_p": ["1"],
    "top_k": ["3", 3.5, None],
    "max_tokens": ["20", 20.5],
    "min_tokens": [1.5],
    "seed": ["7", 7.5],
    "logprobs": ["2"],
    "logit_bias": [[1, 2], {"1": 2.0}, {1: "2"}, {1.5: 2.0}],
    "stop": [None, 3, b"END", [3]],
    "stop_token_ids": [None, 3, "12", ["1"], [1.5]],
    "ignore_eos": ["yes", None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, bad in WRONG_TYPES.items() for value in bad])
def test_values_of_another_type_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name} ") as refused:
        SamplingParameters(**{name: value})
    assert refused.value.field == name


def test_one_stop_string_and_lists_are_taken() -> None:
    assert SamplingParameters(stop="END").stop == ("END",)
    assert SamplingParameters(stop=["a", "b"], stop_token_ids=[3]) == SamplingParameters(
        stop=("a", "b"), stop_token_ids=(3,)
    )


def test_defaults_change_nothing() -> None:
    parameters = SamplingParameters()
    assert not parameters.is_greedy
    assert not parameters.needs_history


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
@pytest.mark.parametrize("token_id", [-1, 10])
def test_token_ids_outside_the_vocabulary_are_refused(name: str, token_id: int) -> None:
    values: dict[str, Any] = {"stop_token_ids": (0, token_id), "logit_bias": {0: 1.0, token_id: 1.0}}
    with pytest.raises(InvalidArgument) as refused:
        SamplingParameters(**{name: values[name]}).check_vocabulary(10)
    assert refused.value.field == name


def test_token_ids_inside_the_vocabulary_are_taken() -> None:
    SamplingParameters(stop_token_ids=(0, 9), logit_bias={9: 1.0}).check_vocabulary(10)


def test_stop_tokens_leave_something_to_draw() -> None:
    SamplingParameters(stop_token_ids=(0, 1, 2)).check_vocabulary(3)
    SamplingParameters(stop_token_ids=(0, 1, 1), min_tokens=1).check_vocabulary(3)
    with pytest.raises(InvalidArgument, match="stop_token_ids"):
        SamplingParameters(stop_token_ids=(0, 1, 2), min_tokens=1).check_vocabulary(3)


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParameters(temperature=0).is_greedy
    assert not SamplingParameters(temperature=1e-9).is_greedy


@pytest.mark.parametrize("values", [{"repetition_penalty": 1.1}, {"presence_penalty": -1}, {"frequency_penalty": 1}])
def test_penalties_need_the_history(values: dict[str, Any]) -> None:
    assert SamplingParameters(**values).needs_history


def test_a_seed_is_the_only_thing_it_changes() -> None:
    parameters = SamplingParameters(top_k=3, stop=("x",), logit_bias={1: 2.0})
    seeded = parameters.with_seed(7)
    assert (parameters.seed, seeded.seed) == (None, 7)
    assert seeded.as_dict() == {**parameters.as_dict(), "seed": 7}


def test_plain_values_make_the_same_parameters() -> None:
    parameters = SamplingParameters(temperature=0.5, stop=("a", "b"), logit_bias={3: -1.0}, logprobs=2)
    plain: dict[str, Any] = parameters.as_dict()
    assert SamplingParameters(**plain) == parameters
    assert type(plain["logit_bias"]) is dict


def test_what_was_given_is_known() -> None:
    parameters = SamplingParameters(0.5, top_k=0, seed=None, max_tokens=256)
    assert parameters.given == {"temperature", "top_k", "seed", "max_tokens"}
    assert SamplingParameters().given == frozenset()


def test_what_was_given_stands_beside_the_values() -> None:
    given, default = SamplingParameters(temperature=1.0), SamplingParameters()
    assert given == default and repr(given) == repr(default)
    assert "given" not in given.as_dict() and "given" not in {item.name for item in fields(given)}
    with pytest.raises((FrozenInstanceError, TypeError)):
        given.given = frozenset()  # type: ignore[misc]
    with pytest.raises(TypeError, match="given"):
        SamplingParameters(given=frozenset())  # type: ignore[call-arg]


def test_changed_parameters_give_what_they_did_and_the_changes() -> None:
    parameters = SamplingParameters(top_k=3)
    changed = parameters.replace(max_tokens=4, temperature=1.0)
    assert (changed.top_k, changed.max_tokens) == (3, 4)
    assert changed.given == {"top_k", "max_tokens", "temperature"}
    assert parameters.with_seed(3).given == {"top_k", "seed"}
    with pytest.raises(InvalidArgument, match="top_p"):
        parameters.replace(top_p=2)
    with pytest.raises(TypeError, match="top_b"):
        parameters.replace(top_b=2)


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
def test_copies_were_given_the_same(made: Any) -> None:
    parameters = SamplingParameters(top_k=3, logit_bias={1: 2.0}, stop=("x",))
    again = made(parameters)
    assert (again, again.given) == (parameters, parameters.given)
