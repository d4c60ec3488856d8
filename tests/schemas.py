"""Random JSON schemas of bounded size, made by hypothesis."""

import json
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

Schema = dict[str, Any]

_NAMES = st.sampled_from(["id", "name", "tags", "value", "a b", 'q"', "é"])
_VALUES = st.sampled_from(["red", "green", "é", 'q"', "", 1, -7, 2.5, None, True, False, [1, "x"], {"k": 1}])
_FORMATS = st.sampled_from(["date", "time", "date-time", "uuid", "email", "ipv4"])
_PATTERNS = st.sampled_from(["^[A-Z]{2}[0-9]{1,4}$", "^(ab|c)*$", "^\\d+-\\w?$", "^[^x]{0,9}$"])


def _bounds(least: int, most: int, names: tuple[str, str]) -> st.SearchStrategy[Schema]:
    """Return both bounds, the second not below the first."""
    pairs = st.tuples(st.integers(least, most), st.integers(least, most)).map(sorted)
    return pairs.map(lambda pair: dict(zip(names, pair, strict=True)))


def _object(properties: dict[str, Schema], flags: list[bool], *, is_open: bool) -> Schema:
    required = [name for name, is_required in zip(properties, flags, strict=False) if is_required]
    more: Any = {"type": "integer"} if is_open else False
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}


_STRINGS = st.one_of(
    _bounds(0, 12, ("minLength", "maxLength")),
    _FORMATS.map(lambda name: {"format": name}),
    _PATTERNS.map(lambda text: {"pattern": text}),
).map(lambda more: {"type": "string", **more})
_NUMBERS = st.builds(
    lambda kind, bounds: {"type": kind, **bounds},
    st.sampled_from(["integer", "number"]),
    _bounds(-300, 5000, ("minimum", "maximum")),
)
_LEAVES = st.one_of(
    _STRINGS,
    _NUMBERS,
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}]),
    st.lists(_VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    _VALUES.map(lambda value: {"const": value}),
)


def _larger(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    objects = st.builds(
        _object,
        st.dictionaries(_NAMES, inner, min_size=1, max_size=4),
        st.lists(st.booleans(), min_size=4, max_size=4),
        is_open=st.booleans(),
    )
    arrays = st.builds(
        lambda items, bounds: {"type": "array", "items": items, **bounds},
        inner,
        _bounds(0, 4, ("minItems", "maxItems")),
    )
    unions = st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})
    shared = inner.map(
        lambda part: {"$defs": {"x": part}, "type": "array", "items": {"$ref": "#/$defs/x"}, "maxItems": 2}
    )
    return st.one_of(objects, objects, arrays, unions, shared)


SCHEMAS = st.recursive(_LEAVES, _larger, max_leaves=8)


def _has_inner_definitions(schema: Any) -> bool:
    """Whether `$defs` stand elsewhere than at the top, where references do not find them."""
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    return any((isinstance(part, dict) and "$defs" in part) or _has_inner_definitions(part) for part in parts)


def random_schemas(num: int) -> list[Schema]:
    """Return different schemas, always the same ones."""
    found: dict[str, Schema] = {}

    @settings(
        max_examples=6 * num,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @seed(1)
    @given(SCHEMAS)
    def collect(schema: Schema) -> None:
        if len(found) < num and not _has_inner_definitions(schema):
            found[json.dumps(schema, sort_keys=True)] = schema

    collect()
    if len(found) < num:
        raise AssertionError(f"only {len(found)} schemas")
    return list(found.values())
