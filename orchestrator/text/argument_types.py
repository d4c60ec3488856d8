"""Arguments that a model wrote as text, as the types that the tool's schema gives them."""

import json
import math
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_MAX_CHOICES: Final = 256
"""Schemas and values that are looked at for one argument, of a list of them and in all: there are seven types."""
_TYPES: Final[Mapping[type, str]] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}


def typed_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with the texts among them as the types of a schema's properties, where they can be read so.

    Args:
        arguments: of a call.
        schema: JSON schema of the tool's parameters.
    """
    known = ChainMap(
        *(item["properties"] for item in _schemas(schema, schema) if isinstance(item.get("properties"), dict))
    )
    return {name: _typed(value, _types_of(known.get(name), schema)) for name, value in arguments.items()}


def _typed(value: Any, types: Sequence[str]) -> Any:
    if isinstance(value, str):
        return _read(value, types)
    if isinstance(value, list) and types and "array" not in types:
        # Of a name that occurred several times.
        return [_read(item, types) if isinstance(item, str) else item for item in value]
    return value


def _types_of(schema: Any, root: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types that a schema allows, in its order."""
    types: list[str] = []
    for item in _schemas(schema, root):
        declared = item.get("type")
        if isinstance(declared, str):
            types.append(declared)
        elif isinstance(declared, list):
            types += [name for name in declared if isinstance(name, str)]
        else:
            values = item.get("enum", [item["const"]] if "const" in item else [])
            types += [_TYPES[type(value)] for value in _first(values) if type(value) in _TYPES]
        if item.get("nullable"):
            types.append("null")
    return tuple(dict.fromkeys(types))


def _schemas(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and those that it is made of, each reference followed once.

    Args:
        schema: of a value.
        root: the schema that has what its references name.
    """
    pending: list[Any] = [schema]
    references: set[str] = set()
    for _ in range(_MAX_CHOICES):
        if not pending:
            return
        item = pending.pop()
        if not isinstance(item, Mapping):
            continue
        yield item
        parts = [part for group in ("allOf", "anyOf", "oneOf") for part in _first(item.get(group))]
        reference = item.get("$ref")
        if isinstance(reference, str) and reference not in references:
            references.add(reference)
            parts.append(_referred(reference, root))
        # The last is taken first.
        pending += reversed(parts)


def _first(items: Any) -> list[Any]:
    return items[:_MAX_CHOICES] if isinstance(items, list) else []


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference such as `#/$defs/Point` names; None for one that is not within the root."""
    document, *keys = reference.split("/")
    found: Any = root if document == "#" else None
    for key in keys:
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


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


_READERS: Final[Mapping[str, Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
    "object": _of(dict),
    "array": _of(list),
}
