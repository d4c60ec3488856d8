"""A checkpoint's response template: which parts of an output are content, reasoning and calls of tools.

It is the `response_template` of a tokenizer of transformers, version 1. Its regions lie between anchors: literal texts,
or regular expressions of the library `regex`. What is here reads and checks it; `response_parser` follows it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import regex

from orchestrator.text.region_contents import CONTENTS, check_arguments, check_transform

_REGION_KEYS: Final = frozenset(
    {"open", "open_pattern", "close", "close_pattern", "content", "content_args"}
    | {"repeats", "join", "optional", "transform", "transform_each"}
)
_KEYS: Final = frozenset({"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"})
_REASONING: Final = frozenset({"thinking", "reasoning", "reasoning_content"})
_MAX_CHARS: Final = 65536
"""Of all texts of a template; those of known models have some 1,000."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """Where a region begins or ends.

    Attributes:
        pattern: matches it.
        literals: its texts, where it is literal; None for a regular expression.
        is_linear: whether a search takes no longer than the text is long, whatever the text is.
    """

    pattern: "regex.Pattern[str]"
    literals: tuple[str, ...] | None
    is_linear: bool


@dataclass(frozen=True, slots=True)
class Region:
    """A part of an output, between two anchors.

    Attributes:
        name: of the key of transformers' message that it fills.
        opens: where it begins; None for the text outside of all other regions.
        closes: where it ends; None where only the output's end does.
        content: how its text is read, a name of `region_contents.CONTENTS`.
        arguments: of that reading.
        join: what stands between the texts of several such regions.
        transform: what the value is put into; None for the value itself.
        transforms_each: whether the value is a list, each item of which is put into it.
    """

    name: str
    opens: Anchor | None
    closes: Anchor | None
    content: str = "text"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    join: str = ""
    transform: Any = None
    transforms_each: bool = False

    @property
    def is_content(self) -> bool:
        """Whether it is text for the user."""
        return self.name == "content"

    @property
    def is_reasoning(self) -> bool:
        """Whether it is the model's reasoning."""
        return self.name in _REASONING

    @property
    def is_calls(self) -> bool:
        """Whether it is calls of tools."""
        return self.name == "tool_calls"

    @property
    def call_keys(self) -> tuple[str, str]:
        """The placeholders that make a call's name and arguments; empty where there are none."""
        transform = self.transform if isinstance(self.transform, dict) else {}
        function = transform.get("function", transform)
        pair = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else ("", "")
        name, arguments = (item if isinstance(item, str) else "" for item in pair)
        return name, arguments


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """The regions of an output.

    Attributes:
        regions: those that have a beginning, in order.
        implicit: what lies outside of them; None where that text belongs to nothing.
        start: what precedes the assistant's message within the prompt.
        texts: all texts of the template: anchors, patterns, delimiters.
    """

    regions: tuple[Region, ...]
    implicit: Region | None
    start: Anchor
    texts: tuple[str, ...]

    @property
    def calls(self) -> Region | None:
        """The region of calls; None without one."""
        return next((region for region in self._all if region.is_calls), None)

    @property
    def reasoning(self) -> Region | None:
        """The region of the reasoning; None without one."""
        return next((region for region in self._all if region.is_reasoning), None)

    @property
    def marks_content(self) -> bool:
        """Whether text is content only behind a beginning of its own."""
        is_implicit = self.implicit is not None and self.implicit.is_content
        return not is_implicit and any(region.is_content for region in self.regions)

    @property
    def _all(self) -> tuple[Region, ...]:
        return (*self.regions, *(() if self.implicit is None else (self.implicit,)))

    def has_anchor(self, text: str) -> bool:
        """Return whether a text occurs in what begins or ends a region."""
        anchors = [anchor for region in self._all for anchor in (region.opens, region.closes) if anchor is not None]
        escaped = regex.escape(text, special_only=True)
        return any(
            any(text in literal for literal in anchor.literals)
            if anchor.literals is not None
            else text in anchor.pattern.pattern or escaped in anchor.pattern.pattern
            for anchor in anchors
        )

    def mentions(self, text: str) -> bool:
        """Return whether a text occurs in the template, as it is or escaped within a pattern."""
        escaped = regex.escape(text, special_only=True)
        return any(text in known or escaped in known for known in self.texts)


