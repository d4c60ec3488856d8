"""What the output must follow: `response_format`, vLLM's `structured_outputs` and `guided_*`, as one constraint."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

from pydantic import Field

from orchestrator.http.body import Body
from orchestrator.http.errors import HttpError
from outrider.constraint import FIELD, MAX_TAGS, Constraint, StructuralTag, StructuralTags
from outrider.errors import InvalidArgument

Texts = Annotated[list[str], Field(fail_fast=True)]


class JsonSchemaBody(Body):
    """A JSON schema with its name; it is followed whether or not it is `strict`."""

    ignored: ClassVar[frozenset[str]] = frozenset({"name", "description", "strict"})

    schema_: dict[str, Any] | bool = Field(alias="schema")


class TagBody(Body):
    """A tagged part of vLLM's structural tags."""

    begin: str
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    end: str


Tags = Annotated[list[TagBody], Field(fail_fast=True)]


class TagContent(Body):
    """What stands in a tag of vLLM's newer structural tags."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any]


class TriggeredTag(Body):
    """A tagged part of vLLM's newer structural tags."""

    ignored: ClassVar[frozenset[str]] = frozenset({"type"})

    begin: str
    content: TagContent
    end: str

    @property
    def tag(self) -> TagBody:
        """The tag in the older form."""
        return TagBody(begin=self.begin, schema=self.content.json_schema, end=self.end)


class TriggeredTags(Body):
    """The format of vLLM's newer structural tags: text in which triggers begin tags. Its others are not supported."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"excludes": ([],)}

    type: Literal["triggered_tags"]
    triggers: Texts
    tags: Annotated[list[TriggeredTag], Field(fail_fast=True)]
    at_least_one: bool = False
    stop_after_first: bool = False


class Tagged(Body):
    """vLLM's structural tags: `format`, or in the older form `structures` and `triggers`."""

    structures: Tags | None = None
    triggers: Texts | None = None
    format: TriggeredTags | None = None


class ResponseFormat(Tagged):
    """`response_format`: text, a JSON object, JSON of a schema, or vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaBody | None = None


class TagsText(Tagged):
    """vLLM's structural tags within a text."""

    ignored: ClassVar[frozenset[str]] = frozenset({"type"})


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of the first six."""

    ignored: ClassVar[frozenset[str]] = frozenset({"disable_fallback", "_backend"})
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "whitespace_pattern": (),
        "disable_additional_properties": (False,),
    }

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = Field(default=None, description="In llguidance's dialect of Lark.")
    structural_tag: str | None = Field(
        default=None, description="JSON text of an object with `format`, or with `structures` and `triggers`."
    )
    disable_any_whitespace: bool | None = Field(
        default=None, description="False lets JSON have white space between its tokens; it is compact by default."
    )


class Structured(Body):
    """The fields that say what the output must follow."""

    ignored: ClassVar[frozenset[str]] = frozenset({"guided_decoding_backend"})
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"guided_whitespace_pattern": ()}

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None


class Structure(NamedTuple):
    """What the output must follow, and the field that says so, for errors."""

    constraint: Constraint
    field: str


_GUIDED: Final = {
    "guided_json": "json_schema",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older fields -> those of a constraint."""
_TAGGED: Final = tuple(Tagged.model_fields)
_OUTPUTS: Final = {"json_": "json_schema", **{name: name for name in ("json_object", "regex", "choice", "grammar")}}


def structure_of(body: Structured) -> Structure | None:
    """Return what the output must follow; None where it is free.

    Raises:
        HttpError: a field is wrong, or several say different things.
    """
    given = [item for item in (_of_format(body), _of_outputs(body), *_of_guided(body)) if item is not None]
    if len(given) > 1:
        problem = f"{given[1].field} does not go with {given[0].field}: give one of them"
        raise refusal(problem, given[1].field)
    return given[0] if given else None


def made(field: str, **values: Any) -> Structure:
    """Return a structure of a constraint's fields; raise `HttpError` that names the field of the request."""
    try:
        return Structure(Constraint(**values), field)
    except InvalidArgument as error:
        raise refusal(f"{field}: {error.message.removeprefix(FIELD).lstrip(': ')}", field) from None


def refusal(message: str, parameter: str) -> HttpError:
    """Return the error of a field that is wrong."""
    return HttpError(400, "BadRequestError", message, parameter, "invalid_argument")


