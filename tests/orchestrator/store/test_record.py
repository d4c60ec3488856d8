"""Parameters in the record of a session: they survive, and what is damaged is found out."""

import json
from typing import Any

import pytest

from orchestrator.store.record import parameters_from_json, parameters_to_json
from outrider.constraint import Constraint, StructuralTag, StructuralTags
from outrider.parameters import SamplingParameters

TAGS = StructuralTags([StructuralTag("<a>", "{}", "</a>")], at_least_one=True)


@pytest.mark.parametrize(
    "constraint",
    [
        None,
        Constraint(json_schema="{}", any_whitespace=True),
        Constraint(choice=["a"]),
        Constraint(structural_tags=TAGS),
    ],
)
def test_parameters_survive(constraint: Constraint | None) -> None:
    parameters = SamplingParameters(seed=3, logit_bias={5: 1.0}, stop=("x",), constraint=constraint)
    assert parameters_from_json(parameters_to_json(parameters)) == parameters


def test_without_a_constraint_a_record_is_that_of_the_release_before() -> None:
    """Orchestrators of both run beside each other during an update; the older one does not know the name."""
    assert "constraint" not in json.loads(parameters_to_json(SamplingParameters(seed=1)))


@pytest.mark.parametrize(
    "damaged",
    [
        3,
        "x",
        [],
        {},
        {"regex": 3},
        {"regex": "a", "other": 1},
        {"json_object": "yes"},
        {"regex": "a", "any_whitespace": "x"},
        {"structural_tags": {"tags": [{"begin": "<a>"}], "at_least_one": "q"}},
        {"structural_tags": {"tags": [3]}},
        {"structural_tags": {}},
        {"structural_tags": 3},
        {"choice": "yes"},
    ],
)
def test_a_damaged_constraint_is_found_out(damaged: Any) -> None:
    values = json.loads(parameters_to_json(SamplingParameters(seed=1)))
    with pytest.raises(ValueError, match=r"no sampling parameters|dictionary update"):
        parameters_from_json(json.dumps({**values, "constraint": damaged}))
