"""The page at /: a chat, and the engine room beside it. Built in chapter 23.

The files of this folder are sent as they are: HTML, a style sheet and small scripts, without a build step and without
anything from another server. Their headers forbid the browser to load, send or run anything that is not from here, so
that a text of the model could do no harm even if it were taken for HTML; it is inserted as text anyway.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response

from minillm.serving.errors import ApiError
from minillm.serving.known import Known
from minillm.serving.models import Models
from minillm.serving.sse import EventStream

FOLDER = Path(__file__).parent
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a browser asks whether its copy is still the newest
}


def add_page(app: FastAPI, models: Models) -> None:
    """The page without a key, since nothing in it is secret; the engine room with one, where there are keys."""
    files = {path.name: _answer(path) for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES}

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return _unless_known(request, files["index.html"])

    @app.api_route("/page/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        if name not in files:
            raise ApiError(404, f"there is no path {request.url.path}; /openapi.json lists those that are")
        return _unless_known(request, files[name])

    @app.get("/engine_room", include_in_schema=False)  # a stream without an end is no answer to try out
    async def engine_room(client: Known, model: str | None = None) -> Response:
        """That of the engine behind a model's or an adapter's name; of the only one where no name is given."""
        room = models.find(model).room
        room.check_room()
        return EventStream(room.watch())


def _answer(path: Path) -> Response:
    content = path.read_bytes()
    etag = f'"{sha256(content).hexdigest()[:32]}"'
    return Response(content, media_type=MEDIA_TYPES[path.suffix], headers=HEADERS | {"ETag": etag})


def _unless_known(request: Request, answer: Response) -> Response:
    """304 where the browser has it already."""
    if request.headers.get("if-none-match") == answer.headers["etag"]:
        return Response(status_code=304, headers=HEADERS | {"ETag": answer.headers["etag"]})
    return answer
