"""The application: the routes, its schema at /openapi.json, and its pages at / and /docs."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import fastapi_offline
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import FileResponse, Response

import outrider
from orchestrator.http.api import ROUTES, Api
from orchestrator.http.asgi import App, Receive, Scope, Send, send_error
from orchestrator.http.errors import HttpError, as_http, body_at
from orchestrator.http.playground import PLAYGROUND_ROUTES, add_playground
from orchestrator.http.routes import Handler, Json
from outrider.errors import OutriderError

_DOCS_FILES: Final = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
"""What the page at /docs loads, from here and not from the internet, which clusters often cannot reach."""
_DOCS_ROUTES: Final = tuple(f"/docs/{name}" for name in _DOCS_FILES)
OPEN_ROUTES: Final = (
    *("/", "/health", "/version", "/api/version", "/openapi.json", "/metrics"),
    *("/docs", *_DOCS_ROUTES, *PLAYGROUND_ROUTES),
)
"""Routes that need no token; /metrics is served only where there are no tokens at all."""


class _Documented(FastAPI):
    """An application whose schema has the bodies of its routes, which parse them themselves."""

    def openapi(self) -> dict[str, Any]:
        """Return the schema."""
        if self.openapi_schema is None:
            bodies = [body for _, _, _, body in ROUTES if body is not None]
            _, definitions = models_json_schema(
                [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
            )
            super().openapi().setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return super().openapi()


def make_app(api: Api) -> App:
    """Return the application of these routes, with its schema and its pages."""
    app = _Documented(title="Outrider", version=outrider.__version__, docs_url=None, redoc_url=None)
    _add_docs(app)
    add_playground(app)
    for method, path, name, body in ROUTES:
        app.add_api_route(
            path,
            _told(getattr(api, name)),
            methods=[method],
            name=name,
            summary=(getattr(api, name).__doc__ or "").partition("\n")[0].rstrip("."),
            openapi_extra=_request_body(body),
            response_class=Response,
        )
    return _Errors(app)


def _add_docs(app: FastAPI) -> None:
    """Serve the page at /docs, and what it loads."""

    async def page(request: Request) -> Response:
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title="Outrider: HTTP API",
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url="docs/favicon.png",
        )

    async def file(request: Request) -> Response:
        return FileResponse(folder / Path(request.url.path).name, headers={"cache-control": "max-age=3600"})

    folder = Path(fastapi_offline.__file__).parent / "static"
    app.add_route("/docs", page, include_in_schema=False)
    for path in _DOCS_ROUTES:
        app.add_route(path, file, include_in_schema=False)


def _request_body(body: type[BaseModel] | None) -> dict[str, Any] | None:
    if body is None:
        return None
    reference = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def _told(handler: Handler) -> Handler:
    """Return a handler whose errors are told as OpenAI tells them."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except (HttpError, OutriderError) as error:
            return _Refusal(error)

    return handle


class _Refusal(Response):
    def __init__(self, cause: HttpError | OutriderError) -> None:
        super().__init__()
        self._cause = cause

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = as_http(self._cause, {})
        await send_error(send, error, self._cause, body_at(scope["path"], error))


class _Errors:
    """Gives paths and methods that do not exist, and what fails unexpectedly, the form of all other errors."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        app.add_exception_handler(404, self._missing)
        app.add_exception_handler(405, self._missing)
        app.add_exception_handler(Exception, self._failed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette raises again what it has answered; where a response had begun, the server cuts the connection.
        with suppress(Exception):
            await self._app(scope, receive, send)

    @staticmethod
    async def _missing(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        problem = HttpError(status, "NotFoundError", f"there is no {request.method} {request.url.path}")
        return Json(body_at(request.url.path, problem), status_code=status)

    @staticmethod
    async def _failed(request: Request, error: Exception) -> Response:
        """Return the response of an error, which is logged; it is sent only where none has begun."""
        told = as_http(error, {})
        return Json(body_at(request.url.path, told), status_code=told.status)
