"""Arguments that a model wrote as text, as the types that the tool's schema gives them."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def typed_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with the texts among them as the types of a schema's properties, where they can be read so.

    Args:
        arguments: of a call.
        schema: JSON schema of the tool's parameters.
    """
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return {name: _typed(value, _types_of(known.get(name))) for name, value in arguments.items()}


def _typed(value: Any, types: Sequence[str]) -> Any:
    if isinstance(value, str):
        return _read(value, types)
    if isinstance(value, list) and types and "array" not in types:
        # Of a name that occurred several times.
        return [_read(item, types) if isinstance(item, str) else item for item in value]
    return value


def _types_of(schema: Any) -> tuple[str, ...]:
    """Return the types that a schema allows, in its order."""
    if not isinstance(schema, Mapping):
        return ()
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else []
    if isinstance(declared, list):
        types += [item for item in declared if isinstance(item, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            types += _types_of(choice)
    if schema.get("nullable") and "null" not in types:
        types.append("null")
    return tuple(types)


def _read(text: str, types: Sequence[str]) -> Any:
    """Return the value of a text as the first type that it can be read as; else the text."""
    for name in types:
        try:
            return _READERS[name](text)
        except (KeyError, ValueError, RecursionError, OverflowError):
            continue
    return text


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _number(text: str) -> int | float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("no number of JSON")
    return int(number) if number.is_integer() and "." not in text else number


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]


def _null(text: str) -> None:
    if text.strip() not in ("null", "None"):
        raise ValueError("not null")


def _of(kind: type) -> Any:
    def read(text: str) -> Any:
        value = json.loads(text)
        if not isinstance(value, kind):
            raise ValueError("another type")
        return value

    return read


_READERS: Mapping[str, Any] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
    "object": _of(dict),
    "array": _of(list),
}
