"""POST /drain: who may ask, and what the node answers."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request

from net.http.common.errors import ApiError
from net.http.drain import Drain
from tests.net.fake_frontend import FakeFrontend, serving


@pytest.fixture
async def frontend():
    return FakeFrontend()


async def test_drain_is_asked_and_followed(frontend):
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:
        assert await (await session.get("/drain")).json() == {"draining": False}
        async with session.post("/drain", json={"timeout_s": 5, "grace_s": 0}) as response:
            assert (response.status, await response.json()) == (200, {"draining": True})
    assert frontend.drained == (5.0, 0.0)


async def test_the_last_of_a_role_is_kept_unless_forced(frontend):
    frontend.last = True
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:
        async with session.post("/drain", json={}) as response:
            assert response.status == 409
            assert (await response.json())["error"]["code"] == "last_of_its_role"
        assert (await session.post("/drain", json={"force": True})).status == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({"json": {"timeout_s": -1}}, 400),
        ({"json": {"now": True}}, 400),
        ({"data": "{}", "headers": {"Content-Type": "text/plain"}}, 415),
        ({"data": b"{}", "skip_auto_headers": ["Content-Type"]}, 415),
    ],
)
async def test_bad_bodies(frontend, sent, status):
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:
        assert (await session.post("/drain", **sent)).status == status
    assert frontend.drained is None


async def test_the_key_is_wanted(frontend):
    async with serving(frontend, api_key="k") as url, aiohttp.ClientSession(url) as session:
        assert (await session.post("/drain", json={})).status == 401
        assert (await session.post("/drain", json={}, headers={"Authorization": "Bearer k"})).status == 200


@pytest.mark.parametrize(("remote", "may"), [("10.0.0.9", False), ("127.0.0.9", True), ("::1", True), (None, False)])
async def test_without_a_key_only_this_host(frontend, remote, may):
    request = make_mocked_request("POST", "/drain").clone(remote=remote or "")
    with pytest.raises(ApiError) as refused:
        await Drain(frontend, keyed=False).begin(request)
    assert refused.value.status == (415 if may else 403)  # the mocked request has no body


async def test_without_a_key_no_web_page_drains_a_node(frontend):
    """Also a page that --allowed-origins lets ask for answers."""
    page = {"Origin": "http://app.example"}
    async with serving(frontend, allowed_origins=(page["Origin"],)) as url, aiohttp.ClientSession(url) as session:
        assert (await session.get("/v1/models", headers=page)).status == 200
        assert (await session.post("/drain", json={}, headers=page)).status == 403
    assert frontend.drained is None
