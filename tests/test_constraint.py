"""Constraints: their kinds, sizes and types are checked, and they survive as built-in types."""

import json
from typing import Any

import pytest

from outrider.constraint import MAX_CHOICES, MAX_CONSTRAINT_BYTES, MAX_TAGS, Constraint, StructuralTag, StructuralTags
from outrider.errors import InvalidArgument
from outrider.parameters import SamplingParameters


@pytest.mark.parametrize(
    "given",
    [
        {"json_schema": '{"type": "object"}'},
        {"json_object": True, "any_whitespace": True},
        {"regex": "a+", "reasoning_end": "</think>"},
        {"choice": ["yes", "no"]},
        {"grammar": "start: /a/"},
        {"structural_tags": StructuralTags([StructuralTag("<a>", "{}", "</a>", "<")], stop_after_first=True)},
    ],
)
def test_constraints_survive_as_json(given: dict[str, Any]) -> None:
    constraint = Constraint(**given)
    assert constraint.kind == next(iter(given))
    assert Constraint.from_dict(json.loads(json.dumps(constraint.as_dict()))) == constraint
    assert hash(constraint) == hash(Constraint(**given))


def test_a_schema_may_be_given_as_json_loads_returns_it() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {"const": "\u00e9"}}}
    assert json.loads(Constraint(json_schema=schema).json_schema or "") == schema  # type: ignore[arg-type]
    assert Constraint(json_schema=True).json_schema == "true"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "has nothing"),
        ({"any_whitespace": True}, "has nothing"),
        ({"regex": "a", "json_object": True}, "has json_object and regex"),
        ({"regex": 3}, "regex is 3"),
        ({"choice": "yes"}, "choice is 'yes'"),
        ({"choice": ["yes", ""]}, "empty"),
        ({"choice": ["yes", 3]}, "no text"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"may have {MAX_CHOICES}"),
        ({"structural_tags": [1]}, "must be StructuralTags"),
        ({"grammar": "a" * (MAX_CONSTRAINT_BYTES + 1)}, f"may have {MAX_CONSTRAINT_BYTES}"),
        ({"json_object": "false"}, "must be True or False"),
        ({"regex": "a", "any_whitespace": "x"}, "must be True or False"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"choice": ["a", "\ud800"]}, "surrogate"),
        ({"choice": ["\u00e9" * 70_000, "\u00e9" * 70_000]}, "has 280000 bytes"),
    ],
)
def test_wrong_constraints_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem) as refused:
        Constraint(**given)
    assert refused.value.field == "constraint"


@pytest.mark.parametrize("num", [0, MAX_TAGS + 1])
def test_the_number_of_tags_is_bounded(num: int) -> None:
    with pytest.raises(InvalidArgument, match=f"has {num} tags"):
        StructuralTags([StructuralTag("<a>")] * num)


@pytest.mark.parametrize("wrong", ["ab", [1], 3])
def test_tags_must_be_tags(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="must have a list of StructuralTag"):
        StructuralTags(wrong)
    with pytest.raises(InvalidArgument, match="must be True or False"):
        StructuralTags([StructuralTag("<a>")], at_least_one="q")  # type: ignore[arg-type]


@pytest.mark.parametrize("tag", [{"begin": ""}, {"begin": "<a>", "trigger": "b"}, {"begin": 1}])
def test_wrong_tags_are_refused(tag: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        StructuralTag(**tag)


def test_a_constraint_ends_the_output_itself() -> None:
    with pytest.raises(InvalidArgument, match="does not go with a constraint"):
        SamplingParameters(constraint=Constraint(regex="a"), ignore_eos=True)
