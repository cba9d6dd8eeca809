"""The live page at `/`: static files of assets/, without a build step or external files. Its data is GET /live."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

FOLDER = Path(__file__).with_name("assets")
TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
ASSETS = tuple(path.name for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES)

HEADERS = {
    # The page runs only its own files, so text from a model in the chat box cannot become a script.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> list[web.RouteDef]:
    """The page and its files, read once."""
    return [web.get("/", _serve("index.html")), *(web.get(f"/{name}", _serve(name)) for name in ASSETS)]


def _serve(name: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    path = FOLDER / name
    content = path.read_bytes()

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=content, content_type=TYPES[path.suffix], charset="utf-8", headers=HEADERS)

    return handler
