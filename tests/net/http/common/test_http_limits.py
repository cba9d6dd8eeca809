"""Keys from a file, limits per client, CORS, and what only this machine may read."""

from __future__ import annotations

import asyncio
import socket
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from net.http.client import ClusterError, fetch_cluster
from net.http.common.errors import ApiError
from net.http.common.keys import CHECK_PERIOD_S, ApiKeyFileError, ApiKeys, key_to_send
from net.http.common.limits import RateLimit, data_is_local, is_local
from tests.net.fake_frontend import FakeFrontend, serving

PAGE = "https://page.example"
BODY = {"prompt": "a", "max_tokens": 1}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def status(session, method="GET", path="/v1/models", **options):
    async with session.request(method, path, **options) as response:
        await response.read()
        return response.status


@pytest.mark.expects_error("keeping the old API keys")
async def test_keys_of_a_file_are_read_again(tmp_path):
    now, path = [0.0], tmp_path / "keys"
    path.write_text("# alice\nalice-key\n\nbob-key-1\n")
    keys = ApiKeys("own", path, clock=lambda: now[0])
    async with serving(FakeFrontend(), keys=keys) as url, aiohttp.ClientSession(url) as session:
        for key, wanted in {"own": 200, "alice-key": 200, "bob-key-1": 200, "# alice": 401, "": 401}.items():
            assert await status(session, headers=bearer(key)) == wanted, key
        path.write_text("carol-key\n")
        now[0] += CHECK_PERIOD_S
        assert await status(session, headers=bearer("carol-key")) == 200
        assert await status(session, headers=bearer("bob-key-1")) == 401
        path.write_text("short\n")  # a file that cannot be used changes nothing
        now[0] += CHECK_PERIOD_S
        assert await status(session, headers=bearer("carol-key")) == 200
        assert await status(session, headers=bearer("short")) == 401


@pytest.mark.parametrize("text", [None, "", "# nobody\n", "short\n", "two words here\n", "\udcff"])
def test_a_key_file_that_cannot_be_used(tmp_path, text):
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ApiKeyFileError, match="--api-key-file"):
        ApiKeys(None, path)


def test_owners():
    keys = ApiKeys("own-key")
    assert keys.owner("own-key") == keys.owner("own-key") and keys.owner("own-ke") is None
    assert keys and not ApiKeys()


