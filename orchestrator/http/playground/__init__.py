"""The playground: a page that a browser gets at /, and the files that it loads from /playground.

The files are served as they stand: nothing is built, and nothing is loaded from elsewhere, which their
Content-Security-Policy holds browsers to. The page calls the routes of OpenAI's API like any other client, so these
need a tenant's token, and the page does not.
"""

import hashlib
from pathlib import Path
from typing import Final, NamedTuple

from fastapi import FastAPI, Request
from starlette.responses import Response

_FOLDER: Final = Path(__file__).parent / "page"
_INDEX: Final = "index.html"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


class _File(NamedTuple):
    """A file of the page.

    Attributes:
        content: its bytes.
        headers: of a response that has it.
    """

    content: bytes
    headers: dict[str, str]


def _load(path: Path) -> _File:
    content = path.read_bytes()
    headers = {
        "content-type": _TYPES[path.suffix],
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        # A page of one version must not load scripts of another: browsers ask each time, and get 304.
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }
    if path.name == _INDEX:
        headers["vary"] = "Accept"
    return _File(content, headers)


_FILES: Final = {path.name: _load(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}
PLAYGROUND_ROUTES: Final = tuple(f"/playground/{name}" for name in _FILES if name != _INDEX)


def accepts_page(request: Request) -> bool:
    """Return whether a request comes from a browser that wants a page: no library accepts text/html by name."""
    return "text/html" in request.headers.get("accept", "").lower()


def page(request: Request) -> Response:
    """Return the page."""
    return _answer(request, _FILES[_INDEX])


def add_playground(app: FastAPI) -> None:
    """Serve what the page loads."""

    async def file(request: Request) -> Response:
        return _answer(request, _FILES[request.url.path.rpartition("/")[2]])

    for path in PLAYGROUND_ROUTES:
        app.add_route(path, file, methods=["GET"], include_in_schema=False)


def _answer(request: Request, file: _File) -> Response:
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.headers["etag"] in known:
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)
