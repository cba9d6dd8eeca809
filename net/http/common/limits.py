"""Protects clients from each other: requests per second, connections, web origins, and private routes. Only clients
on this machine may read the private routes."""

from __future__ import annotations

import re
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from net.http.common.connections import Rooms
from net.http.common.errors import ApiError
from net.http.common.frontend import Overloaded
from net.http.common.unknown import IGNORED_HEADER

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

KEPT_CLIENTS = 10_000
PREFLIGHT_S = 600  # how long a browser may cache the answer to a preflight
ANY_ORIGIN = "*"

client_key = web.RequestKey("client", str)
"""The client of a request: the digest of its API key; without keys its address."""

rooms_key: web.AppKey[Rooms] = web.AppKey("rooms", Rooms)

read_timeout_key: web.AppKey[float] = web.AppKey("read_timeout", float)
"""Seconds for the head of a request to arrive, and again for its body."""


class RateLimit:
    """A token bucket per client: `rate` tokens per second; the bucket holds the tokens of one second, at least one."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._most = max(1.0, rate)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client -> tokens, when

    def take(self, client: str, now: float) -> float:
        """0 if the client may continue, else the seconds until it may."""
        tokens, then = self._buckets.pop(client, (self._most, now))
        tokens = min(self._most, tokens + (now - then) * self._rate)
        wait = 0.0 if tokens >= 1 else (1 - tokens) / self._rate
        self._buckets[client] = (tokens if wait else tokens - 1, now)
        while len(self._buckets) > KEPT_CLIENTS:
            self._buckets.popitem(last=False)
        return wait


def limit_rate(rate: float) -> Middleware:
    """Allows `rate` POST requests per second and client; further ones get 429."""
    limit = RateLimit(rate)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "POST":
            wait = limit.take(request.get(client_key) or str(request.remote), time.monotonic())
            if wait:
                raise Overloaded(f"more than {rate:g} requests per second (--rate-limit)", retry_after_s=wait)
        return await handler(request)

    return check


def limit_connections(most: int) -> Middleware:
    """Answers 503 on connections that arrived while `most` others were busy, and closes them; /health is still
    answered."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.app[rooms_key].beyond(request.protocol) and request.path != "/health":
            message = f"more than {most} busy connections (--max-connections)"
            error = ApiError(503, message, code="too_many_connections", headers={"Retry-After": "1"})
            response = error.response()
            response.force_close()
            return response
        return await handler(request)

    return check


LOCAL_PAGES = re.compile(r"/(debug|live|server_info)(/.*)?")
FORWARDED = ("Forwarded", "X-Forwarded-For", "Via")
"""Headers that proxies add: the client is on another machine."""


def is_local(request: web.Request) -> bool:
    """Whether the request is from this machine: from a loopback address, or from the address to which it was sent.
    False if a proxy forwarded it, and if its Host is an arbitrary name: a foreign web page can point its own name here
    (DNS rebinding), and its scripts run in a browser on this machine."""
    if request.transport is None or any(name in request.headers for name in FORWARDED):
        return False
    own = request.transport.get_extra_info("sockname")
    try:
        remote = ip_address(request.remote or "")
        from_here = remote.is_loopback or (bool(own) and remote == ip_address(own[0]))
    except ValueError:
        return False
    return from_here and _names_this_machine(request.headers.get("Host", "localhost"))


def _names_this_machine(host: str) -> bool:
    """Whether `host`, with or without a port, is an address, 'localhost' or this machine's host name."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("localhost", socket.gethostname().lower()) or ip_address(name) is not None
    except ValueError:
        return False


@web.middleware
async def data_is_local(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Without API keys, only clients on this machine may read about the node, its cluster and its requests."""
    if LOCAL_PAGES.fullmatch(request.path) and not is_local(request):
        page = request.path.split("/")[1]
        raise ApiError(
            403,
            f"without an API key, /{page} answers only clients on this machine, by an address or localhost; start "
            "the nodes with --api-key or --api-key-file to read it from elsewhere",
            code="local_only",
        )
    return await handler(request)


def from_foreign_page(request: web.Request, origins: Collection[str]) -> bool:
    """Whether a web page sent the request that is of none of `origins` ("*": all)."""
    origin = request.headers.get("Origin")
    return origin is not None and ANY_ORIGIN not in origins and origin not in origins


class Cors:
    """Allows pages of `origins` ("*": all) to call the API from a browser."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    def _admitted(self, request: web.Request) -> str | None:
        origin = request.headers.get("Origin")
        if origin is None or from_foreign_page(request, self._origins):
            return None
        return ANY_ORIGIN if ANY_ORIGIN in self._origins else origin

    @property
    def middleware(self) -> Middleware:
        """Answers the preflight requests of browsers."""

        @web.middleware
        async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            asked = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
            if not asked or self._admitted(request) is None:
                return await handler(request)
            headers = {
                "Access-Control-Allow-Methods": "GET, POST",
                "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "")[:1000],
                "Access-Control-Max-Age": str(PREFLIGHT_S),
            }
            return web.Response(status=204, headers=headers)

        return preflight

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """on_response_prepare signal: lets the browser give the page this response; also for streams."""
        response.headers.add("Vary", "Origin")
        admitted = self._admitted(request)
        if admitted is not None:
            response.headers["Access-Control-Allow-Origin"] = admitted
            response.headers["Access-Control-Expose-Headers"] = f"X-Request-Id, Retry-After, {IGNORED_HEADER}"
