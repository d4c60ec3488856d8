"""How the text of a region becomes a value: the content parsers and transforms of transformers' response templates."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import regex

from orchestrator.text.call_list import parse_call_list

SEARCH_TIMEOUT_S: Final = 1.0
"""Bound on the searches of an output with a checkpoint's expressions, and on each reading of a region with them.

The checkpoint is trusted, the text that it meets is not. Far more than any search takes, even on a busy machine: one
that is given up need not be given up in every replay.
"""
_OPEN, _CLOSE = "\x01", "\x02"
_PLACEHOLDER: Final = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
_BARE_KEY: Final = regex.compile(r'"(?:\\.|[^"\\])*"|(?<=[{,])(\s*)(\w+)(\s*):')


def parse_content(name: str, text: str, arguments: Mapping[str, Any]) -> Any:
    """Return the value of a region's text.

    Raises:
        ValueError: the text has no such value, or it took too long to find.
    """
    try:
        return CONTENTS[name](text, arguments)
    except (RecursionError, TimeoutError) as error:
        raise ValueError(f"the text is too deep or takes too long: {error}") from error


def apply_transform(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Return a transform with its placeholders replaced; raise `ValueError` where one has no value."""
    match transform:
        case dict():
            return {key: apply_transform(item, scope) for key, item in transform.items()}
        case list():
            return [apply_transform(item, scope) for item in transform]
        case str() if (found := _PLACEHOLDER.fullmatch(transform)) is not None:
            value: Any = scope
            for key in found[1].split("."):
                if not isinstance(value, Mapping) or key not in value:
                    raise ValueError(f"{transform} has no value")
                value = value[key]
            return value
    return transform


def check_transform(where: str, transform: Any) -> None:
    """Raise `ValueError` for a text that has a placeholder and something else."""
    match transform:
        case dict():
            for item in transform.values():
                check_transform(where, item)
        case list():
            for item in transform:
                check_transform(where, item)
        case str() if _PLACEHOLDER.search(transform) and not _PLACEHOLDER.fullmatch(transform):
            raise ValueError(f"{where}: the transform {transform!r} has a placeholder within a text")