def _of_format(body: Structured) -> Structure | None:
    form, field = body.response_format, "response_format"
    if form is None:
        return None
    belongs = {"json_schema": ("json_schema",), "structural_tag": _names_of_tags(form)}.get(form.type, ())
    _check_given(form, ("json_schema", *_TAGGED), belongs, field)
    match form.type:
        case "json_object":
            return made(field, json_object=True)
        case "json_schema" if form.json_schema is not None:
            return made(field, json_schema=form.json_schema.schema_)
        case "structural_tag":
            return made(field, structural_tags=_tags(form, field))
    return None


def _of_outputs(body: Structured) -> Structure | None:
    outputs, field = body.structured_outputs, "structured_outputs"
    if outputs is None:
        return None
    values = {known: getattr(outputs, name) for name, known in _OUTPUTS.items()}
    given = {known: value for known, value in values.items() if _is_given(value)}
    if outputs.structural_tag is not None:
        given["structural_tags"] = _parsed_tags(outputs.structural_tag, f"{field}.structural_tag")
    return made(field, **given, any_whitespace=outputs.disable_any_whitespace is False)


def _of_guided(body: Structured) -> list[Structure]:
    given = {name: getattr(body, name) for name in _GUIDED}
    return [made(name, **{_GUIDED[name]: value}) for name, value in given.items() if _is_given(value)]


def _is_given(value: Any) -> bool:
    """Return whether a field has a value; an empty one is a value too, which may be wrong."""
    return value is not None and value is not False


def _parsed_tags(text: str, field: str) -> StructuralTags:
    """Return the tags within a text; raise `HttpError` that names the field of the request."""
    try:
        tags = TagsText.parse(text.encode("utf-8", "replace"))
    except HttpError as error:
        parameter = field if error.parameter in (None, "body") else f"{field}.{error.parameter}"
        raise refusal(f"{field}: {error.message.replace('the body', 'it', 1)}", parameter) from None
    _check_given(tags, _TAGGED, _names_of_tags(tags), field)
    return _tags(tags, field)


def _names_of_tags(form: Tagged) -> tuple[str, ...]:
    """Return the fields that structural tags consist of."""
    return ("structures", "triggers") if form.format is None else ("format",)


def _check_given(form: Tagged, names: Sequence[str], belongs: Sequence[str], field: str) -> None:
    """Raise `HttpError` where a field of `belongs` is missing, or another one is given."""
    for name in names:
        has = getattr(form, name) is not None
        if has != (name in belongs):
            kind = f" has type {form.type}" if isinstance(form, ResponseFormat) else ""
            problem = "is missing" if not has else "does not belong to it"
            raise refusal(f"{field}{kind}: {name} {problem}", f"{field}.{name}")


def _tags(form: Tagged, field: str) -> StructuralTags:
    """Return tags within free text; raise `HttpError` that names the field of the request."""
    if (newer := form.format) is None:
        return StructuralTags(_with_triggers(form.structures or (), form.triggers or (), field, "structures"))
    tags = _with_triggers([item.tag for item in newer.tags], newer.triggers, f"{field}.format", "tags")
    return StructuralTags(tags, at_least_one=newer.at_least_one, stop_after_first=newer.stop_after_first)


def _with_triggers(
    structures: Sequence[TagBody], triggers: Sequence[str], field: str, tags_name: str
) -> list[StructuralTag]:
    """Return tags, each with the longest of the triggers that it begins with.

    Args:
        structures: the tags.
        triggers: that tags begin with.
        field: that has both, for errors.
        tags_name: its field with the tags.

    Raises:
        HttpError: there are none, or too many, or a tag begins with no trigger.
    """
    for name, given in ((tags_name, structures), ("triggers", triggers)):
        # Ahead of what follows, which looks for each tag among all triggers.
        if not 1 <= len(given) <= MAX_TAGS:
            problem = f"{field}.{name} has {len(given)} entries, must have 1 to {MAX_TAGS}"
            raise refusal(problem, f"{field}.{name}")
    tags = []
    for number, item in enumerate(structures):
        begin = f"{field}.{tags_name}[{number}].begin"
        fitting = [trigger for trigger in triggers if item.begin.startswith(trigger)]
        if not item.begin or not fitting:
            problem = f"is {item.begin[:80]!r}, which begins with no trigger" if item.begin else "is empty"
            raise refusal(f"{begin} {problem}", begin)
        schema = made(field, json_schema=item.schema_).constraint.json_schema if item.schema_ is not None else ""
        tags.append(StructuralTag(item.begin, schema or "", item.end, max(fitting, key=len)))
    return tags
