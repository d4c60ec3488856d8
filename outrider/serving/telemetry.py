"""Logging: one line per record on stderr, safe from log injection.

Prompts and outputs are never logged. A traceback could carry them in the message of its exception, so a record holds
the exception's type and where it was raised; its message only when the level is debug.
"""

import json
import logging
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final, Literal

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_FIELDS: ContextVar[Mapping[str, object]] = ContextVar("log_fields")
# C0 and C1 controls, and the separators that some viewers break lines at.
_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def configure_logging(
    *,
    service: str,
    level: Literal["debug", "info", "warning", "error"] = "info",
    form: Literal["json", "text"] = "json",
) -> None:
    """Send every record of the process to stderr; fields given as `extra` become fields of the record.

    Args:
        service: name of the service, in each record.
        level: minimum log level.
        form: one JSON object per record, or a line of text for a person.
    """
    formatter = JsonFormatter if form == "json" else TextFormatter
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(formatter(service, with_messages=level == "debug"))
    logging.basicConfig(handlers=[stream], level=level.upper(), force=True)
    logging.captureWarnings(True)


def add_log_fields(**fields: object) -> None:
    """Add fields to every record that the running task, and tasks that it starts, log from now on.

    For ids only: never add a caller's text.
    """
    _FIELDS.set({**_FIELDS.get({}), **fields})


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object, in ASCII, so that no control character survives.

    Args:
        service: the field `service` of each record.
        with_messages: whether the messages of exceptions are written.
    """

    def __init__(self, service: str, *, with_messages: bool = False) -> None:
        super().__init__()
        self._service = service
        self._with_messages = with_messages

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        fields: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if failure := _failure(record, self._with_messages):
            fields["exception"] = failure
        return json.dumps(fields, default=str)


class TextFormatter(JsonFormatter):
    """Formats a record as one line of text; control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        head = f"{_time(record)} {record.levelname.lower():7} {self._service} {record.name}: {record.getMessage()}"
        fields = [f"{name}={value}" for name, value in _extra(record).items()]
        if failure := _failure(record, self._with_messages):
            fields.append(f"exception={failure}")
        return escape_controls(" ".join([head, *fields]))


def escape_controls(text: str) -> str:
    r"""Return the text with every control character and line separator as \xNN or \uNNNN."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extra(record: logging.LogRecord) -> dict[str, object]:
    given = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {**_FIELDS.get({}), **given}


def _failure(record: logging.LogRecord, with_messages: bool) -> str | None:
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return None
    return " < ".join(_causes(error, with_messages))


def _causes(error: BaseException, with_messages: bool) -> Iterator[str]:
    """Yield the error and what it was raised from, each with its frames, innermost first."""
    cause: BaseException | None = error
    while cause is not None:
        frames = reversed(traceback.extract_tb(cause.__traceback__))
        where = ", ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
        what = f"{type(cause).__name__}: {cause}" if with_messages else type(cause).__name__
        yield f"{what} at {where}" if where else what
        cause = cause.__cause__
