"""POST /reset_prefix_cache: all nodes of the cluster forget cached KV (engine/node/prefix_reset.py)."""

from __future__ import annotations

from aiohttp import web

from net.http.common.errors import ApiError
from net.http.common.frontend import Frontend
from net.http.common.limits import is_local
from net.http.info import json_response


class PrefixCache:
    """Without API keys, only clients on this host may ask, and no web page; with keys, the middleware has checked the
    key."""

    def __init__(self, frontend: Frontend, keyed: bool) -> None:
        self._frontend = frontend
        self._keyed = keyed

    async def reset(self, request: web.Request) -> web.Response:
        if not self._keyed and (not is_local(request) or "Origin" in request.headers):
            raise ApiError(
                403,
                "without an API key, only a client on the node's own host may reset the cache, and no web page",
                code="forbidden",
            )
        nodes = await self._frontend.reset_prefix_cache()
        if failed := [f"{node_id}: {report['error']}" for node_id, report in nodes.items() if report["error"]]:
            raise ApiError(
                503,
                f"the caches of these nodes may be unchanged: {'; '.join(failed)}",
                code="incomplete",
                headers={"Retry-After": "1"},
            )
        return json_response({"nodes": nodes})
