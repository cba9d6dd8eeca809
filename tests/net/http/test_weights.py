"""POST and GET /v1/update_weights: who may ask, which bodies are right, and what the answers say."""

from __future__ import annotations

import aiohttp
import pytest

from net.http.common.frontend import Refused, Unavailable
from tests.net.fake_frontend import FakeFrontend, serving

PATH = "/v1/update_weights"
BODY = {"prefix": "step-40/", "version": "40"}


@pytest.fixture
async def frontend():
    return FakeFrontend()


async def test_a_replacement_and_what_is_served_then(frontend):
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:
        async with session.get("/v1/models") as response:
            assert (await response.json())["data"][0]["weights_version"] is None
        async with session.post(PATH, json=BODY) as response:
            assert (response.status, await response.json()) == (200, BODY | {"tenant": "default", "timeout_s": 600.0})
        async with session.get(PATH) as response:
            assert (await response.json())["version"] == "40"
        async with session.get("/v1/models") as response:
            assert (await response.json())["data"][0]["weights_version"] == "40"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ValueError("1 of 3 is missing"), 400, "unfit_tensors"),
        (Refused("another replacement is under way"), 409, "refused"),
        (Unavailable("decode-0: no memory", 1.0), 503, "not_prepared"),
    ],
)
async def test_why_nothing_has_changed(frontend, error, status, code):
    frontend.update_error = error
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session, session.post(PATH, json=BODY) as answer:
        told = (await answer.json())["error"]
        assert (answer.status, told["code"], told["message"]) == (status, code, str(error))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prefix": ""}, "prefix"),
        ({"prefix": "é" * 51}, "prefix"),
        ({"version": None}, "version"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"names": []}, "names"),
    ],
)
async def test_wrong_bodies(frontend, change, field):
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:
        answer = await session.post(PATH, json=BODY | change)
        assert answer.status == 400 and field in (await answer.json())["error"]["message"]
    assert frontend.version == ""


async def test_who_may_ask(frontend):
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:
        assert (await session.post(PATH, json=BODY, headers={"Origin": "http://example.org"})).status == 403
    async with serving(frontend, api_key="k") as url, aiohttp.ClientSession(url) as session:
        assert (await session.post(PATH, json=BODY)).status == 401
        assert frontend.version == ""
        assert (await session.post(PATH, json=BODY, headers={"Authorization": "Bearer k"})).status == 200