def check_arguments(where: str, name: str, arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` for arguments with which a content cannot be read, whatever its text."""
    pattern, parser = arguments.get("tag_pattern"), arguments.get("value_parser")
    if name == "xml-inline":
        try:
            groups = regex.compile(pattern).groupindex
        except (regex.error, TypeError) as error:
            raise ValueError(f"{where}: tag_pattern is no regular expression: {error}") from error
        if "key" not in groups:
            raise ValueError(f"{where}: tag_pattern has no group `key`")
    for separator in (arguments.get("line_sep", "\n"), arguments.get("kv_sep", ":")):
        if not isinstance(separator, str) or not separator:
            raise ValueError(f"{where}: line_sep and kv_sep are texts, and not empty")
    for pair in arguments.get("string_delims", []):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(item, str) and item for item in pair):
            raise ValueError(f"{where}: string_delims is a list of pairs of texts")
    if parser is None:
        return
    if not isinstance(parser, dict) or parser.get("name", "text") not in CONTENTS:
        raise ValueError(f"{where}: value_parser has no known name")
    inner = parser.get("args", {})
    if not isinstance(inner, dict):
        raise ValueError(f"{where}: value_parser has args that are no object")
    check_arguments(where, parser.get("name", "text"), inner)


def _stripped(text: str, arguments: Mapping[str, Any]) -> str:
    return text.strip() if arguments.get("strip", True) else text


def _is_true(text: str, arguments: Mapping[str, Any]) -> bool:
    return _stripped(text, arguments).lower() in ("true", "1")


def _json(text: str, arguments: Mapping[str, Any]) -> Any:
    """Return the value of JSON, or of a dialect with delimiters of its own for texts, and keys without quotes."""
    delimiters = arguments.get("string_delims", [])
    if delimiters and (_OPEN in text or _CLOSE in text):
        raise ValueError("the text has control characters")
    texts: list[str] = []

    def taken(found: "regex.Match[str]") -> str:
        texts.append(found[1])
        return f"{_OPEN}{len(texts) - 1}{_CLOSE}"

    plain = text
    for opening, closing in delimiters:
        between = f"{regex.escape(opening)}(.*?){regex.escape(closing)}"
        plain = regex.sub(between, taken, plain, flags=regex.DOTALL, timeout=SEARCH_TIMEOUT_S)
    if arguments.get("unquoted_keys", False):
        plain = _BARE_KEY.sub(_quoted_key, plain, timeout=SEARCH_TIMEOUT_S)
    plain = regex.sub(f"{_OPEN}(\\d+){_CLOSE}", lambda found: json.dumps(texts[int(found[1])]), plain)
    try:
        return json.loads(plain)
    except ValueError:
        if arguments.get("allow_non_json"):
            return _stripped(text, arguments)
        raise


def _quoted_key(found: "regex.Match[str]") -> str:
    return str(found[0]) if found[2] is None else f'{found[1]}"{found[2]}"{found[3]}:'


def _xml_inline(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tags of a text as keys and values."""
    values: dict[str, Any] = {}
    merged: set[str] = set()
    for found in regex.finditer(arguments["tag_pattern"], text, flags=regex.DOTALL, timeout=SEARCH_TIMEOUT_S):
        groups = found.groupdict()
        if (key := groups.get("key")) is None:
            raise ValueError("a tag has no key")
        value = _inner(groups.get("value") or "", arguments)
        if key in values and arguments.get("merge_duplicates", False):
            if key not in merged:
                merged.add(key)
                values[key] = [values[key]]
            values[key].append(value)
        else:
            values[key] = value
    return values


def _tagged_values(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a text, each behind a beginning that has its key, without a line break beside.

    A value ends at its end, at the next beginning, or at the region's end. It takes no longer than the text is long.

    Raises:
        ValueError: the region has no end, so that the last value may lack its rest.
    """
    tags = regex.compile(f"{arguments['begin']}|{regex.escape(arguments['end'])}")
    values: dict[str, Any] = {}
    key, start = None, 0
    for found in tags.finditer(text):
        if key is not None:
            values[key] = _without_breaks(text[start : found.start()])
        key, start = found[1], found.end()
    if not arguments["is_closed"]:
        # Within a value, or within the tag that would begin or end one.
        rest = tags.search(text, start, partial=True)
        if key is not None or (rest is not None and rest[0]):
            raise ValueError("the text ends within a value")
    if key is not None:
        values[key] = _without_breaks(text[start:])
    return values


def _without_breaks(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def _key_value_lines(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lines of a text as keys and values."""
    separator, values = arguments.get("kv_sep", ":"), {}
    for line in text.split(arguments.get("line_sep", "\n")):
        key, found, value = _stripped(line, arguments).partition(separator)
        if found:
            values[_stripped(key, arguments)] = _inner(_stripped(value, arguments), arguments)
    return values


def _inner(text: str, arguments: Mapping[str, Any]) -> Any:
    parser = arguments.get("value_parser")
    return text if parser is None else CONTENTS[parser.get("name", "text")](text, parser.get("args", {}))


CONTENTS: Final[Mapping[str, Callable[[str, Mapping[str, Any]], Any]]] = {
    "text": _stripped,
    "int": lambda text, arguments: int(_stripped(text, arguments)),
    "float": lambda text, arguments: float(_stripped(text, arguments)),
    "bool": _is_true,
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _key_value_lines,
    "python-call-list": lambda text, arguments: parse_call_list(text),
    # Of our own: values between tags, as several models write arguments.
    "tagged-values": _tagged_values,
    # Of our own: one call or several, in a list or not; see `json_calls`, which reads them as they come.
    "json-calls": _json,
}
"""Name in a template -> what returns the value of a text, or raises `ValueError`."""
