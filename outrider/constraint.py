"""Constraints on the text of a request's output: a JSON schema, a regular expression, choices, a grammar, tagged calls.

What a constraint allows is decided by the library llguidance, in `outrider.grammar`; here are its values, which every
process passes on, and the bounds of their size.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from outrider.errors import InvalidArgument

FIELD: Final = "constraint"
MAX_CONSTRAINT_BYTES: Final = 256 * 1024
"""Largest constraint, all its texts together, in bytes of UTF-8."""
MAX_CHOICES: Final = 4096
MAX_TAGS: Final = 256
_KINDS: Final = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tags")


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """A part of the output that follows a schema, between two texts: a call of a tool.

    Attributes:
        begin: what the part begins with, such as `<tool_call>{"name": "add", "arguments": `.
        json_schema: what stands in it, as JSON text; empty for any JSON object.
        end: what follows it, such as `}</tool_call>`.
        trigger: the beginning of `begin` from which on the output must be this tag, or another of the same trigger;
            empty for `begin` as a whole.
    """

    begin: str
    json_schema: str = ""
    end: str = ""
    trigger: str = ""

    def __post_init__(self) -> None:
        _check_texts(self, ("begin", "json_schema", "end", "trigger"))
        if not self.begin:
            raise InvalidArgument("structural_tags has a tag without begin", FIELD)
        if not self.begin.startswith(self.trigger):
            raise InvalidArgument(f"structural_tags has a tag whose begin lacks its trigger {self.trigger!r}", FIELD)


@dataclass(frozen=True, slots=True)
class StructuralTags:
    """Tags within text that is otherwise free.

    Attributes:
        tags: at least one, at most 256.
        at_least_one: whether the output begins with a tag; else text may precede the first, and there may be none.
        stop_after_first: whether the output ends with the first tag.
    """

    tags: Sequence[StructuralTag]
    at_least_one: bool = False
    stop_after_first: bool = False

    def __post_init__(self) -> None:
        tags: object = self.tags
        if not isinstance(tags, Sequence) or not all(isinstance(tag, StructuralTag) for tag in tags):
            raise InvalidArgument("structural_tags must have a list of StructuralTag", FIELD)
        object.__setattr__(self, "tags", tuple(self.tags))
        _check_flags(self, ("at_least_one", "stop_after_first"))
        if not 1 <= len(self.tags) <= MAX_TAGS:
            raise InvalidArgument(f"structural_tags has {len(self.tags)} tags, must have 1 to {MAX_TAGS}", FIELD)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on the text of one request's output. Exactly one of the first six fields is given.

    The values are checked for their types and size here, and for what they mean by `outrider.grammar.compile_grammar`.

    Attributes:
        json_schema: the output is JSON that follows this schema: its text, or what `json.loads` would return of it.
            The order of an object's keys is that of the schema's `properties`.
        json_object: the output is a JSON object.
        regex: the whole output matches this expression, in the syntax of Rust's crate regex.
        choice: the output is one of these texts; at most 4096.
        grammar: the output follows this grammar, in llguidance's dialect of Lark.
        structural_tags: the output is free text with tagged parts that follow schemas.
        any_whitespace: whether JSON may have white space between its tokens; else it is compact.
        reasoning_end: where the output begins with the model's reasoning, the text that ends it, such as `</think>`;
            the constraint holds from there on.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    structural_tags: StructuralTags | None = None
    any_whitespace: bool = False
    reasoning_end: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        _check_flags(self, ("json_object", "any_whitespace"))
        object.__setattr__(self, "choice", _texts_of("choice", self.choice))
        given = [name for name in _KINDS if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            problem = f"has {' and '.join(given) or 'nothing'}, must have one of {', '.join(_KINDS)}"
            raise InvalidArgument(problem, FIELD)
        _check_texts(self, [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None])
        _check_texts(self, ("reasoning_end",))
        if len(self.choice) > MAX_CHOICES:
            raise InvalidArgument(f"choice has {len(self.choice)} texts, may have {MAX_CHOICES}", FIELD)
        if self.structural_tags is not None and not isinstance(self.structural_tags, StructuralTags):
            raise InvalidArgument("structural_tags must be StructuralTags", FIELD)
        if (num_bytes := self.num_bytes) > MAX_CONSTRAINT_BYTES:
            raise InvalidArgument(f"has {num_bytes} bytes, may have {MAX_CONSTRAINT_BYTES}", FIELD)

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False, ()))

    @property
    def num_bytes(self) -> int:
        """Size of all texts, in bytes of UTF-8."""
        tags = self.structural_tags.tags if self.structural_tags is not None else ()
        texts = [self.json_schema, self.regex, self.grammar, self.reasoning_end, *self.choice]
        texts += [text for tag in tags for text in (tag.begin, tag.json_schema, tag.end, tag.trigger)]
        return len("".join(text for text in texts if text).encode())

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that are given by name, as built-in types; `from_dict` is its inverse."""
        defaults = {item.name: item.default for item in fields(self)}
        given = {name: value for name, value in _values(self).items() if value != defaults[name]}
        if self.choice:
            given["choice"] = list(self.choice)
        if (tags := self.structural_tags) is not None:
            given["structural_tags"] = _values(tags) | {"tags": [_values(tag) for tag in tags.tags]}
        return given

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the constraint of `as_dict`.

        Raises:
            InvalidArgument: a value is wrong.
            TypeError: a name or a type is.
        """
        given = dict(values)
        if (tags := given.get("structural_tags")) is not None:
            parts = [StructuralTag(**tag) for tag in tags["tags"]]
            given["structural_tags"] = StructuralTags(**{**tags, "tags": parts})
        return cls(**given)


def _schema_text(value: object) -> object:
    """Return a schema as JSON text, where it is given as `json.loads` returns it."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | bool) else value


def _texts_of(name: str, value: object) -> tuple[str, ...]:
    """Return texts; raise `InvalidArgument` unless all are, and none is empty."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidArgument(f"{name} is {value!r}, must be a list of texts", FIELD)
    if not all(isinstance(text, str) and text for text in value):
        raise InvalidArgument(f"{name} has an entry that is empty, or no text", FIELD)
    _check_text(name, "".join(value))
    return tuple(value)


def _values(owner: "Constraint | StructuralTag | StructuralTags") -> dict[str, Any]:
    """Return the values by field name; unlike `asdict`, without copying thousands of texts one by one."""
    return {item.name: getattr(owner, item.name) for item in fields(owner)}


def _check_texts(owner: object, names: Sequence[str]) -> None:
    for name in names:
        _check_text(name, getattr(owner, name))


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is {value!r}, must be a text", FIELD)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name} has a surrogate, which is no character", FIELD) from None


def _check_flags(owner: object, names: Sequence[str]) -> None:
    for name in names:
        if not isinstance(value := getattr(owner, name), bool):
            raise InvalidArgument(f"{name} is {value!r}, must be True or False", FIELD)
