"""What the routes of all APIs share: the model by its name, and the response to a request for generation."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from orchestrator.api.service import GenerationService
from orchestrator.http.answer import Answer
from orchestrator.http.asgi import header, metadata
from orchestrator.http.bodies import GenerationBody
from orchestrator.http.errors import encoded
from orchestrator.http.forms import Form
from orchestrator.http.names import ServedNames
from orchestrator.http.requests import Prompts, Resumption, timeout_of
from orchestrator.workers.model import Model
from outrider.v1 import generation_pb2

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
RouteTable: TypeAlias = tuple[tuple[str, str, str, type[BaseModel] | None], ...]
"""Method, path, name of the handler and body of each route."""
MakeForm: TypeAlias = Callable[[str, str, list[generation_pb2.GenerateRequest]], Awaitable[Form]]
"""Returns the form of a response from its id, the model's name and the message of each choice."""
LAST_EVENT_ID: Final = b"last-event-id"


class Json(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return encoded(content)


class Routes:
    """The base of a group of routes.

    Args:
        service: generates.
        names: names of the model.
    """

    def __init__(self, service: GenerationService, names: ServedNames) -> None:
        self._service = service
        self._names = names

    async def _model(self, name: str | None) -> Model:
        """Return the model; raise `HttpError` for a name that it does not have."""
        model = await self._service.model()
        self._names.check(name, model)
        return model

    async def _answer(
        self,
        request: Request,
        body: GenerationBody,
        prompts: Prompts,
        model: Model,
        prefix: str,
        names: Mapping[str, str],
        form: MakeForm,
    ) -> Response:
        """Return the response to a request for generation.

        Args:
            request: the request, whose headers may resume it or bound its time.
            body: its body.
            prompts: what to complete.
            model: the model.
            prefix: of the ids of this route, such as "chatcmpl-".
            names: the route's own names of generation.proto's fields, for errors.
            form: makes the form of the response.
        """
        last_event_id = header(request.scope, LAST_EVENT_ID)
        resumption = Resumption.of(last_event_id, body.request_id, prefix)
        messages = prompts.choices(resumption)
        return Answer(
            self._service,
            messages,
            await form(f"{prefix}{resumption.request_id}", body.model or self._names.of(model)[0], messages),
            metadata(request.scope),
            names=names,
            streams=body.streams,
            timeout_s=timeout_of(header(request.scope, b"x-request-timeout")),
        )
