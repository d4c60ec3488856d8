"""Chat templates compiled as transformers does it; the filter `tojson` leaves the marks of contents as they are."""

import json
import re
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MARKS: Final = re.compile("[\U000f0000-\U000ffffd]+")
"""The private characters of `content`, and of nobody else."""
_ESCAPED: Final = re.compile("[^\x00-\x7f\U000f0000-\U000ffffd]")


def compiled_template(source: str) -> jinja2.Template:
    """Return a chat template; raise `jinja2.TemplateError` where its source is wrong."""
    # As transformers renders templates, so that their white space comes out the same.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = template_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def template_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON; templates give the arguments by place or name, and call them as transformers does.

    Marks are neither escaped nor do they count in the order of keys: what they leave behind is the text without them.

    Raises:
        TypeError: the value has no JSON.
    """
    text = json.dumps(_sorted(x) if sort_keys else x, ensure_ascii=False, indent=indent, separators=separators)
    return _ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _sorted(value: Any) -> Any:
    match value:
        case list() | tuple():
            return [_sorted(item) for item in value]
        case dict():
            pairs = sorted(value.items(), key=lambda pair: _MARKS.sub("", str(pair[0])))
            return {key: _sorted(item) for key, item in pairs}
    return value
