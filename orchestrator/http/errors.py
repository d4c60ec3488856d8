"""Errors as OpenAI's clients expect them: a status, and one JSON object that names the parameter."""

import json
import logging
import math
from collections.abc import Mapping
from typing import Any, Final

from outrider import errors
from outrider.errors import InvalidArgument, OutriderError, Overloaded

_LOG: Final = logging.getLogger(__name__)

_KINDS: Final[Mapping[str, tuple[int, str]]] = {
    errors.InvalidArgument.reason: (400, "BadRequestError"),
    errors.RuleUnsupported.reason: (400, "BadRequestError"),
    errors.ConstraintFailed.reason: (400, "BadRequestError"),
    errors.Unauthenticated.reason: (401, "AuthenticationError"),
    errors.SessionNotFound.reason: (404, "NotFoundError"),
    errors.RequestNotFound.reason: (404, "NotFoundError"),
    errors.SessionBusy.reason: (409, "ConflictError"),
    errors.SessionConflict.reason: (409, "ConflictError"),
    errors.DuplicateRequest.reason: (409, "ConflictError"),
    errors.ModelMismatch.reason: (409, "ConflictError"),
    errors.Fenced.reason: (409, "ConflictError"),
    errors.Overloaded.reason: (429, "RateLimitError"),
    errors.DataLoss.reason: (500, "InternalServerError"),
    errors.RequestFailed.reason: (500, "InternalServerError"),
    errors.Draining.reason: (503, "ServiceUnavailableError"),
    errors.Unavailable.reason: (503, "ServiceUnavailableError"),
    errors.DeadlineExceeded.reason: (504, "TimeoutError"),
}
"""Reason -> status and type. A reason that is not here is an internal error, whose text stays in the log."""

_PARAMETERS: Final[Mapping[str, str]] = {
    errors.SessionNotFound.reason: "session_id",
    errors.SessionBusy.reason: "session_id",
    errors.SessionConflict.reason: "session_id",
    errors.ModelMismatch.reason: "session_id",
    errors.Fenced.reason: "session_id",
    errors.RequestNotFound.reason: "request_id",
    errors.DuplicateRequest.reason: "request_id",
    errors.RuleUnsupported.reason: "acceptance_rule",
    errors.ConstraintFailed.reason: "constraint",
}
_RETRY_S: Final = 1.0


class HttpError(Exception):
    """A refusal of the HTTP API's own.

    Args:
        status: of HTTP.
        kind: the type of the error, such as "NotFoundError".
        message: one line.
        parameter: the field that it is about.
        code: a word for programs.
    """

    def __init__(
        self, status: int, kind: str, message: str, parameter: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.parameter = parameter
        self.code = code


def as_http(error: BaseException, names: Mapping[str, str]) -> HttpError:
    """Return what a client is told of an error; what is not ours is logged, and told without its text.

    Args:
        error: what ended the request.
        names: the route's own names of generation.proto's fields, where they differ.
    """
    if isinstance(error, HttpError):
        return error
    reason = getattr(error, "reason", "")
    if not isinstance(error, OutriderError) or reason not in _KINDS:
        _LOG.error("request failed", exc_info=error)
        return HttpError(500, "InternalServerError", "internal error", code="internal_error")
    status, kind = _KINDS[reason]
    parameter, message = _PARAMETERS.get(reason), error.message
    if parameter is not None:
        parameter = names.get(parameter, parameter)
    if isinstance(error, InvalidArgument):
        parameter = names.get(error.field, error.field)
        if parameter != error.field:
            message = message.replace(error.field, parameter, 1)
    return HttpError(status, kind, message, parameter, reason.lower())


def body_of(error: HttpError) -> dict[str, Any]:
    """Return the JSON object of an error."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.parameter,
            "code": error.code or error.status,
        }
    }


def plain_body_of(error: HttpError) -> dict[str, Any]:
    """Return the JSON object of an error as Ollama's clients read it: a text, which names the parameter."""
    parameter = error.parameter or ""
    return {"error": error.message if parameter in error.message else f"{parameter}: {error.message}"}


def body_at(path: str, error: HttpError) -> dict[str, Any]:
    """Return the JSON object of an error as the clients of a path read it."""
    return plain_body_of(error) if path.startswith("/api/") else body_of(error)


def headers_of(error: HttpError, cause: BaseException | None = None) -> list[tuple[bytes, bytes]]:
    """Return the headers that belong to an error, such as Retry-After."""
    headers: list[tuple[bytes, bytes]] = []
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status in (429, 503):
        retry_s = cause.retry_after_s if isinstance(cause, Overloaded) else _RETRY_S
        headers.append((b"retry-after", str(max(1, math.ceil(retry_s))).encode()))
    return headers


def encoded(value: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
