"""The page at `/`: files as they are, which load nothing from elsewhere."""

import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_HEADERS = {
    # Whatever a model writes, nothing is run that is not in these files.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept, and asked for anew by its tag: pages of two releases do not mix
}


def static_routes() -> list[Route]:
    return [_route("/" if name == "index.html" else f"/page/{name}", name) for name in _TYPES]


def _route(path: str, name: str) -> Route:
    content = (files(__name__) / name).read_bytes()
    headers = _HEADERS | {"etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    def answer(request: Request) -> Response:
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_TYPES[name])

    return Route(path, answer, methods=["GET"])
