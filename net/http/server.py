"""The HTTP server of a node: routes, limits, start and stop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Collection
from functools import cache
from typing import Any

import orjson
from aiohttp import web

from net.channel.cluster_key import ClusterKey
from net.http import docs, openapi
from net.http.anthropic.routes import Messages
from net.http.batches.routes import BatchRoutes
from net.http.batches.runner import Batches
from net.http.common import page
from net.http.common.accepting import BACKLOG, Accepting
from net.http.common.connections import Rooms, Runner
from net.http.common.door import Door, door_key
from net.http.common.frontend import Frontend
from net.http.common.heads import given_key
from net.http.common.keys import ApiKeys
from net.http.common.limits import Cors, data_is_local, limit_connections, limit_rate, read_timeout_key, rooms_key
from net.http.common.middleware import identify, require_key, sign
from net.http.common.unknown import ignores_key, tell
from net.http.drain import Drain
from net.http.info import Info
from net.http.openai import rules
from net.http.openai.responses import Responses
from net.http.openai.routes import OpenAI
from net.http.openai.serving import Serving
from net.http.prefix_cache import PrefixCache
from net.http.weights import Weights

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
KiB = 1 << 10
MiB = 1 << 20


def create_app(
    frontend: Frontend,
    *,
    keys: ApiKeys | None = None,
    max_body_bytes: int = 8 * MiB,
    max_connections: int = 4096,
    read_timeout_s: float = 30.0,
    rate_limit: float = 0.0,
    allowed_origins: Collection[str] = (),
    ignore_unknown: bool = True,
    version: str = "unknown",
    cluster_key: ClusterKey | None = None,
    batches: Batches | None = None,
) -> web.Application:
    """The whole API over `frontend`. With keys, every route except OPEN_PATHS requires one; without keys, LOCAL_PAGES
    answer only this machine. read_timeout_s: for the head of a request, and again for its body; rate_limit: POST
    requests per second and client, 0: unlimited; allowed_origins: origins of web pages that may call; ignore_unknown:
    unknown fields of bodies are ignored, not refused; cluster_key: its owners may ask for /cluster without an API key;
    batches: run while the app runs.
    """
    middlewares = [identify, limit_connections(max_connections)]
    cors = Cors(allowed_origins) if allowed_origins else None
    if cors is not None:
        middlewares.append(cors.middleware)
    middlewares.append(require_key(keys, cluster_key) if keys else data_is_local)
    if rate_limit:
        middlewares.append(limit_rate(rate_limit))
    app = web.Application(middlewares=middlewares, client_max_size=max_body_bytes)
    app[rooms_key] = Rooms(max_connections)
    app[read_timeout_key] = read_timeout_s
    app[ignores_key] = ignore_unknown
    app.on_response_prepare.append(sign)
    app.on_response_prepare.append(tell)
    if cors is not None:
        app.on_response_prepare.append(cors.mark)
    door = Door(frontend.check_room, GENERATING, lambda headers: not keys or keys.owner(given_key(headers)) is not None)
    app[door_key] = door
    serving = Serving(frontend, door)
    openai, responses, messages = OpenAI(serving), Responses(serving), Messages(serving)
    info = Info(frontend, version, cluster_key)
    if batches is not None:
        batches.give_way(serving.working_on)
    batch_routes = BatchRoutes(batches, keyed=bool(keys), origins=allowed_origins)
    app.on_startup.append(batch_routes.start)
    app.on_shutdown.append(batch_routes.close)
    app.add_routes(
        [
            web.post("/v1/completions", openai.completions),
            web.post("/v1/chat/completions", openai.chat_completions),
            web.post("/v1/responses", responses.create),
            web.post("/v1/messages", messages.create),
            web.post("/v1/messages/count_tokens", messages.count_tokens),
            web.post("/v1/embeddings", info.embeddings),
            web.get("/v1/models", info.models),
            web.get("/v1/models/{model:.+}", info.model),
            web.post("/tokenize", info.tokenize),
            web.post("/detokenize", info.detokenize),
            web.get("/tokenizer_info", info.tokenizer_info),
            web.get("/health", info.health),
            web.get("/ping", info.health),
            web.post("/ping", info.health),
            web.get("/load", serving.load),
            web.get("/version", info.version),
            web.get("/server_info", info.server_info),
            web.get("/metrics", info.metrics),
            web.get("/debug/state", info.state),
            web.get("/debug/requests/{request_id}", info.timeline),
            web.get("/cluster", info.cluster),
            web.get("/live", info.live),
            web.get("/live/history", info.live_history),
            web.get("/live/requests/{request_id}", info.live_request),
            web.post("/reset_prefix_cache", PrefixCache(frontend, keyed=bool(keys)).reset),
            *batch_routes.routes(),
            *Drain(frontend, keyed=bool(keys)).routes(),
            *Weights(frontend, keyed=bool(keys)).routes(),
            *page.routes(),
        ]
    )
    described = _description(app, frontend, version, bool(keys))
    app.router.add_get("/openapi.json", _document(described))
    app.router.add_get("/docs", _docs(described))
    return app


def _description(
    app: web.Application, frontend: Frontend, version: str, with_key: bool
) -> Callable[[], dict[str, Any]]:
    """The OpenAPI document of all routes; they are complete when the first client asks."""

    @cache
    def document() -> dict[str, Any]:
        routes, values = app.router.routes(), rules.values(frontend)
        return openapi.document(routes, version, with_key, values, app[ignores_key])

    return document


def _document(described: Callable[[], dict[str, Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        body = await asyncio.to_thread(lambda: orjson.dumps(described()))  # the first time takes long
        return web.Response(body=body, content_type="application/json")

    return answer


def _docs(described: Callable[[], dict[str, Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        text = await asyncio.to_thread(lambda: docs.page(described()))
        return web.Response(text=text, content_type="text/html", headers=page.HEADERS)

    return answer


class HttpServer:
    """An app on a listening socket.

    With handler_cancellation, aiohttp cancels a handler as soon as its client disconnects, also before the first token.
    This is how `Frontend.generate` learns of a disconnect.
    """

    def __init__(
        self, app: web.Application, *, shutdown_timeout_s: float = 1.0, max_header_bytes: int = 16 * KiB
    ) -> None:
        """shutdown_timeout_s: how long `close` waits for running requests to finish, and once more for cancelled ones
        to end. max_header_bytes: limit of the request line and of each header."""
        self._runner = Runner(
            app,
            app[rooms_key],
            app[door_key],
            app[read_timeout_key],
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=shutdown_timeout_s,
            handle_signals=False,
            auto_decompress=False,  # net/http/common/body.py does it, of bodies that a handler wants, within bounds
            max_line_size=max_header_bytes,
            max_field_size=max_header_bytes,
        )

    async def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen; port 0 takes any free port. Returns the bound address. Raises OSError if the port is in use."""
        await self._runner.setup()
        # On Linux SO_REUSEADDR only skips TIME_WAIT; a port in use still fails.
        await self._serve(web.TCPSite(self._runner, host, port, reuse_address=os.name == "posix", backlog=BACKLOG))
        address: tuple[str, int] = self._runner.addresses[0][:2]
        return address

    async def start_on(self, sock: socket.socket) -> tuple[str, int]:
        """Take over a listening socket and serve on it. Returns its address."""
        await self._runner.setup()
        address: tuple[str, int] = sock.getsockname()[:2]
        await self._serve(Accepting(self._runner, sock))
        return address

    async def _serve(self, site: web.BaseSite) -> None:
        try:
            await site.start()
        except OSError:
            await self._runner.cleanup()
            raise

    async def close(self) -> None:
        await self._runner.cleanup()
