"""The HTTP server of a node: routes, limits, start and stop."""

from __future__ import annotations

import os
import socket

from aiohttp import web

from net.http import page
from net.http.drain import Drain
from net.http.frontend import Frontend
from net.http.info import Info
from net.http.middleware import echo_request_id, identify, require_key
from net.http.openai import OpenAI

MiB = 1 << 20


def create_app(
    frontend: Frontend, *, api_key: str | None = None, max_body_bytes: int = 8 * MiB, version: str = "unknown"
) -> web.Application:
    """The whole API over `frontend`. With `api_key`, every route except /health and /metrics wants it."""
    middlewares = [identify, require_key(api_key)] if api_key else [identify]
    app = web.Application(middlewares=middlewares, client_max_size=max_body_bytes)
    app.on_response_prepare.append(echo_request_id)
    openai, info = OpenAI(frontend), Info(frontend, version)
    app.add_routes(
        [
            web.post("/v1/completions", openai.completions),
            web.post("/v1/chat/completions", openai.chat_completions),
            web.get("/v1/models", info.models),
            web.get("/v1/models/{model:.+}", info.model),
            web.post("/tokenize", info.tokenize),
            web.post("/detokenize", info.detokenize),
            web.get("/health", info.health),
            web.get("/version", info.version),
            web.get("/metrics", info.metrics),
            web.get("/debug/state", info.state),
            web.get("/debug/requests/{request_id}", info.timeline),
            web.get("/cluster", info.cluster),
            web.get("/live", info.live),
            web.get("/live/requests/{request_id}", info.live_request),
            *Drain(frontend, keyed=bool(api_key)).routes(),
            *page.routes(),
        ]
    )
    return app


class HttpServer:
    """An app on a listening socket.

    handler_cancellation makes aiohttp cancel a handler as soon as its client hangs up, also while it waits for the
    first token: that is how a hang-up reaches `Frontend.generate`.
    """

    def __init__(self, app: web.Application, *, shutdown_timeout_s: float = 1.0) -> None:
        """shutdown_timeout_s: how long `close` waits for requests in progress to finish, and once more for them to end
        by being cancelled."""
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s, handle_signals=False
        )

    async def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen; port 0 takes a free one. Returns the address in use. Raises OSError when the port is taken."""
        await self._runner.setup()
        # On Linux SO_REUSEADDR only skips TIME_WAIT; a port in use still fails.
        return await self._serve(web.TCPSite(self._runner, host, port, reuse_address=os.name == "posix", backlog=1024))

    async def start_on(self, sock: socket.socket) -> tuple[str, int]:
        """Serve on a socket that listens already, and own it from now on. Returns its address."""
        await self._runner.setup()
        return await self._serve(web.SockSite(self._runner, sock))

    async def _serve(self, site: web.BaseSite) -> tuple[str, int]:
        try:
            await site.start()
        except OSError:
            await self._runner.cleanup()
            raise
        address: tuple[str, int] = self._runner.addresses[0][:2]
        return address

    async def close(self) -> None:
        await self._runner.cleanup()
