"""The base of request bodies: what is accepted of fields that this server does not have, and how errors name one."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from orchestrator.http.errors import HttpError

_MAX_FIELDS: Final = 256
"""Of one object; pydantic collects an error for each that is wrong, millions of them take gigabytes."""

BodyT = TypeVar("BodyT", bound="Body")


class Body(BaseModel):
    """The base of all bodies: a field that is null is absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: Any) -> Any:
        """Return the fields that have a meaning; refuse a neutral field that asks for something."""
        if not isinstance(values, dict):
            return values
        if len(values) > _MAX_FIELDS:
            raise PydanticCustomError("too_many", "an object may have at most {num} fields", {"num": _MAX_FIELDS})
        for name, value in values.items():
            if name in cls.neutral and not _is_among(value, cls.neutral[name]):
                raise PydanticCustomError("unsupported", "{name} is not supported", {"name": name})
        left_out = cls.ignored | cls.neutral.keys()
        return {name: value for name, value in values.items() if value is not None and name not in left_out}

    @classmethod
    def parse(cls: type[BodyT], content: bytes) -> BodyT:
        """Return the body of a request; raise `HttpError` with the name of the first field that is wrong."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False)
            first = _where(problems[0]["loc"])
            # Of the branches of a union, the one that got furthest is the one that was meant.
            about = [problem for problem in problems if _where(problem["loc"]).startswith(first)]
            raise _refusal(max(about, key=lambda problem: len(problem["loc"]))) from None


def _refusal(problem: ErrorDetails) -> HttpError:
    where = _where(problem["loc"])
    match problem["type"]:
        case "extra_forbidden":
            message = f"{where} is not supported"
        case "json_invalid":
            return HttpError(400, "BadRequestError", f"the body is not JSON: {problem['msg']}", "body", "invalid_json")
        case "unsupported":
            where = f"{where}.{problem['ctx']['name']}" if where else problem["ctx"]["name"]
            message = f"{where} is not supported"
        case _:
            message = f"{where}: {problem['msg']}" if where else problem["msg"]
    return HttpError(400, "BadRequestError", message, where or "body", "invalid_argument")


def _where(location: tuple[int | str, ...]) -> str:
    """Return the path of a field as a user writes it, such as messages[0].content."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _BRANCHES or part.startswith(_BRANCH_KINDS):
            continue
        else:
            path += f".{part}" if path else part
    return path


# Pydantic puts the branch of a union into the path.
_BRANCHES: Final = frozenset(
    {"str", "int", "float", "bool", "TextPart", "NamedChoice", "AllowedChoice"}
    | {"InputMessage", "FunctionCallItem", "FunctionOutputItem", "ReasoningItem"}
)
_BRANCH_KINDS: Final = (
    "list[",
    "tagged-union[",
    "dict[",
    "literal[",
    "function-",
    "constrained-",
    "lax-or-strict",
    "nullable",
)


def _is_among(value: Any, known: Sequence[Any]) -> bool:
    # 1 and True are equal in Python.
    return value is None or any(value == item and type(value) is type(item) for item in known)
