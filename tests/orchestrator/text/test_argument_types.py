"""Arguments written as text: the types that a tool's schema gives them, wherever within the schema it does."""

import time
from typing import Any

import pytest

from orchestrator.text.argument_types import typed_arguments

DEFINITIONS: dict[str, Any] = {
    "City": {"type": "object", "properties": {"c": {"type": "string"}}},
    "a/b": {"type": "integer"},
    "Alias": {"$ref": "#/$defs/City"},
    "Cycle": {"anyOf": [{"$ref": "#/$defs/Cycle"}, {"$ref": "#/$defs/Back"}, {"type": "integer"}]},
    "Back": {"allOf": [{"$ref": "#/$defs/Cycle"}]},
    "Unit": {"enum": ["m", "km"], "type": "string"},
}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"$ref": "#/$defs/City"}, '{"c": "x"}', {"c": "x"}),
        ({"$ref": "#/$defs/Alias"}, '{"c": "x"}', {"c": "x"}),
        ({"$ref": "#/$defs/a~1b"}, "5", 5),
        ({"$ref": "#/$defs/Unit"}, "5", "5"),
        ({"anyOf": [{"$ref": "#/$defs/City"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/Cycle"}, "5", 5),
        ({"$ref": "#/$defs/None"}, "5", "5"),
        ({"$ref": "#/$defs/City/type/x"}, "5", "5"),
        ({"$ref": "https://example.com/schema"}, "5", "5"),
        ({"allOf": [{"type": "integer"}]}, "5", 5),
        ({"allOf": [{"$ref": "#/$defs/a~1b"}], "description": "of b"}, "5", 5),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["auto", 1.5, None]}, "1.5", 1.5),
        ({"enum": ["auto", 1.5, None]}, "auto", "auto"),
        ({"enum": [True]}, "true", True),
        ({"enum": 1}, "1", "1"),
        ({"const": 3}, "3", 3),
        ({"const": None}, "null", None),
        ({"type": "string", "enum": [1]}, "1", "1"),
    ],
)
def test_types_are_found_wherever_a_schema_has_them(schema: dict[str, Any], text: str, expected: Any) -> None:
    root = {"type": "object", "properties": {"x": schema}, "$defs": DEFINITIONS}
    found = typed_arguments({"x": text}, root)["x"]
    assert (found, type(found)) == (expected, type(expected))


def test_properties_are_found_behind_a_reference() -> None:
    # As pydantic describes a model that has itself within it.
    node = {"type": "object", "properties": {"size": {"type": "integer"}, "next": {"$ref": "#/$defs/Node"}}}
    root = {"type": "object", "$ref": "#/$defs/Node", "$defs": {"Node": node}}
    assert typed_arguments({"size": "1", "next": '{"size": 2}'}, root) == {"size": 1, "next": {"size": 2}}


def test_the_time_does_not_grow_with_what_a_schema_stands_for() -> None:
    definitions = {f"D{n}": {"anyOf": [{"$ref": f"#/$defs/D{n + 1}"}] * 50} for n in range(60)}
    definitions["Wide"] = {"anyOf": [{"type": "integer"}] * 20_000, "enum": [1] * 100_000}
    names = [f"x{n}" for n in range(1000)]
    properties = {name: {"anyOf": [{"$ref": "#/$defs/Wide"}, {"$ref": "#/$defs/D0"}]} for name in names}
    began = time.thread_time()
    typed = typed_arguments(dict.fromkeys(names, "1"), {"properties": properties, "$defs": definitions})
    assert time.thread_time() - began < 5
    assert typed == dict.fromkeys(names, 1)