async def test_rate_per_key(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice-key\nbob-key-1\n")
    async with (
        serving(FakeFrontend(), keys=ApiKeys(None, path), rate_limit=0.001) as url,
        aiohttp.ClientSession(url) as session,
    ):
        post = {"method": "POST", "path": "/v1/completions", "json": BODY}
        assert [await status(session, **post, headers=bearer("alice-key")) for _ in range(3)] == [200, 429, 429]
        assert await status(session, **post, headers=bearer("bob-key-1")) == 200
        assert await status(session, headers=bearer("alice-key")) == 200  # reading is free
        async with session.post("/v1/completions", json=BODY, headers=bearer("alice-key")) as response:
            assert int(response.headers["Retry-After"]) >= 900


@given(st.floats(0.01, 100), st.lists(st.floats(0, 10), min_size=1, max_size=40))
def test_never_more_than_the_rate(rate, gaps):
    limit, now, taken = RateLimit(rate), 0.0, 0
    for gap in gaps:
        now += gap
        wait = limit.take("a", now)
        taken += wait == 0
        assert taken <= max(1, rate) + rate * now + 1e-6
        if wait:  # who waits as told is let in
            now += wait * (1 + 1e-9) + 1e-9
            assert limit.take("a", now) == 0
            taken += 1


async def test_connections():
    """Who is at work keeps its place; /health is answered when there is none."""
    frontend = FakeFrontend()
    async with serving(frontend, max_connections=1) as url:
        async with (
            aiohttp.ClientSession(url) as first,
            aiohttp.ClientSession(url) as second,
            first.post("/v1/completions", json={"prompt": "!hang-later", "max_tokens": 100, "stream": True}) as stream,
        ):
            assert stream.status == 200
            async with second.get("/v1/models") as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
                assert (await response.json())["error"]["code"] == "too_many_connections"
            assert await status(second, path="/health") == 200
            assert await stream.content.readline()
        async with aiohttp.ClientSession(url) as third:
            for _ in range(500):  # until the server has seen the first one's end
                if (last := await status(third)) == 200:
                    break
                await asyncio.sleep(0.01)
            assert last == 200


async def test_a_connection_that_waits_makes_room():
    async with (
        serving(FakeFrontend(), max_connections=2) as url,
        aiohttp.ClientSession(url) as first,
        aiohttp.ClientSession(url) as second,
    ):
        assert await status(first) == await status(second) == 200
        for _ in range(5):
            async with aiohttp.ClientSession(url) as another:
                assert await status(another) == 200


async def test_body_and_header_limits():
    async with serving(FakeFrontend(), max_body_bytes=2000) as url, aiohttp.ClientSession(url) as session:
        long = {"prompt": "a" * 3000}
        assert await status(session, "POST", "/v1/completions", json=long) == 413
        assert await status(session, headers={"X-Long": "a" * 12_000}) == 200
        assert await status(session, headers={"X-Long": "a" * 20_000}) == 400


async def test_no_page_may_call_by_default():
    async with serving(FakeFrontend()) as url, aiohttp.ClientSession(url) as session:
        asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        assert await status(session, "OPTIONS", "/v1/completions", headers=asked) == 405
        async with session.get("/v1/models", headers={"Origin": PAGE}) as response:
            assert not [name for name in response.headers if name.startswith("Access-Control")]


@pytest.mark.parametrize(("origins", "answer"), [((PAGE,), PAGE), (("*",), "*"), (("https://other.example",), None)])
async def test_pages_that_may_call(origins, answer):
    async with (
        serving(FakeFrontend(), api_key="k", allowed_origins=origins) as url,
        aiohttp.ClientSession(url) as session,
    ):
        asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
        async with session.options("/v1/completions", headers=asked) as response:
            assert response.status == (204 if answer else 401)
            assert response.headers.get("Access-Control-Allow-Headers") == ("x-a" if answer else None)
            assert response.headers.get("Access-Control-Allow-Origin") == answer
        stream = BODY | {"stream": True}
        for key, wanted in (("k", 200), ("wrong", 401)):  # the page may read errors too
            headers = {"Origin": PAGE} | bearer(key)
            async with session.post("/v1/completions", json=stream, headers=headers) as response:
                assert response.status == wanted
                assert response.headers.get("Access-Control-Allow-Origin") == answer
                assert "Origin" in response.headers["Vary"]


LOCAL = {"Host": "127.0.0.1:8000"}


@pytest.mark.parametrize(
    ("path", "address", "headers", "let_in"),
    [
        ("/debug/state", "127.0.0.1", LOCAL, True),
        ("/debug/state", "::1", {"Host": "[::1]:8000"}, True),
        ("/debug/state", "10.0.0.7", LOCAL, False),
        ("/debug/requests/x", "10.0.0.7", LOCAL, False),
        ("/live", "127.0.0.1", {"Host": "localhost:8000"}, True),
        ("/live", "127.0.0.1", {"Host": socket.gethostname()}, True),
        ("/live", "10.0.0.7", LOCAL, False),
        ("/live/requests/x", "10.0.0.7", LOCAL, False),
        ("/live/requests/x", "127.0.0.1", {"Host": "rebound.example:8000"}, False),  # a page of another site
        ("/live", "127.0.0.1", {"Host": "[broken"}, False),
        ("/live", "127.0.0.1", LOCAL | {"X-Forwarded-For": "10.0.0.7"}, False),  # a proxy on this machine
        ("/v1/models", "10.0.0.7", LOCAL, True),
        ("/cluster", "10.0.0.7", LOCAL, True),  # who joins has nothing else yet
        ("/livery", "10.0.0.7", LOCAL, True),
    ],
)
async def test_data_without_keys_is_local(path, address, headers, let_in):
    request = make_mocked_request("GET", path, headers).clone(remote=address)

    async def handler(_):
        return "answer"

    if let_in:
        assert await data_is_local(request, handler) == "answer"
    else:
        with pytest.raises(ApiError, match="clients on this machine") as error:
            await data_is_local(request, handler)
        assert error.value.status == 403


async def test_the_machine_itself_by_its_own_address():
    """A node on 10.0.0.1 is asked from there by that address."""
    transport = Mock()
    transport.get_extra_info = {"sockname": ("10.0.0.1", 8000), "peername": ("10.0.0.1", 5)}.get
    request = make_mocked_request("GET", "/live", {"Host": "10.0.0.1:8000"}, transport=transport)
    assert is_local(request.clone(remote="10.0.0.1"))
    assert not is_local(request.clone(remote="10.0.0.2"))


def test_the_key_that_is_sent(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# first\nalice-key\nbob-key-1\n")
    assert key_to_send(None, path) == "alice-key" and key_to_send("own", path) == "own"
    assert key_to_send(None, None) is None
    path.write_text("# nobody\n")
    with pytest.raises(ApiKeyFileError, match="contains no key"):
        key_to_send(None, path)


async def test_a_joining_node_sends_the_first_key_of_the_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice-key\nbob-key-1\n")
    async with serving(FakeFrontend(), keys=ApiKeys(None, path)) as url:
        address = url.removeprefix("http://")
        assert await fetch_cluster(address, key_to_send(None, path)) == {"members": []}
        with pytest.raises(ClusterError, match=r"another API key .--api-key, or the first line of --api-key-file."):
            await fetch_cluster(address, "wrong")


@pytest.mark.parametrize("offered", [5, 20, 60])
async def test_of_a_burst_as_many_are_served_as_fit(offered):
    """First come, first served; the others are refused before any work for them."""
    frontend = FakeFrontend()
    frontend.places = 5

    async with serving(frontend) as url, aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(number: int) -> int:
            body = {"prompt": f"!hang {number}", "max_tokens": 2}
            async with session.post("/v1/completions", json=body) as response:
                return response.status

        tasks = [asyncio.create_task(ask(number)) for number in range(offered)]
        while len(frontend.calls) < 5 or sum(task.done() for task in tasks) < offered - 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert [task.result() for task in tasks if task.done()] == [429] * (offered - 5)
        assert (len(frontend.calls), len(frontend.open)) == (5, 5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await frontend.idle.wait()


async def test_a_node_that_is_not_there_is_named_without_the_librarys_words():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ClusterError, match=r"no node answered \(.*\[Errno \d+\]|refused") as error:
        await fetch_cluster(address, timeout_s=0.0)
    assert "ssl" not in str(error.value) and address in str(error.value)
