"""The OpenAPI document is true: every route is in it, and what it says of bodies is what the server accepts."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web

from net.http import create_app
from net.http.openapi import OPERATIONS, document
from net.http.schema import IGNORED, ChatBody, CompletionBody
from tests.net.fake_frontend import FakeFrontend, serving


async def fetch(**options):
    async with serving(FakeFrontend(), **options) as url, aiohttp.ClientSession(url) as session:
        key = {"Authorization": f"Bearer {options['api_key']}"} if options else {}
        async with session.get("/openapi.json", headers=key) as response:
            assert response.status == 200
            return await response.json()


async def test_every_route_is_in_it_and_nothing_else():
    described = await fetch()
    shown = {f"{method.upper()} {path}" for path, item in described["paths"].items() for method in item}
    routes = create_app(FakeFrontend()).router.routes()
    assert shown == {f"{route.method} {route.resource.canonical}" for route in routes if route.method != "HEAD"}
    assert shown == set(OPERATIONS)


async def _nothing(request):
    return web.Response()


def test_a_route_without_a_line_is_an_error():
    app = web.Application()
    app.router.add_get("/new", _nothing)
    with pytest.raises(LookupError, match="GET /new"):
        document(app.router.routes(), "1", with_key=False)


async def test_references_and_fields():
    described = await fetch()
    schemas = described["components"]["schemas"]
    found, left = set(), [described]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            found |= {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
            left += part.values()
        elif isinstance(part, list):
            left += part
    assert found and {name.rpartition("/")[2] for name in found} <= set(schemas)
    for model in (CompletionBody, ChatBody):
        assert set(schemas[model.__name__]["properties"]) >= set(model.model_fields) | IGNORED
        assert schemas[model.__name__]["additionalProperties"] is False


async def test_open_and_closed_routes():
    described = await fetch(api_key="k")
    assert "security" not in described["paths"]["/health"]["get"]
    assert described["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "securitySchemes" not in (await fetch())["components"]