def load_response_template(value: Any, *, is_own: bool = False) -> ResponseTemplate:
    """Return the template that a checkpoint gives as JSON.

    Args:
        value: the JSON.
        is_own: whether it is one of this project's, whose expressions take no longer than the text is long.

    Raises:
        ValueError: it is none of version 1.
    """
    if not isinstance(value, dict):
        raise ValueError(f"a response template is an object, not {type(value).__name__}")
    if (version := value.get("version", 1)) != 1:
        raise ValueError(f"the response template has version {version}, known is 1")
    if unknown := sorted(value.keys() - _KEYS):
        raise ValueError(f"the response template has unknown keys: {', '.join(unknown)}")
    fields = value.get("fields")
    if not isinstance(fields, dict) or not fields:
        raise ValueError("the response template has no fields")
    texts = tuple(_texts(value))
    if sum(map(len, texts)) > _MAX_CHARS:
        raise ValueError(f"the response template has more than {_MAX_CHARS} characters")
    regions = [_region(name, item, is_own=is_own) for name, item in fields.items()]
    implicit = [region for region in regions if region.opens is None]
    if len(implicit) > 1:
        raise ValueError(f"fields {implicit[0].name} and {implicit[1].name} have no open: one may lack it")
    start = _anchor("the response template", value, "start_anchor", "start_anchor_pattern", is_own=is_own)
    if start is None:
        raise ValueError("the response template has no start_anchor")
    explicit = tuple(region for region in regions if region.opens is not None)
    return ResponseTemplate(explicit, implicit[0] if implicit else None, start, texts)


def _region(name: str, item: Any, *, is_own: bool) -> Region:
    where = f"field {name}"
    if not isinstance(item, dict):
        raise ValueError(f"{where} is no object")
    if unknown := sorted(item.keys() - _REGION_KEYS):
        raise ValueError(f"{where} has unknown keys: {', '.join(unknown)}")
    content, arguments, join = item.get("content", "text"), item.get("content_args", {}), item.get("join")
    if content not in CONTENTS:
        raise ValueError(f"{where} has content {content!r}, known are {', '.join(CONTENTS)}")
    if not isinstance(arguments, dict):
        raise ValueError(f"{where} has content_args that are no object")
    if not isinstance(join, str | None) or (join is not None and not item.get("repeats")):
        raise ValueError(f"{where}: join is a text, and needs repeats")
    check_arguments(where, content, arguments)
    transform, each = item.get("transform"), item.get("transform_each", False)
    if not isinstance(each, bool) or (each and transform is None):
        raise ValueError(f"{where}: transform_each is true or false, and needs a transform")
    check_transform(where, transform)
    opens, closes = (_anchor(where, item, key, f"{key}_pattern", is_own=is_own) for key in ("open", "close"))
    named = [name for anchor in (opens, closes) if anchor for name in anchor.pattern.groupindex]
    if named and transform is None and content != "json-calls":
        raise ValueError(f"{where} has the named group {named[0]}, and no transform that uses it")
    return Region(name, opens, closes, content, dict(arguments), join or "", transform, each)


def _anchor(where: str, item: Mapping[str, Any], literal: str, pattern: str, *, is_own: bool) -> Anchor | None:
    """Return the anchor that is under one of two keys; None without."""
    if literal in item and pattern in item:
        raise ValueError(f"{where} has both {literal} and {pattern}")
    if literal in item:
        texts: Sequence[Any] = [item[literal]] if isinstance(item[literal], str) else item[literal]
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"{where}: {literal} is a text or a list of texts, none of them empty")
        # The longest first, since the first that matches is taken.
        ordered = sorted(dict.fromkeys(texts), key=len, reverse=True)
        return Anchor(regex.compile("|".join(map(regex.escape, ordered)), regex.DOTALL), tuple(ordered), is_linear=True)
    if pattern not in item:
        return None
    try:
        return Anchor(regex.compile(item[pattern], regex.DOTALL), None, is_linear=is_own)
    except (regex.error, TypeError) as error:
        raise ValueError(f"{where}: {pattern} is no regular expression: {error}") from error


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _texts(item)
        case dict():
            for item in value.values():
                yield from _texts(item)
