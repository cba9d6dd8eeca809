"""POST /reset_prefix_cache: who may ask, and what the cluster answers."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request

from net.http.common.errors import ApiError
from net.http.prefix_cache import PrefixCache
from tests.net.fake_frontend import FakeFrontend, serving

RESET = "/reset_prefix_cache"


@pytest.fixture
async def frontend():
    return FakeFrontend()


async def test_a_reset_counts_what_each_node_forgot(frontend):
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:
        async with session.post(RESET) as response:
            told = {"arena_blocks": 3, "pooled_blocks": 2, "error": None}
            assert (response.status, await response.json()) == (200, {"nodes": {"fake": told}})
        assert (await session.get(RESET)).status == 405
    assert frontend.resets == 1


async def test_a_node_that_does_not_answer_is_an_error(frontend):
    frontend.sick = "no answer within 60 s"
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session, session.post(RESET) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (503, "incomplete")
        assert "fake: no answer within 60 s" in error["message"]


async def test_the_key_is_wanted(frontend):
    async with serving(frontend, api_key="k") as url, aiohttp.ClientSession(url) as session:
        assert (await session.post(RESET)).status == 401
        assert (await session.post(RESET, headers={"Authorization": "Bearer k"})).status == 200
    assert frontend.resets == 1


async def test_without_a_key_no_page_of_a_browser_may_ask(frontend):
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:
        assert (await session.post(RESET, headers={"Origin": "http://example.org"})).status == 403
    assert frontend.resets == 0


@pytest.mark.parametrize(("remote", "may"), [("10.0.0.9", False), ("127.0.0.9", True), ("::1", True), (None, False)])
async def test_without_a_key_only_this_host(frontend, remote, may):
    request = make_mocked_request("POST", RESET).clone(remote=remote or "")
    handler = PrefixCache(frontend, keyed=False)
    if may:
        assert (await handler.reset(request)).status == 200
    else:
        with pytest.raises(ApiError) as refused:
            await handler.reset(request)
        assert refused.value.status == 403
    assert frontend.resets == may
