"""The header that names a request's session where gateways read it."""

from typing import Final, TypeVar

from fastapi import Request

from orchestrator.http.asgi import header
from orchestrator.http.bodies import GenerationBody
from orchestrator.http.errors import HttpError
from outrider.serving.affinity import SESSION

_HEADER: Final = SESSION.encode()
BodyT = TypeVar("BodyT", bound=GenerationBody)


def with_session(body: BodyT, request: Request) -> BodyT:
    """Return a body with the session that the request's header names, if there is one.

    Raises:
        HttpError: the body names another session: a gateway would not bring the requests of either to one place.
    """
    name = header(request.scope, _HEADER)
    if not name or body.session_id == name:
        return body
    if body.session_id is not None:
        problem = f"session_id is {body.session_id[:128]!r}, X-Outrider-Session is {name[:128]!r}"
        raise HttpError(400, "BadRequestError", problem, "session_id", "invalid_argument")
    return body.model_copy(update={"session_id": name})
