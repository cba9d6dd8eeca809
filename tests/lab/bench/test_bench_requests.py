"""scripts/bench.py requests: it measures every route that reads a body."""

from __future__ import annotations

from lab.bench.requests import REQUESTS
from net.http import create_app
from tests.net.fake_frontend import FakeFrontend

READS_NO_BODY = {"/v1/embeddings", "/ping", "/reset_prefix_cache"}


def test_every_route_that_reads_a_body_is_measured():
    routes = create_app(FakeFrontend()).router.routes()
    posts = {route.resource.canonical for route in routes if route.method == "POST" and route.resource is not None}
    assert {path for path, _ in REQUESTS.values()} == posts - READS_NO_BODY
