"""Applied to every request: an id, the key check, and the conversion of exceptions to OpenAI errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from net.channel.cluster_key import ClusterKey
from net.http.common.errors import ApiError, from_exception, no_route
from net.http.common.heads import given_key, request_id_of
from net.http.common.joining import Question, asked
from net.http.common.keys import ApiKeys
from net.http.common.limits import client_key
from net.http.common.page import ASSETS
from net.loop import log_context

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/", *(f"/{name}" for name in ASSETS)})
"""Probes and scrapers send no key. The page needs none: it contains no data and asks its reader for the key."""

request_id_key = web.RequestKey("request_id", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _routes(app: web.Application) -> list[str]:
    """Paths without variable parts."""
    return [resource.canonical for resource in app.router.resources() if isinstance(resource, web.PlainResource)]


def trace_headers_of(request: web.Request) -> dict[str, str] | None:
    """Joins repeated headers by commas, as W3C requires for tracestate; this makes a repeated traceparent invalid."""
    found = {name: ",".join(request.headers.getall(name, ())) for name in log_context.TRACE_HEADERS}
    return found if found["traceparent"] else None


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost middleware: names the request and converts every exception to an OpenAI error body."""
    request_id = request[request_id_key] = request_id_of(request.headers)
    log_context.request_id.set(request_id)  # a connection handles one request at a time; each sets its own id
    log_context.trace_headers.set(trace_headers_of(request))
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return no_route(request.path, _routes(request.app)).response()
    except Exception as error:
        return from_exception(error, request_id).response()


async def sign(request: web.Request, response: web.StreamResponse) -> None:
    """on_response_prepare signal: adds the id, also to streams, and removes the server's version."""
    response.headers["Server"] = "mooncake"
    if request_id_key in request:
        response.headers["X-Request-Id"] = request[request_id_key]


def joining(request: web.Request, cluster_key: ClusterKey | None) -> Question | None:
    """The question of a node that has the cluster key; None otherwise."""
    if cluster_key is None or request.path != "/cluster":
        return None
    return asked(cluster_key.ring(), request.headers.get("Authorization", ""))


def require_key(keys: ApiKeys, cluster_key: ClusterKey | None = None) -> Middleware:
    """Clients must send 'Authorization: Bearer <key>'; /cluster also accepts a proof of the cluster key."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS and joining(request, cluster_key) is None:
            owner = keys.owner(given_key(request.headers))
            if owner is None:
                raise ApiError(
                    401,
                    "missing or wrong API key; send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            request[client_key] = owner.hex()
        return await handler(request)

    return check
